"""
Files of tenants: taken in, given out, and removed when they are deleted, expire or are erased.

    bytes durable ─► `file.created` entry durable ─► row: the file exists
    row hidden ─► `file.deleted` entry durable ─► key and bytes removed ─► row forgotten

A crash between two steps leaves a draft that nobody can name, which a start removes, or a hidden
file, which a later sweep removes; its entry may then be there twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from appliance.audit.registry import EntryType
from appliance.audit.sink import AuditSink
from appliance.errors import (
    BatchConflictError,
    StorageQuotaError,
    StorageUnavailableError,
    StoredFileNotFoundError,
)
from appliance.gateway.batch.receiving import Receiving
from appliance.gateway.batch.store import Quota, SqlBatchStore, Window
from appliance.gateway.batch.stored_file import FILE_PREFIX, Deleted, Purpose, StoredFile
from appliance.gateway.batch.vault import Vault
from appliance.infra.settings import BatchSettings
from appliance.tenancy import Caller, ContentPolicy

DAY_SECONDS = 86_400
FORM_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What a client says about a file it sent."""

    filename: str
    purpose: Purpose
    kept_seconds: int | None
    """How long it is to be kept; None for as long as the settings say."""


class Files:
    """What is done with files; one for each gateway."""

    def __init__(
        self,
        *,
        store: SqlBatchStore,
        vault: Vault,
        audit: AuditSink,
        settings: BatchSettings,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._vault = vault
        self._audit = audit
        self._settings = settings
        self._clock = clock
        self._turn = asyncio.Lock()
        """Of who removes: an entry for each, not two."""
        self._quota = Quota(files=settings.tenant_files, size=settings.tenant_bytes)

    @property
    def max_form_bytes(self) -> int:
        """Largest body of an upload: a file, and what is around it in its form."""
        return self._settings.max_file_bytes + FORM_BYTES

    async def receive(self, caller: Caller) -> Receiving:
        """
        Begin to take a file in; `keep` or `discard` must follow.

        Raises:
            StorageQuotaError: the tenant keeps as much as it may.
            StorageUnavailableError: it cannot be written now.
        """
        tenant, sealed = caller.tenant.name, caller.tenant.content is ContentPolicy.ENCRYPTED
        await asyncio.to_thread(self._store.check_quota, tenant, self._quota, 0)
        if not await asyncio.to_thread(self._vault.has_room):
            raise StorageUnavailableError("The disk of files is nearly full. Tell the operator.")
        place = await asyncio.to_thread(self._vault.new_place, tenant, sealed=sealed)
        writer = await asyncio.to_thread(self._vault.write, place)
        return Receiving(caller, place, writer, sealed=sealed, max_bytes=self._settings.max_file_bytes)

    async def keep(self, receiving: Receiving, upload: Upload) -> StoredFile:
        """
        Make a file exist that has come whole; the log says so first.

        Raises:
            StorageQuotaError: the tenant would keep more than it may.
            StorageUnavailableError: it cannot be stored.
            AuditError: the log does not take the entry.
        """
        caller, size = receiving.caller, await receiving.finish()
        await asyncio.to_thread(self._store.check_quota, caller.tenant.name, self._quota, size)
        now = int(self._clock())
        stored = StoredFile(
            file_id=f"{FILE_PREFIX}{receiving.place.ulid}",
            tenant=caller.tenant.name,
            gateway=self._vault.gateway,
            filename=upload.filename,
            purpose=upload.purpose,
            size=size,
            sealed=receiving.sealed,
            created_at=now,
            expires_at=now + (upload.kept_seconds or self._settings.file_days * DAY_SECONDS),
        )
        await self.announce(stored, key_id=caller.key.key_id)
        try:
            await asyncio.to_thread(self._store.add_file, stored, self._quota)
        except StorageQuotaError:
            # Another upload came first; the entry above must not be the last word.
            await self._say_deleted(stored, Deleted.REFUSED, key_id=caller.key.key_id)
            raise
        # A crash before this line: the file is known, and the next start gives it its name.
        with suppress(StorageUnavailableError):
            await asyncio.to_thread(self._vault.publish, stored.file_id)
        return stored

    async def discard(self, receiving: Receiving) -> None:
        """Leave nothing of an upload that was not kept; raises StorageUnavailableError."""
        tenant, name = receiving.caller.tenant.name, f"{FILE_PREFIX}{receiving.place.ulid}"
        await asyncio.to_thread(receiving.writer.discard)
        await asyncio.to_thread(self._vault.remove, tenant, name)

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """Return a tenant's file; raises StoredFileNotFoundError."""
        stored = await asyncio.to_thread(self._store.file, tenant, file_id)
        if stored is None:
            raise StoredFileNotFoundError(f"There is no file `{file_id}`.")
        return stored

    async def list(self, tenant: str, window: Window, purpose: str | None = None) -> list[StoredFile]:
        """Return a tenant's files, one more than the window asks for if there are more."""
        return await asyncio.to_thread(self._store.files, tenant, window, purpose)

    async def read(self, stored: StoredFile) -> AsyncIterator[bytes]:
        """Yield a file piece by piece; raises StorageUnavailableError, at the latest at its end."""
        pieces = self._vault.read(stored)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    async def delete(self, caller: Caller, file_id: str) -> None:
        """
        Delete a tenant's file for good; another gateway's bytes go at that one's next sweep.

        Raises:
            StoredFileNotFoundError: there is none.
            BatchConflictError: an open batch reads it.
        """
        stored = await self.get(caller.tenant.name, file_id)
        if not await asyncio.to_thread(self._store.delete_file, stored.tenant, stored.file_id):
            raise BatchConflictError(f"An open batch reads `{file_id}`: cancel the batch first.")
        if stored.gateway == self._vault.gateway:
            async with self._turn:
                await self._remove(stored, Deleted.DELETED, key_id=caller.key.key_id)

    async def erase(self, tenant: str, before_ms: int) -> int:
        """Remove a tenant's files from before a time, and forget its ended batches; return how many files."""
        count = await asyncio.to_thread(self._store.erase_files, tenant, -(-before_ms // 1000))
        await self._remove_hidden()
        return count

    async def sweep(self) -> None:
        """Remove what has expired, what was hidden elsewhere, and what no key opens any more."""
        now = int(self._clock())
        await asyncio.to_thread(self._hide_what_is_over, now)
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

    def _hide_what_is_over(self, now: int) -> None:
        self._store.expire_files(self._vault.gateway, now)
        for stored in self._store.sealed_files(self._vault.gateway):
            if not self._vault.has_key(stored.tenant, stored.ulid):
                # The tenant's content was erased; what is left of the file is noise.
                self._store.hide_file(stored.file_id, Deleted.ERASED)

    async def _remove_hidden(self) -> None:
        async with self._turn:
            for stored, why in await asyncio.to_thread(self._store.hidden_files, self._vault.gateway):
                await self._remove(stored, why)

    async def _remove(self, stored: StoredFile, why: Deleted, *, key_id: str | None = None) -> None:
        await self._say_deleted(stored, why, key_id=key_id)
        await asyncio.to_thread(self._vault.remove, stored.tenant, stored.file_id)
        # A crash before this line: the row is still hidden, and the next sweep comes back to it.
        await asyncio.to_thread(self._store.forget_file, stored.file_id)

    async def _say_deleted(self, stored: StoredFile, why: Deleted, *, key_id: str | None) -> None:
        entry = self._audit.submit(
            EntryType.FILE_DELETED,
            tenant=stored.tenant,
            key_id=key_id,
            file=stored.file_id,
            reason=str(why),
        )
        await self._audit.confirm(entry)
