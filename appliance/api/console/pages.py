"""
The console's routes: logging in and out, five pages, and the two things that can be asked for.

What a page shows of itself again is the same fragment it was rendered with, so that it reads alike with
and without JavaScript.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from appliance.api.auth import identify
from appliance.api.console import views
from appliance.api.console.console import Console
from appliance.api.console.forms import is_from_here, read_form
from appliance.api.console.headers import PREFIX
from appliance.api.console.sessions import Session
from appliance.api.services import Services
from appliance.errors import ApplianceError, ControlRefusedError, InvalidApiKeyError, RouteNotFoundError
from appliance.tenancy import Caller

COOKIE = "appliance_console"
LOGIN = f"{PREFIX}/login"
STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
SEE_OTHER, UNAUTHORIZED, FORBIDDEN, CONFLICT, TOO_MANY = 303, 401, 403, 409, 429
PAGES = ("overview", "tenants", "audit", "egress", "chat")

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Who is logged in, for one request."""

    session: Session
    caller: Caller

    @property
    def actor(self) -> str:
        """How the audit log names them."""
        return f"console:{self.caller.key.key_id}"


Handler = Callable[[Request, Services, Console, Operator], Awaitable[Response]]


class ForOperators:
    """A route that only an operator who is logged in reaches; forms must be of their own session."""

    def __init__(self, handler: Handler, *, is_live: bool = False) -> None:
        """Take what answers, and whether a page asks for it by itself."""
        self._handler, self._is_live = handler, is_live

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        services, console = _parts(request)
        operator = _operator(request, services, console, touches=not self._is_live)
        if operator is None:
            if self._is_live:
                return Response(status_code=UNAUTHORIZED)
            return RedirectResponse(f"{LOGIN}?ended=1" if COOKIE in request.cookies else LOGIN, SEE_OTHER)
        if request.method == "POST":
            form = await read_form(request)
            if not is_from_here(request) or not operator.session.vouches_for(form.get("csrf", "")):
                message = (
                    "This form did not come from a page of this session. Go back, reload, and try again."
                )
                return _page(console, "refused", code=FORBIDDEN, operator=operator, problem=message)
        return await self._handler(request, services, console, operator)


async def show_login(request: Request) -> Response:
    """Ask for an admin key."""
    _, console = _parts(request)
    problem = "You were logged out. Log in again to go on." if "ended" in request.query_params else ""
    return _page(console, "login", problem=problem)


async def log_in(request: Request) -> Response:
    """Open a session for an admin key or token; a refusal is counted and logged like one of the API."""
    services, console = _parts(request)
    address = request.client.host if request.client else ""
    if not is_from_here(request):
        message = "This form did not come from a page of this gateway. Open the console and try again."
        return _page(console, "login", code=FORBIDDEN, problem=message)
    # Nothing is waited for from here on, so of forms that are sent at once none gets past the count.
    credential = (await read_form(request)).get("key", "").strip()
    wait = console.logins.wait_seconds(address)
    if wait:
        message = f"Too many logins failed. Wait {int(wait) + 1} seconds."
        response = _page(console, "login", code=TOO_MANY, problem=message)
        response.headers["Retry-After"] = str(int(wait) + 1)
        return response
    caller = _caller(request, services, credential)
    if caller is None:
        console.logins.failed(address)
        services.logger.warning("console_login_refused", request_id=request.scope["state"]["request_id"])
        message = "This key does not open the console. Use an admin key, as for the admin API."
        return _page(console, "login", code=UNAUTHORIZED, problem=message)
    console.logins.succeeded(address)
    services.logger.info(
        "console_login", key_id=caller.key.key_id, request_id=request.scope["state"]["request_id"]
    )
    response = RedirectResponse(PREFIX, SEE_OTHER)
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
    """End the session."""
    console.sessions.end(request.cookies[COOKIE])
    services.logger.info("console_logout", key_id=operator.caller.key.key_id)
    response = RedirectResponse(LOGIN, SEE_OTHER)
    response.delete_cookie(
        COOKIE, path=PREFIX, httponly=True, samesite="strict", secure=_is_encrypted(request, console)
    )
    return response


def show(name: str) -> Handler:
    """The route of a page."""

    async def answer(_request: Request, services: Services, console: Console, operator: Operator) -> Response:
        return _page(console, name, operator=operator, **_view(name, services, console))

    return answer


def show_live(name: str) -> Handler:
    """The route of what changes on a page."""

    async def answer(
        _request: Request, services: Services, console: Console, _operator: Operator
    ) -> Response:
        template = console.templates.get_template(f"_{name}.html")
        return HTMLResponse(template.render(**_view(name, services, console)))

    return answer


async def verify(_request: Request, services: Services, console: Console, operator: Operator) -> Response:
    """Begin to verify the whole log; the page tells how far it is."""
    if console.verification.start():
        services.logger.info("console_verification", key_id=operator.caller.key.key_id)
    return RedirectResponse(f"{PREFIX}/audit", SEE_OTHER)


async def check_egress(
    _request: Request, services: Services, console: Console, operator: Operator
) -> Response:
    """Try to get out now, recorded as the admin API does."""
    try:
        if services.egress is None:
            message = "This gateway makes no egress checks."
            raise ControlRefusedError(message)
        await services.egress.check(operator.actor)
    except ApplianceError as error:
        view = _view("egress", services, console)
        return _page(console, "egress", code=CONFLICT, operator=operator, problem=str(error), **view)
    return RedirectResponse(f"{PREFIX}/egress", SEE_OTHER)


async def show_static(request: Request) -> Response:
    """One of the files of the pages; they hold no secret and ask for no login."""
    name = request.path_params["name"]
    if name not in STATIC:
        message = f"There is no GET {request.url.path}."
        raise RouteNotFoundError(message)
    content = files("appliance.api.console").joinpath("static", name).read_bytes()
    return Response(content, media_type=STATIC[name])


def _page(console: Console, name: str, *, code: int = 200, **values: object) -> Response:
    given = {"page": name, "problem": "", "operator": None, **values}
    return HTMLResponse(console.templates.get_template(f"{name}.html").render(**given), status_code=code)


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
    assert services.console is not None  # noqa: S101 - the routes are there only with it
    return services, services.console


def _operator(request: Request, services: Services, console: Console, *, touches: bool) -> Operator | None:
    """Who is logged in; a key that is no longer in force ends its sessions."""
    session_id = request.cookies.get(COOKIE, "")
    session = console.sessions.find(session_id, touches=touches)
    if session is None:
        return None
    caller = _caller(request, services, session.credential)
    if caller is None:
        console.sessions.end(session_id)
        return None
    return Operator(session=session, caller=caller)


def _caller(request: Request, services: Services, credential: str) -> Caller | None:
    """The admin of a key or token, judged as if it had come with a request to the admin API."""
    headers = [(b"authorization", b"Bearer " + credential.encode())]
    try:
        caller = identify(services, {**request.scope, "headers": headers})
    except InvalidApiKeyError:
        return None
    return caller if caller.key.admin else None


def _is_encrypted(request: Request, console: Console) -> bool:
    return request.url.scheme == "https" or console.settings.behind_tls


router.routes += [
    Route(LOGIN, show_login, methods=["GET"]),
    Route(LOGIN, log_in, methods=["POST"]),
    Route(f"{PREFIX}/logout", ForOperators(log_out).__call__, methods=["POST"]),
    Route(f"{PREFIX}/audit/verify", ForOperators(verify).__call__, methods=["POST"]),
    Route(f"{PREFIX}/egress/check", ForOperators(check_egress).__call__, methods=["POST"]),
    Route(f"{PREFIX}/static/{{name}}", show_static, methods=["GET"]),
    Route(PREFIX, ForOperators(show("overview")).__call__, methods=["GET"]),
    *(Route(f"{PREFIX}/{name}", ForOperators(show(name)).__call__, methods=["GET"]) for name in PAGES[1:]),
    *(
        Route(f"{PREFIX}/{name}/live", ForOperators(show_live(name), is_live=True).__call__, methods=["GET"])
        for name in PAGES[:-1]
    ),
]
