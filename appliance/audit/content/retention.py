"""
Erases kept content: on request, by age (pruning), and not under the legal holds that forbid both.

    hold? ─► `erasure` entry durable, signed ─► keys retired
          ─► rows deleted ─► the rest rewrapped ─► keys destroyed

The entry comes first: content must never be missing without an entry that explains it.  The erasure waits
some seconds for a checkpoint that covers the entry, so that an export never misses content it cannot
explain.  A crash after the entry leaves content that the log declares erased: every start reads the entries
and completes them, also if a key was restored from a backup.

Copies of the database still have the deleted rows, with their wrapped data keys.  So the tenant's keys that
wrapped them are destroyed, and what else they wrapped is rewrapped: no row of such a copy under those keys
can be decrypted.

Fails closed: if holds or the log cannot be read or written, nothing is erased.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from appliance.audit.content.keeper import Keeper
from appliance.audit.content.payload_keys import KeyName, PayloadKeys, Purpose
from appliance.audit.content.payloads import Found, Selection, SqlPayloadStore
from appliance.audit.content.sealing import rewrap
from appliance.audit.entry import JSON, format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Receipt
from appliance.errors import AuditKeyError, AuditUnavailableError, ControlRefusedError, InvalidRequestError
from appliance.tenancy import NAME_FORMAT

LONGEST_REASON = 200
NAMED_PER_ENTRY = 60
"""Request ids in one entry: a leaf has 4096 bytes."""
NAMED_KEYS, NAMED_KEYS_WITH_REQUESTS = 20, 10
SIGNED_WITHIN_SECONDS = 5.0
POLL_SECONDS = 0.1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PRUNED = "its retention period has ended"
_REQUEST_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
T = TypeVar("T")


class ErasureLog(Protocol):
    async def append(self, entry_type: EntryType, /, **fields: JSON | None) -> Receipt:
        """Append one entry and return once it is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    tenant: str
    requests: tuple[str, ...]
    before_ms: int | None
    """Milliseconds since the epoch; None without requests: everything until now, keys included."""
    basis: str
    approved_by: str | None = None
    """Second administrator, if one was needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    tenant: str
    payloads: int
    keys: tuple[str, ...]
    """Tenant's keys that were destroyed."""
    entries: tuple[int, ...]
    """Indexes of its `erasure` entries."""


def parse_erasure(members: Mapping[str, Any]) -> Erasure:
    """Raises InvalidRequestError if a member is missing, unknown, or of the wrong form."""
    known = ("tenant", "requests", "before", "basis")
    unknown = sorted(members.keys() - set(known))
    if unknown:
        message = f"`{unknown[0]}` is not known here; use {', '.join(known)}."
        raise InvalidRequestError(message, param=unknown[0])
    requests = members.get("requests", [])
    if not isinstance(requests, list) or not all(
        isinstance(request, str) and _REQUEST_ID.fullmatch(request) for request in requests
    ):
        raise InvalidRequestError("`requests` must be a list of request ids.", param="requests")
    before = members.get("before")
    if before is not None and requests:
        raise InvalidRequestError("Name `requests` or a time `before`, not both.", param="before")
    return Erasure(
        tenant=parse_tenant(members),
        requests=tuple(sorted(set(requests))),
        before_ms=None if before is None else parse_moment(before, "before"),
        basis=parse_line(members, "basis"),
    )


def parse_tenant(members: Mapping[str, Any]) -> str:
    """Return the name of a tenant, which may be removed; raises InvalidRequestError."""
    value = members.get("tenant")
    if not isinstance(value, str) or not NAME_FORMAT.fullmatch(value):
        raise InvalidRequestError("`tenant` must be the name of a tenant.", param="tenant")
    return value


def parse_line(members: Mapping[str, Any], name: str) -> str:
    """Return a line of at most 200 characters; raises InvalidRequestError."""
    value = members.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_REASON or not value.isprintable():
        message = f"`{name}` must be one line of 1 to {LONGEST_REASON} characters."
        raise InvalidRequestError(message, param=name)
    return value


def parse_moment(value: object, name: str) -> int:
    """Return a time in RFC 3339, or a date in UTC, as milliseconds; raises InvalidRequestError."""
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else "")
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        milliseconds = (moment - EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError) as error:
        message = f"`{name}` must be a time such as 2026-11-20T23:59:59Z, or a date."
        raise InvalidRequestError(message, param=name) from error
    if not 0 <= milliseconds < 2**48:
        raise InvalidRequestError(f"`{name}` is too far away.", param=name)
    return milliseconds


class Retention:
    """Erases, prunes and holds, one at a time."""

    def __init__(
        self,
        *,
        log: ErasureLog,
        keeper: Keeper,
        clock: Callable[[], float],
        signed_within_seconds: float = SIGNED_WITHIN_SECONDS,
    ) -> None:
        self._log, self._keeper, self._clock = log, keeper, clock
        self._signed_within_seconds = signed_within_seconds
        # Within one gateway; a hold that another places at the same moment may come too late.
        self._turn = asyncio.Lock()

    async def resume(self) -> None:
        """
        Complete erasures that a crash interrupted, and destroy keys that a backup restored.

        After AuditUnavailableError not all of it was done: erased content may still open.
        """
        async with self._turn:
            await self._in_turn(lambda: finish_erasures(self._keeper.store, self._keeper.keys))

    async def erase(self, wanted: Erasure, *, actor: str) -> Erased:
        """
        Erase permanently, after recording it in the log.

        Raises ControlRefusedError if the tenant is under a legal hold, and AuditUnavailableError if nothing
        was erased, or not all: ask again.
        """
        async with self._turn:
            return await self._erase(wanted, actor)

    async def prune(self, before_ms: int, *, actor: str, approved_by: str | None = None) -> list[Erased]:
        """Erase everything from before a time, except for tenants under a hold."""
        async with self._turn:
            held = await self._in_turn(self._keeper.store.holds)
            tenants = await self._in_turn(lambda: self._keeper.store.tenants_before(before_ms))
            erased = []
            for tenant in tenants:
                if tenant not in held:
                    wanted = Erasure(
                        tenant=tenant,
                        requests=(),
                        before_ms=before_ms,
                        basis=PRUNED,
                        approved_by=approved_by,
                    )
                    erased.append(await self._erase(wanted, actor))
            return erased

    async def holds(self) -> dict[str, str]:
        return await self._in_turn(self._keeper.store.holds)

    async def place_hold(self, tenant: str, reason: str, *, actor: str) -> int:
        """Forbid erasing a tenant's content; returns the index of the entry."""
        async with self._turn:
            entry = await self._log.append(EntryType.HOLD_PLACED, tenant=tenant, reason=reason, actor=actor)
            return entry.index

    async def release_hold(
        self, tenant: str, reason: str, *, actor: str, approved_by: str | None = None
    ) -> int:
        """End a hold; returns the index of the entry.  Raises ControlRefusedError if there is none."""
        async with self._turn:
            if tenant not in await self._in_turn(self._keeper.store.holds):
                raise ControlRefusedError(f"there is no legal hold on {tenant}")
            entry = await self._log.append(
                EntryType.HOLD_RELEASED, tenant=tenant, reason=reason, actor=actor, approved_by=approved_by
            )
            return entry.index

    async def _in_turn(self, call: Callable[[], T]) -> T:
        try:
            return await self._keeper.in_turn(call)
        except AuditKeyError as error:
            raise AuditUnavailableError(str(error)) from error

    async def _erase(self, wanted: Erasure, actor: str) -> Erased:
        store, keys = self._keeper.store, self._keeper.keys
        held = await self._in_turn(store.holds)
        if wanted.tenant in held:
            raise ControlRefusedError(
                f"{wanted.tenant} is under a legal hold ({held[wanted.tenant]}): release it first"
            )
        # Never later than now: the entry must not explain content that is lost after it.
        now_ms = int(self._clock() * 1000) + 1
        selection = Selection(
            tenant=wanted.tenant,
            requests=wanted.requests,
            before_ms=now_ms if wanted.before_ms is None else min(now_ms, wanted.before_ms),
        )
        found = await self._in_turn(lambda: store.find(selection))
        everything = not wanted.requests and wanted.before_ms is None
        doomed = await self._in_turn(
            lambda: doomed_keys(keys, selection, found.key_ids, everything=everything)
        )
        if not found.payloads and not doomed:
            # After a crash, the entry may exist without its work.
            await self._in_turn(lambda: destroy_retired(store, keys))
            return Erased(tenant=wanted.tenant, payloads=0, keys=(), entries=())
        entries = [
            (await self._log.append(EntryType.ERASURE, **fields)).index
            for fields in _entries(selection, wanted, found, doomed, actor)
        ]
        await self._wait_until_signed(entries[-1])

        def destroy() -> None:
            for name in doomed:
                keys.retire(name)
            # A crash before this line, or any below: the next start completes it.
            store.delete(selection)
            destroy_retired(store, keys)
            store.scrub()

        await self._in_turn(destroy)
        return Erased(
            tenant=wanted.tenant,
            payloads=found.payloads,
            keys=tuple(name.key_id for name in doomed),
            entries=tuple(entries),
        )

    async def _wait_until_signed(self, index: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._signed_within_seconds):
                while await self._in_turn(self._keeper.store.signed_size) <= index:  # noqa: ASYNC110 - in the database
                    await asyncio.sleep(POLL_SECONDS)


def doomed_keys(
    keys: PayloadKeys, selection: Selection, key_ids: Collection[str], *, everything: bool
) -> list[KeyName]:
    """
    Return the keys that an erasure has to destroy.

    These are the keys that wrap erased content (`key_ids`).  With everything of a tenant, all of its keys.
    With everything before a time, all keys created before it, including those of files; keys of commitments
    only if they were replaced before it.
    """
    mine = keys.names(selection.tenant)
    if everything:
        return mine
    before_ms = 0 if selection.requests else selection.before_ms
    doomed = [
        name
        for name in mine
        if (name.purpose is Purpose.WRAPPING and (name.key_id in key_ids or name.made_ms < before_ms))
        or (name.purpose is Purpose.FILE and name.made_ms < before_ms)
    ]
    if not selection.requests:
        commitments = [name for name in mine if name.purpose is Purpose.COMMITMENT]
        doomed += [
            name for name, successor in pairwise(commitments) if successor.made_ms <= selection.before_ms
        ]
    return doomed


def finish_erasures(store: SqlPayloadStore, keys: PayloadKeys) -> None:
    """Complete every erasure in the log, except for tenants under a hold now."""
    held, erased = store.holds(), 0
    for _, entry in store.entries(EntryType.ERASURE):
        if entry["tenant"] in held:
            continue
        selection = Selection(
            tenant=entry["tenant"],
            requests=tuple(entry.get("requests", ())),
            before_ms=parse_moment(entry["before"], "before") if "before" in entry else 0,
        )
        named = entry.get("keys", ())
        doomed = {name for name in keys.names(entry["tenant"]) if name.key_id in named}
        doomed |= set(doomed_keys(keys, selection, named, everything=False))
        for name in doomed:
            keys.retire(name)
        erased += store.delete(selection) + len(doomed)
    destroy_retired(store, keys)
    if erased:
        store.scrub()


def destroy_retired(store: SqlPayloadStore, keys: PayloadKeys) -> None:
    """Rewrap what retired keys still wrap, then destroy them; after an AuditError a retry is safe."""
    for name in keys.names():
        if name.is_retired:
            _rewrap_all(store, keys, name)
            keys.destroy(name)


def _rewrap_all(store: SqlPayloadStore, keys: PayloadKeys, name: KeyName) -> None:
    # Overwritten: a crash interrupted its destruction, which began when it wrapped nothing.
    if name.purpose is not Purpose.WRAPPING or keys.is_overwritten(name):
        return
    old = keys.read(name)
    while rows := store.wrapped_with(name.key_id):
        new = keys.current(name.tenant, Purpose.WRAPPING)
        store.rewrap(
            [(request, part, rewrap(wrapped, old.key, new.key)) for request, part, wrapped in rows],
            new.key_id,
        )


def _entries(
    selection: Selection, wanted: Erasure, found: Found, doomed: Sequence[KeyName], actor: str
) -> list[dict[str, JSON | None]]:
    """Fields of the `erasure` entries: one, or several for many named requests."""
    about: dict[str, JSON | None] = {
        "tenant": wanted.tenant,
        "legal_basis": wanted.basis,
        "actor": actor,
        "approved_by": wanted.approved_by,
    }
    key_ids = tuple(name.key_id for name in doomed)
    if not wanted.requests:
        about["keys"] = key_ids if 0 < len(key_ids) <= NAMED_KEYS else None
        return [{**about, "payloads": found.payloads, "before": format_time(selection.before_ms)}]
    about["keys"] = key_ids if 0 < len(key_ids) <= NAMED_KEYS_WITH_REQUESTS else None
    entries: list[dict[str, JSON | None]] = []
    left = found.payloads
    for start in range(0, len(found.requests), NAMED_PER_ENTRY):
        named = found.requests[start : start + NAMED_PER_ENTRY]
        # The last of several entries has the rest of the count, so that the sum is right.
        last = start + NAMED_PER_ENTRY >= len(found.requests)
        count = left if last else min(left, len(named))
        left -= count
        entries.append({**about, "payloads": count, "requests": named})
    return entries
