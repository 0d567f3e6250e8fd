"""
The one place where an appliance error becomes an HTTP response, in the shape its client parses.
"""

import math
from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import Response

from appliance import errors
from appliance.serving.dialects.routes import dialect_at
from appliance.serving.error_text import ErrorText

RETRY_SECONDS = 2
LONGEST_RETRY_SECONDS = 120
"""OpenAI's clients take a longer wait for none at all, and ask again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How one class of error looks on the wire."""

    status: HTTPStatus
    kind: str
    code: str
    retryable: bool = False
    """Whether sending the same request again can help; clients are told either way."""


RENDERINGS: dict[type[errors.ApplianceError], Rendering] = {
    errors.InvalidRequestError: Rendering(
        status=HTTPStatus.BAD_REQUEST, kind="invalid_request_error", code="invalid_request"
    ),
    errors.NeedsTargetOnlyWorkerError: Rendering(
        status=HTTPStatus.BAD_REQUEST, kind="invalid_request_error", code="needs_target_only_worker"
    ),
    errors.BodyTooLargeError: Rendering(
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, kind="invalid_request_error", code="body_too_large"
    ),
    errors.InvalidApiKeyError: Rendering(
        status=HTTPStatus.UNAUTHORIZED, kind="authentication_error", code="invalid_api_key"
    ),
    errors.HeadTooLargeError: Rendering(
        status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, kind="invalid_request_error", code="head_too_large"
    ),
    errors.RequestTooSlowError: Rendering(
        status=HTTPStatus.REQUEST_TIMEOUT,
        kind="invalid_request_error",
        code="request_too_slow",
        retryable=True,
    ),
    errors.TooManyConnectionsError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        kind="server_error",
        code="too_many_connections",
        retryable=True,
    ),
    errors.ModelNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="model_not_found"
    ),
    errors.RouteNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="route_not_found"
    ),
    errors.WorkerNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="worker_not_found"
    ),
    errors.StoredFileNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="file_not_found"
    ),
    errors.BatchNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="batch_not_found"
    ),
    errors.BatchConflictError: Rendering(
        status=HTTPStatus.CONFLICT, kind="invalid_request_error", code="batch_conflict"
    ),
    errors.StorageQuotaError: Rendering(
        status=HTTPStatus.FORBIDDEN, kind="invalid_request_error", code="storage_quota_exceeded"
    ),
    errors.StorageUnavailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="storage_unavailable", retryable=True
    ),
    errors.ControlRefusedError: Rendering(
        status=HTTPStatus.CONFLICT, kind="invalid_request_error", code="control_refused"
    ),
    errors.ControlUnavailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="control_unavailable", retryable=True
    ),
    errors.DraftNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="draft_not_found"
    ),
    errors.DraftRefusedError: Rendering(
        status=HTTPStatus.CONFLICT, kind="invalid_request_error", code="draft_refused"
    ),
    errors.DraftStorageError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="draft_storage", retryable=True
    ),
    errors.TenantNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="tenant_not_found"
    ),
    errors.TenantConflictError: Rendering(
        status=HTTPStatus.CONFLICT, kind="invalid_request_error", code="tenant_conflict"
    ),
    errors.TenantsUnavailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="tenants_unavailable", retryable=True
    ),
    errors.NoWorkerAvailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="no_worker_available", retryable=True
    ),
    errors.AtCapacityError: Rendering(
        status=HTTPStatus.TOO_MANY_REQUESTS, kind="rate_limit_error", code="at_capacity", retryable=True
    ),
    errors.LimitReachedError: Rendering(
        status=HTTPStatus.TOO_MANY_REQUESTS,
        kind="rate_limit_error",
        code=errors.LimitReachedError.code,
        retryable=True,
    ),
    errors.RequestOverLimitError: Rendering(
        status=HTTPStatus.TOO_MANY_REQUESTS, kind="rate_limit_error", code=errors.RequestOverLimitError.code
    ),
    errors.BudgetUsedUpError: Rendering(
        status=HTTPStatus.TOO_MANY_REQUESTS, kind="insufficient_quota", code=errors.BudgetUsedUpError.code
    ),
    errors.LimitsUnavailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="limits_unavailable", retryable=True
    ),
    errors.WorkerFailedError: Rendering(
        status=HTTPStatus.BAD_GATEWAY, kind="server_error", code="worker_failed", retryable=True
    ),
    errors.WorkerTimeoutError: Rendering(
        status=HTTPStatus.GATEWAY_TIMEOUT, kind="server_error", code="worker_timeout"
    ),
    errors.AuditUnavailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="audit_unavailable", retryable=True
    ),
    errors.AuditForkError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="audit_unavailable"
    ),
}
"""Errors a request can meet; the others stop a start or a command and never reach a client."""


def rendering_of(error: errors.ApplianceError) -> Rendering:
    """The entry for an error's class or its nearest base; an error without one is a bug of ours."""
    return next((RENDERINGS[kind] for kind in type(error).__mro__ if kind in RENDERINGS), UNEXPECTED)


def render(error: errors.ApplianceError, path: str = "") -> Response:
    """The response for a deliberate error to a request for `path`."""
    rendering = rendering_of(error)
    message = UNEXPECTED_MESSAGE if rendering is UNEXPECTED else str(error)
    if isinstance(error, errors.InvalidRequestError):
        return error_response(rendering, message, path, code=error.code, param=error.param)
    if isinstance(error, errors.LimitReachedError):
        return error_response(rendering, message, path, retry_seconds=error.retry_seconds)
    return error_response(rendering, message, path)


def error_response(
    rendering: Rendering,
    message: str,
    path: str = "",
    *,
    code: str | None = None,
    param: str | None = None,
    retry_seconds: float | None = None,
) -> Response:
    """A response in the shape that clients of `path` parse, and word on whether to retry."""
    error = ErrorText(
        status=rendering.status,
        kind=rendering.kind,
        message=message,
        param=param,
        code=code or rendering.code,
    )
    headers = {"x-should-retry": "true" if rendering.retryable else "false"}
    if retry_seconds is not None:
        headers["Retry-After"] = str(min(LONGEST_RETRY_SECONDS, max(1, math.ceil(retry_seconds))))
    elif rendering.retryable:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if rendering.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        dialect_at(path).error_body(error),
        status_code=rendering.status,
        media_type="application/json",
        headers=headers,
    )


UNEXPECTED = Rendering(status=HTTPStatus.INTERNAL_SERVER_ERROR, kind="server_error", code="internal_error")
UNEXPECTED_MESSAGE = "The gateway failed. Its log has the details under this request's id."
WRONG_METHOD = Rendering(
    status=HTTPStatus.METHOD_NOT_ALLOWED, kind="invalid_request_error", code="method_not_allowed"
)
