"""
Tenants' files: stored, read, and removed when they are deleted, expire or are erased.

    size reserved ─► bytes durable ─► `file.created` entry durable ─► row: the file exists
    row hidden ─► `file.deleted` entry durable ─► key and bytes removed ─► row forgotten

A crash between two steps leaves a draft and its reservation, which the next start removes, or a hidden
file, which a later sweep removes; its entry may then appear twice.  The reservation of a gateway that does
not start again is removed by any other after its time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from appliance.audit.entry_types import EntryType
from appliance.audit.sink import AuditSink
from appliance.errors import (
    BatchConflictError,
    BodyTooLargeError,
    StorageUnavailableError,
    StoredFileNotFoundError,
)
from appliance.gateway.batch.batch import FILE_PREFIX, Deleted, FilePurpose, StoredFile
from appliance.gateway.batch.bounds import TENANT_UPLOADS, UPLOADS, StorageThreads, TenantSlots
from appliance.gateway.batch.store import SqlBatchStore, StorageQuota, Window
from appliance.gateway.batch.vault import FileVault, FileWriter
from appliance.infra.settings import BatchSettings
from appliance.tenancy import Caller, ContentPolicy

GATHERED_BYTES = 262_144  # per write to disk


class IncomingFile:
    """An upload and its reservation; in `TenantFiles.receive`."""

    def __init__(
        self, caller: Caller, reserved: StoredFile, writer: FileWriter, threads: StorageThreads
    ) -> None:
        self.caller = caller
        self.reserved = reserved
        self.writer = writer
        self.is_kept = False
        self._threads = threads
        self._gathered = bytearray()

    @property
    def unwritten_bytes(self) -> int:
        """Reserved on the disk, and not yet taken from it."""
        return self.reserved.size - self.writer.size

    async def write(self, data: bytes) -> None:
        """Raises BodyTooLargeError or StorageUnavailableError."""
        if len(self._gathered) + len(data) > self.unwritten_bytes:
            raise BodyTooLargeError(f"A file may have at most {self.reserved.size} bytes. Split it.")
        self._gathered += data
        if len(self._gathered) >= GATHERED_BYTES:
            await self._flush()

    async def finish(self) -> int:
        """Make the file durable; return its size in bytes.  Raises StorageUnavailableError."""
        await self._flush()
        await self._threads.run(self.writer.finish)
        return self.writer.size

    async def _flush(self) -> None:
        data, self._gathered = self._gathered, bytearray()
        await self._threads.run(self.writer.write, data)


DAY_SECONDS = 86_400
FORM_BYTES = 65_536
KEEPING_SECONDS = 3600
"""A reservation's time after `batch.upload_seconds`: for flushing the file, and for the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    filename: str
    purpose: FilePurpose
    kept_seconds: int | None  # None for the default


class TenantFiles:
    """One instance per gateway."""

    def __init__(
        self,
        *,
        store: SqlBatchStore,
        vault: FileVault,
        audit: AuditSink,
        settings: BatchSettings,
        threads: StorageThreads,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._vault = vault
        self._audit = audit
        self._settings = settings
        self._clock = clock
        self._run = threads.run
        self._threads = threads
        self._slots = TenantSlots("uploads", per_tenant=TENANT_UPLOADS, total=UPLOADS)
        self._incoming: set[IncomingFile] = set()
        self._turn = asyncio.Lock()  # serialises removals: one entry for each file
        self._quota = StorageQuota(files=settings.tenant_files, size=settings.tenant_bytes)

    @property
    def max_form_bytes(self) -> int:
        """Of an upload: a file and its multipart form."""
        return self._settings.max_file_bytes + FORM_BYTES

    @property
    def upload_seconds(self) -> float:
        return self._settings.upload_seconds

    @asynccontextmanager
    async def receive(self, caller: Caller, body_bytes: int | None) -> AsyncIterator[IncomingFile]:
        """
        Receive an upload, whose size counts against quota and disk until the block ends.

        `body_bytes` is the size of its form, None if the client did not say.  What `keep` has not kept is
        removed.  Raises AtCapacityError, StorageQuotaError or StorageUnavailableError.
        """
        tenant, sealed = caller.tenant.name, caller.tenant.content is ContentPolicy.ENCRYPTED
        size = self._settings.max_file_bytes
        size = min(size, self._settings.tenant_bytes if body_bytes is None else body_bytes)
        with self._slots.taken(tenant):
            await self.check_quota(tenant, more_files=1, more_bytes=size)
            place = await self._run(partial(self._vault.new_place, tenant, sealed=sealed))
            now = int(self._clock())
            reserved = StoredFile(
                file_id=f"{FILE_PREFIX}{place.ulid}",
                tenant=tenant,
                gateway=self._vault.gateway,
                filename="",
                purpose=FilePurpose.BATCH,
                size=size,
                sealed=sealed,
                created_at=now,
                expires_at=now + int(self.upload_seconds) + KEEPING_SECONDS,
            )
            incoming = IncomingFile(caller, reserved, self._vault.write(place), self._threads)
            self._incoming.add(incoming)
            try:
                await self._run(self._store.reserve_file, reserved, self._quota)
                await self._run(self._vault.check_room, sum(each.unwritten_bytes for each in self._incoming))
                yield incoming
            finally:
                self._incoming.discard(incoming)
                if not incoming.is_kept:
                    await self._discard(incoming)

    async def keep(self, incoming: IncomingFile, upload: Upload) -> StoredFile:
        """
        Make a complete upload visible, after its audit entry.

        Raises StorageUnavailableError, or AuditError if the log does not take the entry.
        """
        size, now = await incoming.finish(), int(self._clock())
        stored = replace(
            incoming.reserved,
            filename=upload.filename,
            purpose=upload.purpose,
            size=size,
            created_at=now,
            expires_at=now + (upload.kept_seconds or self._settings.file_days * DAY_SECONDS),
        )
        key_id = incoming.caller.key.key_id
        await self.announce(stored, key_id=key_id)
        if not await self._run(self._store.add_file, stored):
            # Its reservation has expired; the entry above needs a correction.
            await self._record_deleted(stored, Deleted.REFUSED, key_id=key_id)
            raise StorageUnavailableError("The upload took too long to be stored. Send it again.")
        incoming.is_kept = True
        # A crash before this line: the row exists, and the next start renames the draft.
        with suppress(StorageUnavailableError):
            await self._run(self._vault.publish, stored.file_id)
        return stored

    async def _discard(self, incoming: IncomingFile) -> None:
        reserved = incoming.reserved
        await self._run(incoming.writer.discard)
        await self._run(self._vault.remove, reserved.tenant, reserved.file_id)
        # A crash before this line: the next start removes the reservation.
        await self._run(self._store.forget_reservation, reserved.file_id)

    async def check_quota(self, tenant: str, *, more_files: int = 0, more_bytes: int = 0) -> None:
        """Raise StorageQuotaError if the tenant's storage, with so much more, exceeds its quota."""
        check = partial(self._store.check_quota, more_files=more_files, more_bytes=more_bytes)
        await self._run(check, tenant, self._quota)

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """Raises StoredFileNotFoundError."""
        stored = await self._run(self._store.file, tenant, file_id)
        if stored is None:
            raise StoredFileNotFoundError(f"There is no file `{file_id}`.")
        return stored

    async def list(self, tenant: str, window: Window, purpose: str | None = None) -> list[StoredFile]:
        """One more than the window's limit if there are more."""
        return await self._threads.run_alone(self._store.files, tenant, window, purpose)

    async def read(self, stored: StoredFile) -> AsyncIterator[bytes]:
        """Yield it piece by piece; raises StorageUnavailableError, at the latest at its end."""
        pieces = self._vault.read(stored)
        while (piece := await self._run(next, pieces, None)) is not None:
            yield piece

    async def delete(self, caller: Caller, file_id: str) -> None:
        """
        Delete a tenant's file; if another gateway has the bytes, that gateway's next sweep removes them.

        Raises StoredFileNotFoundError, or BatchConflictError if an open batch reads it.
        """
        stored = await self.get(caller.tenant.name, file_id)
        if not await self._run(self._store.delete_file, stored.tenant, stored.file_id):
            raise BatchConflictError(f"An open batch reads `{file_id}`: cancel the batch first.")
        if stored.gateway == self._vault.gateway:
            async with self._turn:
                await self._remove(stored, Deleted.DELETED, key_id=caller.key.key_id)

    async def erase(self, tenant: str, before_ms: int | None) -> int:
        """Remove a tenant's files and ended batches, all or from before a time; return how many files."""
        before_s = None if before_ms is None else -(-before_ms // 1000)
        count = await self._run(self._store.erase_files, tenant, before_s)
        await self._remove_hidden()
        return count

    def recover(self) -> None:
        """Publish or remove what a crash left; synchronous, before anything is written."""
        self._vault.sweep(*self._store.known(self._vault.gateway))
        for reserved in self._store.reservations(self._vault.gateway):
            self._vault.remove(reserved.tenant, reserved.file_id)
            self._store.forget_reservation(reserved.file_id)

    async def sweep(self) -> None:
        """Remove files that expired, were hidden by another gateway, or whose key was destroyed."""
        now = int(self._clock())
        await self._run(self._hide_expired, now)
        await self._remove_hidden()

    async def announce(self, stored: StoredFile, *, key_id: str, batch_id: str | None = None) -> None:
        """Write a file's `file.created` entry; durable on return, raises AuditError."""
        await self._audit.confirm(
            self._audit.submit(
                EntryType.FILE_CREATED,
                tenant=stored.tenant,
                key_id=key_id,
                file=stored.file_id,
                purpose=str(stored.purpose),
                bytes=stored.size,
                encrypted=stored.sealed,
                batch=batch_id,
            )
        )

    def _hide_expired(self, now: int) -> None:
        self._store.expire_files(self._vault.gateway, now)
        self._store.expire_reservations(now)
        for stored in self._store.sealed_files(self._vault.gateway):
            if not self._vault.has_key(stored.tenant, stored.ulid):
                # The tenant's content was erased; the bytes cannot be decrypted.
                self._store.hide_file(stored.file_id, Deleted.ERASED)

    async def _remove_hidden(self) -> None:
        async with self._turn:
            for stored, why in await self._run(self._store.hidden_files, self._vault.gateway):
                await self._remove(stored, why)

    async def _remove(self, stored: StoredFile, why: Deleted, *, key_id: str | None = None) -> None:
        await self._record_deleted(stored, why, key_id=key_id)
        await self._run(self._vault.remove, stored.tenant, stored.file_id)
        # A crash before this line: the row is still hidden, and the next sweep removes it again.
        await self._run(self._store.forget_file, stored.file_id)

    async def _record_deleted(self, stored: StoredFile, why: Deleted, *, key_id: str | None) -> None:
        entry = self._audit.submit(
            EntryType.FILE_DELETED, tenant=stored.tenant, key_id=key_id, file=stored.file_id, reason=str(why)
        )
        await self._audit.confirm(entry)
