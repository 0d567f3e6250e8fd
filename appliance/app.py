"""
Builds the web application around services that somebody else owns.
"""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from appliance.api import admin, openai, ops
from appliance.api.errors import (
    UNEXPECTED,
    UNEXPECTED_MESSAGE,
    WRONG_METHOD,
    Rendering,
    error_response,
    render,
    rendering_of,
)
from appliance.api.middleware import BodyLimit, RequestIdentity
from appliance.api.services import Services
from appliance.errors import ApplianceError, RouteNotFoundError


def create_app(services: Services) -> FastAPI:
    """The gateway's HTTP surface; starting and stopping the services is the caller's business."""
    # No schema, so no documentation pages either: those load scripts from outside in the browser.
    app = FastAPI(title="Sovereign serving appliance", openapi_url=None, redirect_slashes=False)
    app.state.services = services
    app.include_router(ops.router)
    app.include_router(openai.router)
    app.include_router(admin.router)

    def count(rendering: Rendering) -> None:
        services.metrics.errors.labels(rendering.code).inc()

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApplianceError)  # noqa: S101 - registered for nothing else
        if rendering_of(error) is UNEXPECTED:
            return await on_bug(request, error)
        count(rendering_of(error))
        return render(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            count(WRONG_METHOD)
            return error_response(WRONG_METHOD, f"{request.method} is not allowed here.")
        return await on_error(
            request, RouteNotFoundError(f"There is no {request.method} {request.url.path}.")
        )

    async def on_bug(request: Request, error: Exception) -> Response:
        ids = request.scope["state"]
        services.logger.error("request_crashed", **ids, error=type(error).__name__, exc_info=error)
        count(UNEXPECTED)
        response = error_response(UNEXPECTED, UNEXPECTED_MESSAGE)
        # Starlette calls this outside of every middleware, so nobody else adds the id.
        response.headers["x-request-id"] = ids["client_request_id"] or ids["request_id"]
        return response

    app.add_exception_handler(ApplianceError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    app.add_middleware(BodyLimit, max_body_bytes=services.settings.max_body_bytes, count=count)
    app.add_middleware(RequestIdentity, new_request_id=services.new_request_id)
    return app
