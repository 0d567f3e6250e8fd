"""
Tenants' files: stored, read, and removed when they are deleted, expire or are erased.

    bytes durable ─► `file.created` entry durable ─► row: the file exists
    row hidden ─► `file.deleted` entry durable ─► key and bytes removed ─► row forgotten

A crash between two steps leaves a draft without a row, which the next start removes, or a hidden
file, which a later sweep removes; its entry may then appear twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from appliance.audit.entry_types import EntryType
from appliance.audit.sink import AuditSink
from appliance.errors import (
    BatchConflictError,
    BodyTooLargeError,
    StorageQuotaError,
    StorageUnavailableError,
    StoredFileNotFoundError,
)
from appliance.gateway.batch.batch import FILE_PREFIX, Deleted, FilePurpose, StoredFile
from appliance.gateway.batch.store import SqlBatchStore, StorageQuota, Window
from appliance.gateway.batch.vault import FileVault, FileWriter, Place
from appliance.infra.settings import BatchSettings
from appliance.tenancy import Caller, ContentPolicy

GATHERED_BYTES = 262_144  # per write to disk


class IncomingFile:
    """Ended by `TenantFiles.keep` or `TenantFiles.discard`."""

    def __init__(
        self, caller: Caller, place: Place, writer: FileWriter, *, sealed: bool, max_bytes: int
    ) -> None:
        self.caller = caller
        self.place = place
        self.sealed = sealed
        self.writer = writer
        self._max_bytes = max_bytes
        self._gathered = bytearray()

    async def write(self, data: bytes) -> None:
        """Raises BodyTooLargeError or StorageUnavailableError."""
        if self.writer.size + len(self._gathered) + len(data) > self._max_bytes:
            raise BodyTooLargeError(f"A file may have at most {self._max_bytes} bytes. Split it.")
        self._gathered += data
        if len(self._gathered) >= GATHERED_BYTES:
            await self._flush()

    async def finish(self) -> int:
        """Make the file durable; return its size in bytes.  Raises StorageUnavailableError."""
        await self._flush()
        await asyncio.to_thread(self.writer.finish)
        return self.writer.size

    async def _flush(self) -> None:
        data = bytes(self._gathered)
        self._gathered.clear()
        await asyncio.to_thread(self.writer.write, data)


DAY_SECONDS = 86_400
FORM_BYTES = 65_536


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
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._vault = vault
        self._audit = audit
        self._settings = settings
        self._clock = clock
        self._turn = asyncio.Lock()  # serialises removals: one entry for each file
        self._quota = StorageQuota(files=settings.tenant_files, size=settings.tenant_bytes)

    @property
    def max_form_bytes(self) -> int:
        """Of an upload: a file and its multipart form."""
        return self._settings.max_file_bytes + FORM_BYTES

    async def receive(self, caller: Caller) -> IncomingFile:
        """
        Begin an upload; `keep` or `discard` must follow.

        Raises StorageQuotaError or StorageUnavailableError.
        """
        tenant, sealed = caller.tenant.name, caller.tenant.content is ContentPolicy.ENCRYPTED
        await asyncio.to_thread(self._store.check_quota, tenant, self._quota, 0)
        if not await asyncio.to_thread(self._vault.has_room):
            raise StorageUnavailableError("The disk of files is nearly full. Ask the operator to free space.")
        place = await asyncio.to_thread(self._vault.new_place, tenant, sealed=sealed)
        writer = await asyncio.to_thread(self._vault.write, place)
        return IncomingFile(caller, place, writer, sealed=sealed, max_bytes=self._settings.max_file_bytes)

    async def keep(self, incoming: IncomingFile, upload: Upload) -> StoredFile:
        """
        Make a complete upload visible, after its audit entry.

        Raises StorageQuotaError, StorageUnavailableError, or AuditError if the log does not take the entry.
        """
        caller, size = incoming.caller, await incoming.finish()
        await asyncio.to_thread(self._store.check_quota, caller.tenant.name, self._quota, size)
        now = int(self._clock())
        stored = StoredFile(
            file_id=f"{FILE_PREFIX}{incoming.place.ulid}",
            tenant=caller.tenant.name,
            gateway=self._vault.gateway,
            filename=upload.filename,
            purpose=upload.purpose,
            size=size,
            sealed=incoming.sealed,
            created_at=now,
            expires_at=now + (upload.kept_seconds or self._settings.file_days * DAY_SECONDS),
        )
        await self.announce(stored, key_id=caller.key.key_id)
        try:
            await asyncio.to_thread(self._store.add_file, stored, self._quota)
        except StorageQuotaError:
            # A parallel upload came first; the entry above needs a correction.
            await self._record_deleted(stored, Deleted.REFUSED, key_id=caller.key.key_id)
            raise
        # A crash before this line: the row exists, and the next start renames the draft.
        with suppress(StorageUnavailableError):
            await asyncio.to_thread(self._vault.publish, stored.file_id)
        return stored

    async def discard(self, incoming: IncomingFile) -> None:
        """Raises StorageUnavailableError."""
        tenant, name = incoming.caller.tenant.name, f"{FILE_PREFIX}{incoming.place.ulid}"
        await asyncio.to_thread(incoming.writer.discard)
        await asyncio.to_thread(self._vault.remove, tenant, name)

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """Raises StoredFileNotFoundError."""
        stored = await asyncio.to_thread(self._store.file, tenant, file_id)
        if stored is None:
            raise StoredFileNotFoundError(f"There is no file `{file_id}`.")
        return stored

    async def list(self, tenant: str, window: Window, purpose: str | None = None) -> list[StoredFile]:
        """One more than the window's limit if there are more."""
        return await asyncio.to_thread(self._store.files, tenant, window, purpose)

    async def read(self, stored: StoredFile) -> AsyncIterator[bytes]:
        """Yield it piece by piece; raises StorageUnavailableError, at the latest at its end."""
        pieces = self._vault.read(stored)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    async def delete(self, caller: Caller, file_id: str) -> None:
        """
        Delete a tenant's file; if another gateway has the bytes, that gateway's next sweep removes them.

        Raises StoredFileNotFoundError, or BatchConflictError if an open batch reads it.
        """
        stored = await self.get(caller.tenant.name, file_id)
        if not await asyncio.to_thread(self._store.delete_file, stored.tenant, stored.file_id):
            raise BatchConflictError(f"An open batch reads `{file_id}`: cancel the batch first.")
        if stored.gateway == self._vault.gateway:
            async with self._turn:
                await self._remove(stored, Deleted.DELETED, key_id=caller.key.key_id)

    async def erase(self, tenant: str, before_ms: int) -> int:
        """Remove a tenant's files and ended batches from before a time; return the number of files."""
        count = await asyncio.to_thread(self._store.erase_files, tenant, -(-before_ms // 1000))
        await self._remove_hidden()
        return count

    async def sweep(self) -> None:
        """Remove files that expired, were hidden by another gateway, or whose key was destroyed."""
        now = int(self._clock())
        await asyncio.to_thread(self._hide_expired, now)
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
        for stored in self._store.sealed_files(self._vault.gateway):
            if not self._vault.has_key(stored.tenant, stored.ulid):
                # The tenant's content was erased; the bytes cannot be decrypted.
                self._store.hide_file(stored.file_id, Deleted.ERASED)

    async def _remove_hidden(self) -> None:
        async with self._turn:
            for stored, why in await asyncio.to_thread(self._store.hidden_files, self._vault.gateway):
                await self._remove(stored, why)

    async def _remove(self, stored: StoredFile, why: Deleted, *, key_id: str | None = None) -> None:
        await self._record_deleted(stored, why, key_id=key_id)
        await asyncio.to_thread(self._vault.remove, stored.tenant, stored.file_id)
        # A crash before this line: the row is still hidden, and the next sweep removes it again.
        await asyncio.to_thread(self._store.forget_file, stored.file_id)

    async def _record_deleted(self, stored: StoredFile, why: Deleted, *, key_id: str | None) -> None:
        entry = self._audit.submit(
            EntryType.FILE_DELETED, tenant=stored.tenant, key_id=key_id, file=stored.file_id, reason=str(why)
        )
        await self._audit.confirm(entry)
