"""
Opens kept content and seals samples: the part of a harvest that touches keys.

A sample is sealed under the key that wraps its request's body, never under a newer one: every erasure of the
request destroys that key, so no copy of the database can hold a readable sample.  Sealing checks afterwards
that the key is still in use; erasing retires the key before it reads rows: one of them sees the
other.  Fails closed.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from appliance.audit.content.payload_keys import PayloadKeys, Purpose, TenantKey, load_master_key
from appliance.audit.content.payloads import Payload
from appliance.audit.content.samples import SampleOutcome, SqlSampleStore
from appliance.audit.content.sealing import Part, open_sealed, open_unlogged, place, seal, unwrap
from appliance.audit.entry import format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.store import AuditStore, SqlAuditStore
from appliance.drafts.harvest.conversation import Skipped
from appliance.drafts.harvest.sample import SALT_BYTES, TrainingSample, decode_sample, encode_sample
from appliance.errors import AuditKeyError, AuditVerificationError, DraftRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings

TRIES = 5
PAUSE_SECONDS = 0.2
"""Pause between two reads of something that an erasure is changing."""


class ContentVault:
    """The site's content, samples and keys; used by one thread."""

    def __init__(
        self,
        *,
        store: SqlSampleStore,
        log: AuditStore,
        keys: PayloadKeys,
        origin: str,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        sleep: Callable[[float], None],
    ) -> None:
        self.store = store
        self._log = log
        self._keys = keys
        self._origin = origin
        self._clock = clock
        self._random_bytes = random_bytes
        self._sleep = sleep
        self._lost: set[str] = set()
        """Keys given up on; an id is never reused."""

    def open_content(self, request_id: str, tenant: str) -> tuple[bytes, bytes] | Skipped:
        """Body and answer, checked against the log's digests and tenant."""
        found: dict[Part, bytes] = {}
        for leaf in self._log.leaf_by_request(request_id):
            entry = json.loads(leaf.leaf)
            if "payload_digest" in entry:
                part = Part.REQUEST if leaf.type == EntryType.REQUEST_INTENT else Part.RESPONSE
                opened = self._open_logged(request_id, part, entry, tenant)
                if isinstance(opened, Skipped):
                    return opened
                found[part] = opened
        if found.keys() != {Part.REQUEST, Part.RESPONSE}:
            return Skipped.ERASED
        return found[Part.REQUEST], found[Part.RESPONSE]

    def keep(self, sample: TrainingSample) -> TrainingSample | Skipped:
        """
        Store a sample with its request's content; durable on return.

        The same tokens keep the stored sample, so a harvest can be repeated after a crash.  Returns the
        stored sample with its salt, or why there is none.
        """
        for attempt in range(TRIES):
            if attempt:
                self._sleep(PAUSE_SECONDS)
            old = self.store.get(sample.request_id, Part.SAMPLE)
            stored = None if old is None else self._stored(sample.request_id)
            if stored is not None and replace(stored, salt="") == sample:
                return stored
            body = self.store.get(sample.request_id, Part.REQUEST)
            if body is None or body.tenant != sample.tenant:
                return Skipped.ERASED
            key = self._key_in_use(body.key_id)
            if key is None:
                continue  # being destroyed: another key will wrap the body, or the body will be erased
            salted = replace(sample, salt=self._random_bytes(SALT_BYTES).hex())
            sealed = self._sealed(salted, key)
            done = self.store.add_sample(sealed, instead_of=old)
            if done is SampleOutcome.GONE:
                return Skipped.ERASED
            # A crash before the next lines may leave a sample under a destroyed key: unreadable, erased
            # with its request, and replaced by the next harvest.
            if done is SampleOutcome.KEPT and self._keys.is_in_use(key.key_id, Purpose.WRAPPING):
                return salted
            if done is SampleOutcome.KEPT:
                self.store.remove_sample(sealed)
        return Skipped.ERASED

    def read(self, request_id: str) -> TrainingSample | None:
        """Open the sample of a request; None if it was erased, DraftRefusedError if it was altered."""
        where = place(self._origin, request_id, Part.SAMPLE)
        try:
            opened = self._data_key(request_id, Part.SAMPLE)
            if opened is None:
                return None
            payload, data_key = opened
            sample = decode_sample(open_unlogged(payload.sealed.blob, where, data_key))
        except AuditVerificationError as error:
            raise DraftRefusedError(
                f"the sample of request {request_id} cannot be decrypted: {error}"
            ) from error
        if (sample.request_id, sample.tenant) != (request_id, payload.tenant):
            raise DraftRefusedError(
                f"the sample of request {request_id} belongs to another tenant: harvest again"
            )
        return sample

    def _stored(self, request_id: str) -> TrainingSample | None:
        """The stored sample; None if it cannot be read, so that it is replaced."""
        try:
            return self.read(request_id)
        except DraftRefusedError:
            return None

    def _open_logged(
        self, request_id: str, part: Part, entry: dict[str, Any], tenant: str
    ) -> bytes | Skipped:
        try:
            opened = self._data_key(request_id, part)
            if opened is None:
                return Skipped.ERASED
            payload, data_key = opened
            if {entry.get("tenant"), payload.tenant} != {tenant}:
                return Skipped.ALTERED
            return open_sealed(
                payload.sealed.blob,
                place(self._origin, request_id, part),
                data_key,
                digest=entry["payload_digest"],
                commitment=entry["payload_commitment"],
            )
        except AuditVerificationError:
            return Skipped.ALTERED

    def _data_key(self, request_id: str, part: Part) -> tuple[Payload, bytes] | None:
        """
        A stored part and its data key; None if it was erased, is being erased, or its key is elsewhere.

        A key whose destruction has begun opens nothing: the part may be what is erased.
        """
        for tries_left in reversed(range(TRIES)):
            payload = self.store.get(request_id, part)
            if payload is None or payload.key_id in self._lost:
                return None
            key = self._key_in_use(payload.key_id)
            if key is not None:
                return payload, unwrap(payload.sealed.wrapped_key, key.key)
            again = self.store.get(request_id, part)
            is_destroyed = self._keys.find(payload.key_id, Purpose.WRAPPING) is None
            if not tries_left or (is_destroyed and again == payload):
                self._lost.add(payload.key_id)
                return None
            self._sleep(PAUSE_SECONDS)
        return None

    def _key_in_use(self, key_id: str) -> TenantKey | None:
        name = self._keys.find(key_id, Purpose.WRAPPING)
        if name is None or name.is_retired:
            return None
        try:
            return self._keys.read(name)
        except AuditKeyError:
            if self._keys.is_in_use(key_id, Purpose.WRAPPING):
                raise
            return None  # retired between the two lines above

    def _sealed(self, sample: TrainingSample, key: TenantKey) -> Payload:
        where = place(self._origin, sample.request_id, Part.SAMPLE)
        sealed, _ = seal(encode_sample(sample), where, key.key, random_bytes=self._random_bytes)
        return Payload(
            request_id=sample.request_id,
            part=Part.SAMPLE,
            tenant=sample.tenant,
            key_id=key.key_id,
            sealed=sealed,
            time=format_time(int(self._clock() * 1000)),
        )


@contextmanager
def open_vault(
    settings: Settings,
    *,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = os.urandom,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[ContentVault]:
    audit, installation = settings.audit, locate(settings)
    master = audit.payload_master_key_file
    keys = PayloadKeys(
        installation.payload_keys,
        master_key=load_master_key(master) if master else None,
        key_days=audit.payload_rotation_days,
        clock=clock,
        random_bytes=random_bytes,
    )
    with closing(SqlAuditStore(installation.database_url)) as log:
        yield ContentVault(
            store=SqlSampleStore(log.database),
            log=log,
            keys=keys,
            origin=audit.origin,
            clock=clock,
            random_bytes=random_bytes,
            sleep=sleep,
        )
