"""
The console's routes: login and logout, the pages, and their actions.

A live update of a page is the fragment the page was rendered with, so that it is the same with and without
JavaScript.
"""

from http import HTTPStatus
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from appliance.api.auth import client_class
from appliance.api.console import models, request_page, tenant_page, views, worker_page
from appliance.api.console.console import Console
from appliance.api.console.forms import is_from_here, read_form
from appliance.api.console.headers import PREFIX
from appliance.api.console.operators import (
    COOKIE,
    LOGIN,
    Action,
    ForOperators,
    Handler,
    Operator,
    acting,
    admin_of,
    fragment,
    page,
    parts_of,
)
from appliance.api.console.usage import usage
from appliance.api.services import Services
from appliance.audit.entry_types import EntryType
from appliance.audit.sink import submit_best_effort
from appliance.errors import ControlRefusedError, RouteNotFoundError
from appliance.tenancy import AdminScope

STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "markdown.js": "text/javascript; charset=utf-8",
    "snippets.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
PAGES = ("overview", "tenants", "audit", "egress", "chat")

router = APIRouter()


async def show_login(request: Request) -> Response:
    _, console = parts_of(request)
    problem = "Your session ended. Log in again." if "ended" in request.query_params else ""
    return page(console, "login", problem=problem)


async def log_in(request: Request) -> Response:
    """A refusal is counted as in the API; a login is in the audit log, unless that is unavailable."""
    services, console = parts_of(request)
    address = request.client.host if request.client else ""
    if not is_from_here(request):
        message = "This form did not come from a page of this gateway. Open the console and try again."
        return page(console, "login", code=HTTPStatus.FORBIDDEN, problem=message)
    # No await from here on, so that concurrent forms cannot bypass the count of failures.
    credential = (await read_form(request)).get("key", "").strip()
    caller = await admin_of(request, services, credential)
    # The key is judged first: behind a proxy all clients may share one address.
    wait = console.attempts.wait_seconds(address)
    if caller is None and wait:
        message = f"Too many logins failed. Wait {int(wait) + 1} seconds."
        response = page(console, "login", code=HTTPStatus.TOO_MANY_REQUESTS, problem=message)
        response.headers["Retry-After"] = str(int(wait) + 1)
        return response
    if caller is None:
        console.attempts.failed(address)
        message = "This key has no access to the console. Use a key of the admin API."
        return page(console, "login", code=HTTPStatus.UNAUTHORIZED, problem=message)
    console.attempts.succeeded(address)
    services.logger.info(
        "console_login", key_id=caller.key.key_id, request_id=request.scope["state"]["request_id"]
    )
    # Best effort: operators need the console to repair the log.
    submit_best_effort(
        services.audit,
        services.logger,
        EntryType.CONSOLE_LOGIN,
        key_id=caller.key.key_id,
        client=client_class(request.scope),
    )
    response = RedirectResponse(PREFIX, HTTPStatus.SEE_OTHER)
    response.set_cookie(
        COOKIE,
        console.sessions.begin(credential),
        path=PREFIX,
        httponly=True,
        samesite="strict",
        secure=_is_encrypted(request, console),
    )
    return response


async def log_out(request: Request, services: Services, console: Console, operator: Operator) -> Response:
    console.sessions.end(request.cookies[COOKIE])
    services.logger.info("console_logout", key_id=operator.caller.key.key_id)
    response = RedirectResponse(LOGIN, HTTPStatus.SEE_OTHER)
    response.delete_cookie(
        COOKIE, path=PREFIX, httponly=True, samesite="strict", secure=_is_encrypted(request, console)
    )
    return response


def show(name: str) -> Handler:

    async def answer(_request: Request, services: Services, console: Console, operator: Operator) -> Response:
        return page(console, name, operator=operator, **_view(name, services, console))

    return answer


def show_live(name: str) -> Handler:

    async def answer(
        _request: Request, services: Services, console: Console, _operator: Operator
    ) -> Response:
        return fragment(console, name, **_view(name, services, console))

    return answer


async def show_usage(request: Request, services: Services, console: Console, operator: Operator) -> Response:
    values = await usage(console, request.query_params, services.clock())
    return page(console, "usage", operator=operator, **values)


async def show_models(
    _request: Request, services: Services, console: Console, operator: Operator
) -> Response:
    return page(console, "models", operator=operator, **await models.models(services, console))


async def verify(_request: Request, services: Services, console: Console, operator: Operator) -> Response:
    """Start to verify the whole log; the page shows the progress."""
    if console.verification.start():
        services.logger.info("console_verification", key_id=operator.caller.key.key_id)
    return RedirectResponse(f"{PREFIX}/audit", HTTPStatus.SEE_OTHER)


async def check_egress(
    _request: Request, services: Services, operator: Operator, _form: dict[str, str]
) -> None:
    if services.egress is None:
        raise ControlRefusedError("This gateway makes no egress checks.")
    await services.egress.check(operator.actor)


async def show_static(request: Request) -> Response:
    """Serve a listed file; it has no secret and needs no login."""
    name = request.path_params["name"]
    if name not in STATIC:
        raise RouteNotFoundError(f"There is no GET {request.url.path}.")
    content = files("appliance.api.console").joinpath("static", name).read_bytes()
    return Response(content, media_type=STATIC[name])


def _view(name: str, services: Services, console: Console) -> dict[str, Any]:
    if name == "overview":
        return views.overview(services, console)
    if name == "tenants":
        return views.tenants(services, services.clock())
    if name == "audit":
        return views.audit(services, console)
    if name == "egress":
        return views.egress(services)
    return {"models": sorted(services.pool.models()), "api": services.settings}


def _is_encrypted(request: Request, console: Console) -> bool:
    return request.url.scheme == "https" or console.settings.behind_tls


def _get(path: str, handler: Handler, *, is_live: bool = False) -> Route:
    return Route(f"{PREFIX}{path}", ForOperators(handler, is_live=is_live).__call__, methods=["GET"])


def _post(path: str, handler: Handler, scope: AdminScope | None = AdminScope.READ) -> Route:
    return Route(f"{PREFIX}{path}", ForOperators(handler, scope=scope).__call__, methods=["POST"])


def _for_tenant(path: str, action: Action) -> Route:
    return _post(f"/tenants/{{name}}/keys{path}", acting(action, tenant_page.path_of), AdminScope.TENANTS)


def _for_worker(path: str, action: Action) -> Route:
    return _post(f"/workers/{{worker}}{path}", acting(action, worker_page.path_of), AdminScope.WORKERS)


def _for_drafts(path: str, action: Action) -> Route:
    return _post(f"/models{path}", acting(action, lambda _request: "/models"), AdminScope.DRAFTS)


router.routes += [
    Route(LOGIN, show_login, methods=["GET"]),
    Route(LOGIN, log_in, methods=["POST"]),
    Route(f"{PREFIX}/static/{{name}}", show_static, methods=["GET"]),
    _post("/logout", log_out, scope=None),
    _post("/audit/verify", verify),
    _post("/egress/check", acting(check_egress, lambda _request: "/egress"), AdminScope.WORKERS),
    _get("", show("overview")),
    *(_get(f"/{name}", show(name)) for name in PAGES[1:]),
    *(_get(f"/{name}/live", show_live(name), is_live=True) for name in PAGES[:-1]),
    _get("/tenants/{name}/keys", tenant_page.show),
    _for_tenant("", tenant_page.create_key),
    _for_tenant("/{key_id}/rotate", tenant_page.rotate_key),
    _for_tenant("/{key_id}/revoke", tenant_page.revoke_key),
    _get("/workers/{worker}", worker_page.show),
    _get("/workers/{worker}/live", worker_page.show_live, is_live=True),
    _for_worker("/drain", worker_page.drain),
    _for_worker("/undrain", worker_page.undrain),
    _for_worker("/recycle", worker_page.recycle),
    _for_worker("/override", worker_page.override),
    _get("/usage", show_usage),
    _get("/models", show_models),
    _for_drafts("/promote", models.promote),
    _for_drafts("/rollback", models.roll_back),
    _get("/requests", request_page.show),
    _get("/requests/receipt", request_page.download),
]
