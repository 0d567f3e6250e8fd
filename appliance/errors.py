"""
Every error the appliance raises on purpose, and one table of what each means to clients and the audit log.

A message is one line: what is wrong and what to do.  It may be shown to a client, so it never carries a
secret, a prompt or a completion.
"""

from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus


class ApplianceError(Exception):
    """Base of all deliberate errors."""


class ConfigurationError(ApplianceError):
    """The settings, a file they name or the machine cannot be used; nothing was started."""


class InvalidRequestError(ApplianceError):
    """The request cannot be understood; sending it again unchanged will not help."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class KeyExceedsMakerError(InvalidRequestError):
    """The key that a tenant makes would allow more than the key or token that it is made with."""


class NeedsTargetOnlyWorkerError(InvalidRequestError):
    """The request must not be speculated, and every worker of its model speculates."""


class BodyTooLargeError(ApplianceError):
    """The request body is larger than the gateway accepts."""


class InvalidApiKeyError(ApplianceError):
    """No valid API key came with the request.  The message never says which part was wrong."""


class MissingScopeError(ApplianceError):
    """The key or token is valid, and lacks the scope or permission that the message names."""


class HeadTooLargeError(ApplianceError):
    """The request line and headers are larger, or more, than the gateway accepts."""


class RequestTooSlowError(ApplianceError):
    """The request arrived so slowly that the gateway stopped waiting for it."""


class TooManyConnectionsError(ApplianceError):
    """The gateway has reached its maximum number of connections."""


class GatewayStoppingError(ApplianceError):
    """The gateway finishes its running requests and takes no more."""


class ModelNotFoundError(ApplianceError):
    """The model does not exist, or this key may not use it; both read alike on purpose."""


class RouteNotFoundError(ApplianceError):
    """The gateway serves an explicit list of routes, and this route is not on it."""


class WorkerNotFoundError(ApplianceError):
    """No worker of the pool has this id."""


class StoredFileNotFoundError(ApplianceError):
    """No file has this id, or it belongs to another tenant; both read alike on purpose."""


class BatchNotFoundError(ApplianceError):
    """No batch has this id, or it belongs to another tenant; both read alike on purpose."""


class BatchConflictError(ApplianceError):
    """The state of a file or a batch does not allow the operation; the message says which."""


class StorageQuotaError(ApplianceError):
    """The tenant has reached its maximum of files, bytes or open batches."""


class StorageUnavailableError(ApplianceError):
    """Files or batches cannot be read or written: disk, database, or bytes on another gateway."""


class ControlRefusedError(ApplianceError):
    """The current state does not allow what an operator requested; the message says why."""


class ControlUnavailableError(ApplianceError):
    """The state that the control loops of several gateways share cannot be read or written."""


class TenantNotFoundError(ApplianceError):
    """No tenant has this name, or no key this id."""


class TenantConflictError(ApplianceError):
    """The tenant or key is not in the state that the change expects; the message says how it is."""


class TenantsUnavailableError(ApplianceError):
    """The database of tenants and keys cannot be read or written; nothing was changed."""


class TenantsAlteredError(TenantsUnavailableError):
    """Tenants and keys in the database are not the newest that a gateway or a command wrote."""


class TenantsUnsealedError(TenantsAlteredError):
    """Tenants and keys in the database have no MAC."""


class NoWorkerAvailableError(ApplianceError):
    """No healthy worker serves the model right now."""


class AtCapacityError(ApplianceError):
    """Workers, queue, memory for bodies, or slots for uploads or files are full, or a wait was too long."""


class LimitReachedError(ApplianceError):
    """A limit of the tenant or key is used up and will be available again later."""

    def __init__(self, message: str, *, limit: str = "", retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        """Its name in a tenant's limits, such as `requests_per_minute`."""
        self.retry_seconds = retry_seconds
        """Time until a retry can succeed; None for never."""


class RequestOverLimitError(LimitReachedError):
    """One request needs more than a limit of the tenant or key ever allows."""


class BudgetUsedUpError(LimitReachedError):
    """The tokens of the tenant or key for the day or the month are used up."""


class LimitsUnavailableError(ApplianceError):
    """The database of limits cannot be reached, and this gateway has no leased share of them left."""


class CostUnavailableError(ApplianceError):
    """The engine time of tenants cannot be read from the database, or written to it."""


class WorkerFailedError(ApplianceError):
    """A worker broke off, sent an invalid answer or could not be reached."""


class WorkerUnreachableError(WorkerFailedError):
    """No connection to the worker could be opened, so it has not received the request."""


class WorkerLeavingError(WorkerUnreachableError):
    """The worker is stopping and has refused the request; it has computed nothing."""


class WorkerTimeoutError(WorkerFailedError):
    """A worker stayed silent for longer than the gateway waits."""


class WorkerStartError(ApplianceError):
    """A worker did not become healthy; the message carries its last error line."""


class AuditError(ApplianceError):
    """Base of the audit log's errors."""


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


class ForwardError(AuditError):
    """The log cannot be forwarded to the SIEM now; requests do not wait for it."""


class MalformedCheckpointError(AuditError):
    """Text that should be a signed checkpoint is not one."""


class AuditKeyError(AuditError):
    """A signing or verification key is missing, malformed, or readable by others."""


class BundleError(ApplianceError):
    """Base of the errors of bundles; the software in service is untouched."""


class BundleRefusedError(BundleError):
    """A bundle is not what a trusted key signed, or is malformed; no part of it may be used."""


class BundleRollbackError(BundleError):
    """A bundle is older than the installed one, or needs a version in between."""


class BundleIncompleteError(BundleError):
    """A bundle lacks something it must hold: an image that it names, or the base of a difference."""


class BundleStorageError(BundleError):
    """A bundle cannot be read, copied or delivered (disk, engine or registry); a load can be resumed."""


class DraftError(ApplianceError):
    """Base of the errors of drafts; the draft in service is untouched."""


class DraftNotFoundError(DraftError):
    """No draft revision, data set, training run or evaluation has this name or digest."""


class DraftRefusedError(DraftError):
    """Lint, signature, evaluation or canary is against the draft; the message says why."""


class DraftStorageError(DraftError):
    """The draft registry cannot be read or written; run the command again to continue."""


class Outcome(StrEnum):
    """How a request ended; also the metric label, the log field and the audit field."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    WORKER_FAILED = "worker_failed"
    WORKER_REFUSED = "worker_refused"
    TIMED_OUT = "timed_out"
    NOT_ADMITTED = "not_admitted"
    """No worker had room in time, or the queue was full."""
    GATEWAY_STOPPED = "gateway_stopped"
    """Logged as `request.aborted`, like `gateway_failed`: the gateway cannot vouch for the rest."""
    GATEWAY_FAILED = "gateway_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSpec:
    """What one class of error means."""

    status: HTTPStatus
    kind: str
    """OpenAI's `type` of an error."""
    code: str
    retryable: bool = False
    """Whether the same request can succeed later; clients receive it either way."""
    outcome: Outcome = Outcome.GATEWAY_FAILED
    """How a request ends that a worker was chosen for."""


def _rejected(
    status: HTTPStatus, code: str, *, kind: str = "invalid_request_error", retryable: bool = False
) -> ErrorSpec:
    return ErrorSpec(status=status, kind=kind, code=code, retryable=retryable)


def _failed(
    code: str,
    *,
    status: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE,
    retryable: bool = True,
    outcome: Outcome = Outcome.GATEWAY_FAILED,
) -> ErrorSpec:
    return ErrorSpec(status=status, kind="server_error", code=code, retryable=retryable, outcome=outcome)


ERROR_TABLE: dict[type[ApplianceError], ErrorSpec] = {
    InvalidRequestError: _rejected(HTTPStatus.BAD_REQUEST, "invalid_request"),
    NeedsTargetOnlyWorkerError: _rejected(HTTPStatus.BAD_REQUEST, "needs_target_only_worker"),
    BodyTooLargeError: _rejected(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large"),
    InvalidApiKeyError: _rejected(HTTPStatus.UNAUTHORIZED, "invalid_api_key", kind="authentication_error"),
    KeyExceedsMakerError: _rejected(HTTPStatus.BAD_REQUEST, "key_exceeds_maker"),
    MissingScopeError: _rejected(HTTPStatus.FORBIDDEN, "missing_scope", kind="permission_error"),
    HeadTooLargeError: _rejected(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large"),
    RequestTooSlowError: _rejected(HTTPStatus.REQUEST_TIMEOUT, "request_too_slow", retryable=True),
    TooManyConnectionsError: _failed("too_many_connections"),
    GatewayStoppingError: _failed("gateway_stopping"),
    ModelNotFoundError: _rejected(HTTPStatus.NOT_FOUND, "model_not_found"),
    RouteNotFoundError: _rejected(HTTPStatus.NOT_FOUND, "route_not_found"),
    WorkerNotFoundError: _rejected(HTTPStatus.NOT_FOUND, "worker_not_found"),
    StoredFileNotFoundError: _rejected(HTTPStatus.NOT_FOUND, "file_not_found"),
    BatchNotFoundError: _rejected(HTTPStatus.NOT_FOUND, "batch_not_found"),
    BatchConflictError: _rejected(HTTPStatus.CONFLICT, "batch_conflict"),
    StorageQuotaError: _rejected(HTTPStatus.FORBIDDEN, "storage_quota_exceeded"),
    StorageUnavailableError: _failed("storage_unavailable"),
    ControlRefusedError: _rejected(HTTPStatus.CONFLICT, "control_refused"),
    ControlUnavailableError: _failed("control_unavailable"),
    DraftNotFoundError: _rejected(HTTPStatus.NOT_FOUND, "draft_not_found"),
    DraftRefusedError: _rejected(HTTPStatus.CONFLICT, "draft_refused"),
    DraftStorageError: _failed("draft_storage"),
    TenantNotFoundError: _rejected(HTTPStatus.NOT_FOUND, "tenant_not_found"),
    TenantConflictError: _rejected(HTTPStatus.CONFLICT, "tenant_conflict"),
    TenantsUnavailableError: _failed("tenants_unavailable"),
    NoWorkerAvailableError: _failed("no_worker_available", outcome=Outcome.WORKER_FAILED),
    AtCapacityError: ErrorSpec(
        status=HTTPStatus.TOO_MANY_REQUESTS,
        kind="rate_limit_error",
        code="at_capacity",
        retryable=True,
        outcome=Outcome.NOT_ADMITTED,
    ),
    LimitReachedError: _rejected(
        HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded", kind="rate_limit_error", retryable=True
    ),
    RequestOverLimitError: _rejected(
        HTTPStatus.TOO_MANY_REQUESTS, "request_over_limit", kind="rate_limit_error"
    ),
    BudgetUsedUpError: _rejected(
        HTTPStatus.TOO_MANY_REQUESTS, "insufficient_quota", kind="insufficient_quota"
    ),
    LimitsUnavailableError: _failed("limits_unavailable"),
    WorkerFailedError: _failed("worker_failed", status=HTTPStatus.BAD_GATEWAY, outcome=Outcome.WORKER_FAILED),
    WorkerTimeoutError: _failed(
        "worker_timeout", status=HTTPStatus.GATEWAY_TIMEOUT, retryable=False, outcome=Outcome.TIMED_OUT
    ),
    AuditUnavailableError: _failed("audit_unavailable"),
    AuditForkError: _failed("audit_unavailable", retryable=False),
}
"""Errors that a request can meet; the others stop a start or a command and never reach a client."""

UNEXPECTED = _failed("internal_error", status=HTTPStatus.INTERNAL_SERVER_ERROR, retryable=False)
"""An error without an entry in the table: a defect of ours."""


def spec_of(error: ApplianceError) -> ErrorSpec:
    """The entry of an error's class or of its nearest base."""
    return next((ERROR_TABLE[kind] for kind in type(error).__mro__ if kind in ERROR_TABLE), UNEXPECTED)


def code_of(error: ApplianceError) -> str:
    """The `code` that a client receives."""
    own = error.code if isinstance(error, InvalidRequestError) else None
    return own or spec_of(error).code
