"""
Every error the appliance raises on purpose.

They know no HTTP: `appliance.api.errors` gives each one a status.  The message is one line that
says what is wrong and what to do about it; it may be shown to a client, so it never carries a
secret, a prompt or a completion.
"""

from typing import ClassVar


class ApplianceError(Exception):
    """Base of all deliberate errors."""


class ConfigurationError(ApplianceError):
    """The settings, a file they name or the machine cannot be used as asked; nothing was started."""


class InvalidRequestError(ApplianceError):
    """The request cannot be understood; sending it again unchanged will not help."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NeedsTargetOnlyWorkerError(InvalidRequestError):
    """The request must not be speculated, and every worker of its model speculates."""


class BodyTooLargeError(ApplianceError):
    """The request body is larger than the gateway accepts."""


class InvalidApiKeyError(ApplianceError):
    """No valid API key came with the request.  The message never says which part was wrong."""


class HeadTooLargeError(ApplianceError):
    """The request line and headers are larger, or more, than the gateway accepts."""


class RequestTooSlowError(ApplianceError):
    """The request arrived so slowly that the gateway stopped waiting for it."""


class TooManyConnectionsError(ApplianceError):
    """The gateway holds as many connections as it may."""


class ModelNotFoundError(ApplianceError):
    """The model does not exist, or this key may not use it: the two read alike on purpose."""


class RouteNotFoundError(ApplianceError):
    """The gateway forwards an explicit list of routes; this is none of them."""


class WorkerNotFoundError(ApplianceError):
    """No worker of the pool has this id."""


class StoredFileNotFoundError(ApplianceError):
    """No file has this id, or it is another tenant's: the two read alike on purpose."""


class BatchNotFoundError(ApplianceError):
    """No batch has this id, or it is another tenant's: the two read alike on purpose."""


class BatchConflictError(ApplianceError):
    """A file or a batch is in a state that does not allow what was asked; the message says which."""


class StorageQuotaError(ApplianceError):
    """The tenant keeps as many files, bytes or open batches as it may."""


class StorageUnavailableError(ApplianceError):
    """Files or batches cannot be read or written: disk, database, or bytes that another gateway has."""


class ControlRefusedError(ApplianceError):
    """Control cannot do what an operator asked as things are; the message says why."""


class ControlUnavailableError(ApplianceError):
    """What the control loops of several gateways share cannot be read or written."""


class TenantNotFoundError(ApplianceError):
    """No tenant has this name, or no key this id."""


class TenantConflictError(ApplianceError):
    """A tenant or key is not as the change takes it to be; the message says how it is."""


class TenantsUnavailableError(ApplianceError):
    """The database of tenants and keys cannot be read or written; nothing was changed."""


class NoWorkerAvailableError(ApplianceError):
    """No healthy worker serves the model right now."""


class AtCapacityError(ApplianceError):
    """The model's workers and queue are full, the request waited too long, or bodies take up all the room."""


class LimitReachedError(ApplianceError):
    """A limit of the tenant is used up, and comes back in a while."""

    code: ClassVar[str] = "rate_limit_exceeded"

    def __init__(self, message: str, *, limit: str = "", retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        """Its name in a tenant's limits, such as `requests_per_minute`."""
        self.retry_seconds = retry_seconds
        """When it is worth asking again; None for never."""


class RequestOverLimitError(LimitReachedError):
    """One request needs more than a limit of the tenant ever allows."""

    code: ClassVar[str] = "request_over_limit"


class BudgetUsedUpError(LimitReachedError):
    """The tenant's tokens of the day or the month are used up."""

    code: ClassVar[str] = "insufficient_quota"


class LimitsUnavailableError(ApplianceError):
    """The database of limits cannot be reached, and this gateway holds nothing to go on with."""


class CostUnavailableError(ApplianceError):
    """What engine time came to cannot be read from the database, or written to it."""


class WorkerFailedError(ApplianceError):
    """A worker broke off, answered nonsense or could not be reached."""


class WorkerUnreachableError(WorkerFailedError):
    """No connection to the worker could be opened, so it has not seen the request."""


class WorkerTimeoutError(WorkerFailedError):
    """A worker stayed silent for longer than the gateway waits."""


class WorkerStartError(ApplianceError):
    """A worker did not become healthy; the message carries its last error line."""


class AuditError(ApplianceError):
    """Base of what can go wrong with the audit log."""


class AuditUnavailableError(AuditError):
    """An entry could not be made durable, so the request it belongs to is refused."""


class AuditEntryError(AuditError):
    """An entry cannot be encoded or decoded: unknown field, wrong type, or larger than a leaf."""


class AuditRollbackError(AuditError):
    """The log is older than, or different from, a head that was signed before."""


class AuditForkError(AuditError):
    """Another writer moved the head; what is in memory no longer matches the log."""


class AuditVerificationError(AuditError):
    """Evidence does not prove what it claims."""


class MalformedCheckpointError(AuditError):
    """Text that should be a signed checkpoint is not one."""


class AuditKeyError(AuditError):
    """A signing or verification key is missing, malformed, or readable by others."""


class BundleError(ApplianceError):
    """Base of what can go wrong with a bundle; what serves is untouched."""


class BundleRefusedError(BundleError):
    """A bundle is not what a trusted key signed, or is malformed; nothing of it may be used."""


class BundleRollbackError(BundleError):
    """A bundle is older than what was loaded before, or needs a version in between."""


class BundleIncompleteError(BundleError):
    """A bundle lacks what it must hold: an image that is named, or the base of a difference."""


class BundleStorageError(BundleError):
    """A bundle cannot be read, copied or delivered: a disk, an engine or a registry; a load can go on."""


class DraftError(ApplianceError):
    """Base of what can go wrong with the life of a draft; the one in service is untouched."""


class DraftNotFoundError(DraftError):
    """No draft revision, data set, training run or evaluation has this name or digest."""


class DraftRefusedError(DraftError):
    """A draft may not go on: lint, signature, evaluation or trial is against it; the message says why."""


class DraftStorageError(DraftError):
    """The draft registry cannot be read or written; asking again goes on where it stopped."""
