"""
Builds the web applications of the two listeners around services that the caller owns.

The API listener is for tenants.  The admin listener answers every route: the console's chat page and
`appliance drill` call models through it.
"""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from appliance.api import admin, batches, files, openai, ops, own_keys
from appliance.api.console import pages
from appliance.api.console.headers import ConsoleHeaders
from appliance.api.documentation import documentation_routes
from appliance.api.error_responses import UNEXPECTED_MESSAGE, WRONG_METHOD, error_response, render
from appliance.api.request_middleware import BodyLimit, PlainPath, RequestIdentity, Stop
from appliance.api.services import Services
from appliance.errors import ERROR_TABLE, UNEXPECTED, ApplianceError, ErrorSpec, RouteNotFoundError, spec_of
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings
from appliance.tenancy import Caller

API_ROUTERS = (ops.health, openai.router, files.router, batches.router, own_keys.router)
ADMIN_ROUTERS = (ops.metrics, admin.router)  # and the console's, if it is enabled
CLIENT_GONE = 499  # nginx's status for a client that left; no client receives it


def create_app(services: Services) -> FastAPI:
    """The application of the API listener; the caller starts and stops the services."""
    return _create(services, API_ROUTERS, services.settings, stop=services.stop)


def create_admin_app(services: Services) -> FastAPI:
    """The application of the admin listener."""
    console: tuple[APIRouter, ...] = ()
    if services.console is not None:
        services.console.templates.globals["has_documentation"] = services.documentation is not None
        console = (pages.router,)
    routers = (*API_ROUTERS, *ADMIN_ROUTERS, *console)
    # Metrics, probes and administrators are served to the end.
    return _create(services, routers, services.settings.admin_listener, stop=Stop())


def _create(
    services: Services, routers: tuple[APIRouter, ...], settings: ApiSettings, *, stop: Stop
) -> FastAPI:
    # FastAPI's own documentation pages load scripts from outside in the browser.
    app = FastAPI(title="Sovereign serving appliance", openapi_url=None, redirect_slashes=False)
    app.state.services = services
    _know_errors(services.metrics)
    for router in routers:
        # `include_router` would make each route again, unchanged.
        app.router.routes.extend(router.routes)
    app.router.routes.extend(documentation_routes(services.documentation))

    def limit_headers(caller: Caller, model: str | None) -> dict[str, str]:
        return services.gateway.limits.headers(caller.tenant, model, caller.key_limits)

    def count(rendering: ErrorSpec) -> None:
        services.metrics.errors.labels(rendering.code).inc()

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApplianceError)  # noqa: S101 - registered for nothing else
        if spec_of(error) is UNEXPECTED:
            return await on_bug(request, error)
        count(spec_of(error))
        return render(error, request.url.path)

    async def on_http_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            count(WRONG_METHOD)
            response = error_response(
                WRONG_METHOD, f"{request.method} is not allowed here.", request.url.path
            )
            response.headers["Allow"] = _methods(app, request)
            return response
        return await on_error(
            request, RouteNotFoundError(f"There is no {request.method} {request.url.path}.")
        )

    async def on_bug(request: Request, error: Exception) -> Response:
        ids = request.scope["state"]
        services.logger.error("request_crashed", **ids, error=type(error).__name__, exc_info=error)
        count(UNEXPECTED)
        response = error_response(UNEXPECTED, UNEXPECTED_MESSAGE, request.url.path)
        # Starlette calls this outside of every middleware, so no middleware adds the id.
        response.headers["x-request-id"] = ids["client_request_id"] or ids["request_id"]
        return response

    async def on_client_gone(_request: Request, _error: Exception) -> Response:
        # The client left in the middle of its request, or was too slow and has its error already.
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(ApplianceError, on_error)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    app.add_middleware(
        BodyLimit,
        max_body_bytes=settings.max_body_bytes,
        max_bodies_bytes=settings.max_bodies_bytes,
        count=count,
        larger={files.PATH: services.files.max_form_bytes} if services.files else {},
    )
    app.add_middleware(PlainPath, count=count)
    app.add_middleware(ConsoleHeaders)
    app.add_middleware(
        RequestIdentity,
        new_request_id=services.new_request_id,
        limit_headers=limit_headers,
        stop=stop,
    )
    return app


def _methods(app: FastAPI, request: Request) -> str:
    found: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found))


def _know_errors(metrics: Metrics) -> None:
    """Export every error code from 0 on: the first increase of a new series would not show as a rise."""
    for known in (*ERROR_TABLE.values(), UNEXPECTED, WRONG_METHOD):
        metrics.errors.labels(known.code)
