"""
Batches as clients see them: made, looked at, listed, cancelled.  Running them is `runner`'s.
"""

import asyncio
from collections.abc import Callable

from appliance.audit.registry import EntryType
from appliance.audit.sink import AuditSink
from appliance.errors import (
    BatchConflictError,
    BatchNotFoundError,
    InvalidRequestError,
    StorageUnavailableError,
)
from appliance.gateway.batch.batch import BATCH_PREFIX, ENDED, Batch, Status
from appliance.gateway.batch.files import DAY_SECONDS, Files
from appliance.gateway.batch.order import BatchOrder
from appliance.gateway.batch.store import SqlBatchStore, Window
from appliance.gateway.batch.stored_file import Purpose
from appliance.gateway.batch.vault import Vault
from appliance.infra.settings import BatchSettings
from appliance.tenancy import Caller, ContentPolicy


class Batches:
    """What is done with batches; one for each gateway."""

    def __init__(
        self,
        *,
        store: SqlBatchStore,
        vault: Vault,
        files: Files,
        audit: AuditSink,
        settings: BatchSettings,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """Args: `wake` tells the runner that there is something new for it; the others as they are named."""
        self._store = store
        self._vault = vault
        self._files = files
        self._audit = audit
        self._settings = settings
        self._clock = clock
        self._wake = wake

    async def create(self, caller: Caller, order: BatchOrder, *, client: str) -> Batch:
        """
        Take a batch in; it runs later, by the gateway that has its file.

        Args:
            caller: whose it is, and under whose key its lines run.
            order: what is asked for.
            client: class of the address it came from.

        Raises:
            StoredFileNotFoundError: its input is no file of the tenant.
            InvalidRequestError: its input is not for batches.
            StorageQuotaError: the tenant has too many open batches.
            StorageUnavailableError: another gateway has the input, or something cannot be stored.
            AuditError: the log does not take the entry.
        """
        tenant = caller.tenant.name
        stored = await self._files.get(tenant, order.input_file_id)
        if stored.purpose is not Purpose.BATCH:
            message = f"`{stored.file_id}` has the purpose `{stored.purpose}`: upload one for `batch`."
            raise InvalidRequestError(message, param="input_file_id")
        if not await asyncio.to_thread(self._vault.has_bytes, stored):
            raise StorageUnavailableError(
                f"The bytes of `{stored.file_id}` are with another gateway: ask it."
            )
        sealed = caller.tenant.content is ContentPolicy.ENCRYPTED
        place = await asyncio.to_thread(self._vault.new_place, tenant, sealed=sealed)
        now = int(self._clock())
        batch = Batch(
            batch_id=f"{BATCH_PREFIX}{place.ulid}",
            tenant=tenant,
            key_id=caller.key.key_id,
            gateway=self._vault.gateway,
            client=client,
            endpoint=order.endpoint,
            completion_window=order.completion_window,
            input_file_id=stored.file_id,
            sealed=sealed,
            status=Status.VALIDATING,
            metadata=order.metadata,
            output_seconds=order.output_seconds or self._settings.file_days * DAY_SECONDS,
            created_at=now,
            expires_at=now + order.window_seconds,
        )
        # A crash after the entry: a batch that was asked for, and never was; its client heard of none.
        entry = self._audit.submit(
            EntryType.BATCH_CREATED,
            tenant=tenant,
            key_id=caller.key.key_id,
            batch=batch.batch_id,
            file=stored.file_id,
            route=batch.endpoint,
        )
        await self._audit.confirm(entry)
        await asyncio.to_thread(self._store.add_batch, batch, self._settings.tenant_batches)
        self._wake()
        return batch

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Return a tenant's batch; raises BatchNotFoundError."""
        batch = await asyncio.to_thread(self._store.batch, tenant, batch_id)
        if batch is None:
            raise BatchNotFoundError(f"There is no batch `{batch_id}`.")
        return batch

    async def list(self, tenant: str, window: Window) -> list[Batch]:
        """Return a tenant's batches, one more than the window asks for if there are more."""
        return await asyncio.to_thread(self._store.batches, tenant, window)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """
        Begin to cancel a batch; lines under way are stopped, what is done stays done.

        Raises:
            BatchNotFoundError: there is none.
            BatchConflictError: it has ended, or nearly.
        """
        batch = await self.get(tenant, batch_id)
        if batch.status is Status.CANCELLING:
            return batch
        moved = await asyncio.to_thread(
            self._store.move, batch.batch_id, Status.CANCELLING, int(self._clock())
        )
        batch = await self.get(tenant, batch_id)
        if not moved and (batch.status in ENDED or batch.status is Status.FINALIZING):
            raise BatchConflictError(f"`{batch_id}` is {batch.status} and cannot be cancelled any more.")
        self._wake()
        return batch
