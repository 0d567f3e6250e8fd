"""
The one place where an appliance error becomes an HTTP response, in the shape OpenAI clients parse.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import Response

from appliance import errors

RETRY_SECONDS = 2


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
    errors.ModelNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="model_not_found"
    ),
    errors.RouteNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="route_not_found"
    ),
    errors.WorkerNotFoundError: Rendering(
        status=HTTPStatus.NOT_FOUND, kind="invalid_request_error", code="worker_not_found"
    ),
    errors.ControlRefusedError: Rendering(
        status=HTTPStatus.CONFLICT, kind="invalid_request_error", code="control_refused"
    ),
    errors.ControlUnavailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="control_unavailable", retryable=True
    ),
    errors.NoWorkerAvailableError: Rendering(
        status=HTTPStatus.SERVICE_UNAVAILABLE, kind="server_error", code="no_worker_available", retryable=True
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


def render(error: errors.ApplianceError) -> Response:
    """The response for a deliberate error."""
    rendering = rendering_of(error)
    message = UNEXPECTED_MESSAGE if rendering is UNEXPECTED else str(error)
    if isinstance(error, errors.InvalidRequestError):
        return error_response(rendering, message, code=error.code, param=error.param)
    return error_response(rendering, message)


def error_response(
    rendering: Rendering, message: str, *, code: str | None = None, param: str | None = None
) -> Response:
    """A response with all four members of an OpenAI error, and word on whether to retry."""
    content = {
        "error": {
            "message": message,
            "type": rendering.kind,
            "param": param,
            "code": code or rendering.code,
        }
    }
    headers = {"x-should-retry": "true" if rendering.retryable else "false"}
    if rendering.retryable:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if rendering.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        # Escaped: a message may quote half a surrogate pair, which UTF-8 cannot hold.
        json.dumps(content),
        status_code=rendering.status,
        media_type="application/json",
        headers=headers,
    )


UNEXPECTED = Rendering(status=HTTPStatus.INTERNAL_SERVER_ERROR, kind="server_error", code="internal_error")
UNEXPECTED_MESSAGE = "The gateway failed. Its log has the details under this request's id."
WRONG_METHOD = Rendering(
    status=HTTPStatus.METHOD_NOT_ALLOWED, kind="invalid_request_error", code="method_not_allowed"
)
