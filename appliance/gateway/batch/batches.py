"""Batches as clients see them: created, read, listed, cancelled.  The runner runs them."""

from collections.abc import Callable
from functools import partial

from appliance.audit.entry_types import EntryType
from appliance.audit.sink import AuditSink
from appliance.errors import (
    BatchConflictError,
    BatchNotFoundError,
    InvalidRequestError,
    StorageUnavailableError,
)
from appliance.gateway.batch.batch import BATCH_PREFIX, ENDED, Batch, FilePurpose, Status, before
from appliance.gateway.batch.bounds import StorageThreads
from appliance.gateway.batch.files import DAY_SECONDS, TenantFiles
from appliance.gateway.batch.request import BatchRequest
from appliance.gateway.batch.store import SqlBatchStore, Window
from appliance.gateway.batch.vault import FileVault
from appliance.infra.settings import BatchSettings
from appliance.tenancy import Caller, ContentPolicy


class Batches:
    """One instance per gateway.  `wake` wakes the runner."""

    def __init__(
        self,
        *,
        store: SqlBatchStore,
        vault: FileVault,
        files: TenantFiles,
        audit: AuditSink,
        settings: BatchSettings,
        threads: StorageThreads,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._vault = vault
        self._files = files
        self._audit = audit
        self._settings = settings
        self._threads = threads
        self._run = threads.run
        self._clock = clock
        self._wake = wake

    async def create(self, caller: Caller, request: BatchRequest, *, client: str) -> Batch:
        """
        Create a batch; the gateway that has its file runs it later, under the caller's key.

        Raises StoredFileNotFoundError, InvalidRequestError (its input is not for batches), StorageQuotaError
        (storage used up, too many open batches), StorageUnavailableError (also if another gateway has the
        input) or AuditError.
        """
        tenant = caller.tenant.name
        stored = await self._files.get(tenant, request.input_file_id)
        if stored.purpose is not FilePurpose.BATCH:
            message = f"`{stored.file_id}` has the purpose `{stored.purpose}`: upload one for `batch`."
            raise InvalidRequestError(message, param="input_file_id")
        if not await self._run(self._vault.has_bytes, stored):
            raise StorageUnavailableError(
                f"The bytes of `{stored.file_id}` are with another gateway: ask it."
            )
        # Its outputs are stored whatever their size, so a tenant beyond its quota gets no further batch.
        await self._files.check_quota(tenant)
        sealed = caller.tenant.content is ContentPolicy.ENCRYPTED
        place = await self._run(partial(self._vault.new_place, tenant, sealed=sealed))
        now = int(self._clock())
        batch = Batch(
            batch_id=f"{BATCH_PREFIX}{place.ulid}",
            tenant=tenant,
            key_id=caller.key.key_id,
            gateway=self._vault.gateway,
            client=client,
            endpoint=request.endpoint,
            completion_window=request.completion_window,
            input_file_id=stored.file_id,
            sealed=sealed,
            status=Status.VALIDATING,
            metadata=request.metadata,
            output_seconds=request.output_seconds or self._settings.file_days * DAY_SECONDS,
            created_at=now,
            expires_at=now + request.window_seconds,
        )
        # A crash after the entry: the batch was not created, and its client got no answer.
        entry = self._audit.submit(
            EntryType.BATCH_CREATED,
            tenant=tenant,
            key_id=caller.key.key_id,
            batch=batch.batch_id,
            file=stored.file_id,
            route=batch.endpoint,
        )
        await self._audit.confirm(entry)
        await self._run(self._store.add_batch, batch, self._settings.tenant_batches)
        self._wake()
        return batch

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises BatchNotFoundError."""
        batch = await self._run(self._store.batch, tenant, batch_id)
        if batch is None:
            raise BatchNotFoundError(f"There is no batch `{batch_id}`.")
        return batch

    async def list(self, tenant: str, window: Window) -> list[Batch]:
        """One more than the window's limit if there are more."""
        return await self._threads.run_alone(self._store.batches, tenant, window)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """
        Begin to cancel a batch: lines in flight are aborted, finished results are kept.

        Raises BatchNotFoundError, or BatchConflictError if it has ended or is finalizing.
        """
        batch = await self.get(tenant, batch_id)
        if batch.status is Status.CANCELLING:
            return batch
        # An ended batch is refused without a write: on SQLite that would take the log's lock.
        moved = False
        if batch.status in before(Status.CANCELLING):
            moved = await self._run(self._store.move, batch.batch_id, Status.CANCELLING, int(self._clock()))
            batch = await self.get(tenant, batch_id)
        if not moved and (batch.status in ENDED or batch.status is Status.FINALIZING):
            raise BatchConflictError(f"`{batch_id}` is {batch.status} and cannot be cancelled any more.")
        self._wake()
        return batch
