"""Renders an appliance error as an HTTP response, in the shape that clients of its path parse."""

import math
from http import HTTPStatus

from starlette.responses import Response

from appliance.errors import (
    UNEXPECTED,
    ApplianceError,
    ErrorSpec,
    InvalidRequestError,
    LimitReachedError,
    code_of,
    spec_of,
)
from appliance.serving.dialects.routes import dialect_at
from appliance.serving.error_text import ErrorText

RETRY_SECONDS = 2
MAX_RETRY_SECONDS = 120
"""OpenAI's clients ignore a longer `Retry-After` and retry at once."""
UNEXPECTED_MESSAGE = "The gateway failed. Its log has the details under this request's id."
WRONG_METHOD = ErrorSpec(
    status=HTTPStatus.METHOD_NOT_ALLOWED, kind="invalid_request_error", code="method_not_allowed"
)


def render(error: ApplianceError, path: str = "") -> Response:
    spec = spec_of(error)
    return error_response(
        spec,
        UNEXPECTED_MESSAGE if spec is UNEXPECTED else str(error),
        path,
        code=code_of(error),
        param=error.param if isinstance(error, InvalidRequestError) else None,
        retry_seconds=error.retry_seconds if isinstance(error, LimitReachedError) else None,
    )


def error_response(
    spec: ErrorSpec,
    message: str,
    path: str = "",
    *,
    code: str | None = None,
    param: str | None = None,
    retry_seconds: float | None = None,
) -> Response:
    """A response in the shape that clients of `path` parse; its headers tell them whether to retry."""
    error = ErrorText(
        status=spec.status, kind=spec.kind, message=message, param=param, code=code or spec.code
    )
    headers = {"x-should-retry": "true" if spec.retryable else "false"}
    if retry_seconds is not None:
        headers["Retry-After"] = str(min(MAX_RETRY_SECONDS, max(1, math.ceil(retry_seconds))))
    elif spec.retryable:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if spec.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        dialect_at(path).error_body(error),
        status_code=spec.status,
        media_type="application/json",
        headers=headers,
    )
