"""
The console's routes: login and logout, five pages, and two actions.

A live update of a page is the fragment the page was rendered with, so that it is the same with and without
JavaScript.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from appliance.api.auth import client_class, count_refusal, identify
from appliance.api.console import views
from appliance.api.console.console import Console
from appliance.api.console.headers import PREFIX
from appliance.api.console.sessions import ConsoleSession
from appliance.api.refusals import Surface
from appliance.api.scopes import require_scopes
from appliance.api.services import Services
from appliance.audit.entry_types import EntryType
from appliance.audit.sink import submit_best_effort
from appliance.errors import (
    ApplianceError,
    ControlRefusedError,
    InvalidApiKeyError,
    MissingScopeError,
    RouteNotFoundError,
)
from appliance.tenancy import AdminScope, Caller
from appliance.tenancy.identity.rejection import RefusalReason

COOKIE = "appliance_console"
LOGIN = f"{PREFIX}/login"
STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
MAX_FORM_BYTES = 8192
"""Maximum size of a form; its longest value is a token of an identity provider."""
MAX_FORM_FIELDS = 10
PAGES = ("overview", "tenants", "audit", "egress", "chat")

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    session: ConsoleSession
    caller: Caller


Handler = Callable[[Request, Services, Console, Operator], Awaitable[Response]]


class ForOperators:
    """A route for logged-in operators with a scope; forms must carry the token of their session."""

    def __init__(
        self, handler: Handler, *, scope: AdminScope | None = AdminScope.READ, is_live: bool = False
    ) -> None:
        """Wrap a handler; `is_live` if pages request it by themselves, which does not count as use."""
        self._handler, self._scope, self._is_live = handler, scope, is_live

    async def __call__(self, request: Request) -> Response:
        services, console = _parts(request)
        operator = await _operator(request, services, console, touches=not self._is_live)
        if operator is None:
            if self._is_live:
                return Response(status_code=HTTPStatus.UNAUTHORIZED)
            return RedirectResponse(
                f"{LOGIN}?ended=1" if COOKIE in request.cookies else LOGIN, HTTPStatus.SEE_OTHER
            )
        if request.method == "POST":
            form = await read_form(request)
            if not is_from_here(request) or not operator.session.vouches_for(form.get("csrf", "")):
                message = (
                    "This form did not come from a page of this session. Go back, reload, and try again."
                )
                return _refused(console, operator, message)
        try:
            if self._scope is not None:
                require_scopes(operator.caller.key, self._scope)
        except MissingScopeError as error:
            return _refused(console, operator, str(error))
        return await self._handler(request, services, console, operator)


async def show_login(request: Request) -> Response:
    _, console = _parts(request)
    problem = "Your session ended. Log in again." if "ended" in request.query_params else ""
    return _page(console, "login", problem=problem)


async def log_in(request: Request) -> Response:
    """A refusal is counted as in the API; a login is in the audit log, unless that is unavailable."""
    services, console = _parts(request)
    address = request.client.host if request.client else ""
    if not is_from_here(request):
        message = "This form did not come from a page of this gateway. Open the console and try again."
        return _page(console, "login", code=HTTPStatus.FORBIDDEN, problem=message)
    # No await from here on, so that concurrent forms cannot bypass the count of failures.
    credential = (await read_form(request)).get("key", "").strip()
    caller = await _caller(request, services, credential)
    # The key is judged first: behind a proxy all clients may share one address.
    wait = console.attempts.wait_seconds(address)
    if caller is None and wait:
        message = f"Too many logins failed. Wait {int(wait) + 1} seconds."
        response = _page(console, "login", code=HTTPStatus.TOO_MANY_REQUESTS, problem=message)
        response.headers["Retry-After"] = str(int(wait) + 1)
        return response
    if caller is None:
        console.attempts.failed(address)
        message = "This key has no access to the console. Use a key of the admin API."
        return _page(console, "login", code=HTTPStatus.UNAUTHORIZED, problem=message)
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
        return _page(console, name, operator=operator, **_view(name, services, console))

    return answer


def show_live(name: str) -> Handler:

    async def answer(
        _request: Request, services: Services, console: Console, _operator: Operator
    ) -> Response:
        template = console.templates.get_template(f"_{name}.html")
        return HTMLResponse(template.render(**_view(name, services, console)))

    return answer


async def verify(_request: Request, services: Services, console: Console, operator: Operator) -> Response:
    """Start to verify the whole log; the page shows the progress."""
    if console.verification.start():
        services.logger.info("console_verification", key_id=operator.caller.key.key_id)
    return RedirectResponse(f"{PREFIX}/audit", HTTPStatus.SEE_OTHER)


async def check_egress(
    _request: Request, services: Services, console: Console, operator: Operator
) -> Response:
    try:
        if services.egress is None:
            raise ControlRefusedError("This gateway makes no egress checks.")
        await services.egress.check(f"console:{operator.caller.key.key_id}")
    except ApplianceError as error:
        view = _view("egress", services, console)
        return _page(
            console, "egress", code=HTTPStatus.CONFLICT, operator=operator, problem=str(error), **view
        )
    return RedirectResponse(f"{PREFIX}/egress", HTTPStatus.SEE_OTHER)


async def show_static(request: Request) -> Response:
    """Serve a listed file; it has no secret and needs no login."""
    name = request.path_params["name"]
    if name not in STATIC:
        raise RouteNotFoundError(f"There is no GET {request.url.path}.")
    content = files("appliance.api.console").joinpath("static", name).read_bytes()
    return Response(content, media_type=STATIC[name])


def is_from_here(request: Request) -> bool:
    """
    Whether the browser says that a page of this origin sent a form; fails closed without such a header.

    The login form has no session and so no token, which is why every form is checked this way as well.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin, host = request.headers.get("origin"), request.headers.get("host")
    # The scheme is not compared: a proxy may have terminated TLS.
    return origin is not None and host is not None and urlsplit(origin).netloc == host


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a small form; none if it is malformed or too large."""
    length = request.headers.get("content-length", "")
    is_number = length.isascii() and length.isdigit() and len(length) <= len(str(MAX_FORM_BYTES))
    if not is_number or int(length) > MAX_FORM_BYTES:
        return {}
    try:
        text = (await request.body()).decode()
        return dict(parse_qsl(text, max_num_fields=MAX_FORM_FIELDS))
    except ValueError:
        return {}


def _page(console: Console, name: str, *, code: int = 200, **values: object) -> Response:
    given = {"page": name, "problem": "", "operator": None, **values}
    return HTMLResponse(console.templates.get_template(f"{name}.html").render(**given), status_code=code)


def _refused(console: Console, operator: Operator, problem: str) -> Response:
    return _page(console, "refused", code=HTTPStatus.FORBIDDEN, operator=operator, problem=problem)


def _view(name: str, services: Services, console: Console) -> dict[str, Any]:
    if name == "overview":
        return views.overview(services, console)
    if name == "tenants":
        return views.tenants(services, services.clock())
    if name == "audit":
        return views.audit(services, console)
    if name == "egress":
        return views.egress(services)
    return {"models": sorted(services.pool.models())}


def _parts(request: Request) -> tuple[Services, Console]:
    services: Services = request.app.state.services
    assert services.console is not None  # noqa: S101 - the routes exist only with it
    return services, services.console


async def _operator(
    request: Request, services: Services, console: Console, *, touches: bool
) -> Operator | None:
    """The logged-in operator; a revoked key ends its sessions."""
    session_id = request.cookies.get(COOKIE, "")
    session = console.sessions.find(session_id, touches=touches)
    if session is None:
        return None
    caller = await _caller(request, services, session.credential)
    if caller is None:
        console.sessions.end(session_id)
        return None
    return Operator(session=session, caller=caller)


async def _caller(request: Request, services: Services, credential: str) -> Caller | None:
    """The admin of a key or token, authenticated as in a request to the admin API."""
    headers = [(b"authorization", b"Bearer " + credential.encode())]
    try:
        caller = await identify(services, {**request.scope, "headers": headers}, Surface.CONSOLE)
    except InvalidApiKeyError:
        return None
    if not caller.key.admin:
        count_refusal(services, request.scope, Surface.CONSOLE, RefusalReason.ROLE)
        return None
    return caller


def _is_encrypted(request: Request, console: Console) -> bool:
    return request.url.scheme == "https" or console.settings.behind_tls


router.routes += [
    Route(LOGIN, show_login, methods=["GET"]),
    Route(LOGIN, log_in, methods=["POST"]),
    Route(f"{PREFIX}/logout", ForOperators(log_out, scope=None).__call__, methods=["POST"]),
    Route(f"{PREFIX}/audit/verify", ForOperators(verify).__call__, methods=["POST"]),
    Route(
        f"{PREFIX}/egress/check",
        ForOperators(check_egress, scope=AdminScope.WORKERS).__call__,
        methods=["POST"],
    ),
    Route(f"{PREFIX}/static/{{name}}", show_static, methods=["GET"]),
    Route(PREFIX, ForOperators(show("overview")).__call__, methods=["GET"]),
    *(Route(f"{PREFIX}/{name}", ForOperators(show(name)).__call__, methods=["GET"]) for name in PAGES[1:]),
    *(
        Route(f"{PREFIX}/{name}/live", ForOperators(show_live(name), is_live=True).__call__, methods=["GET"])
        for name in PAGES[:-1]
    ),
]
