"""
Who uses the console: routes for logged-in operators, their pages and their actions.

A form is done at most once: its answer redirects to the page it came from, which says what was done, or why
not, with the form as it was sent.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from appliance.api.auth import count_refusal, identify
from appliance.api.console.console import Console
from appliance.api.console.forms import is_from_here, read_form
from appliance.api.console.headers import PREFIX
from appliance.api.console.sessions import ConsoleSession, Notice, SentForm
from appliance.api.refusals import Surface
from appliance.api.scopes import require_scopes
from appliance.api.services import Services
from appliance.errors import ApplianceError, InvalidApiKeyError, spec_of
from appliance.tenancy import AdminScope, Caller
from appliance.tenancy.identity.rejection import RefusalReason

COOKIE = "appliance_console"
LOGIN = f"{PREFIX}/login"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    session: ConsoleSession
    caller: Caller

    @property
    def actor(self) -> str:
        """Who acts, for the audit log."""
        return f"console:{self.caller.key.key_id}"

    def may(self, scope: str) -> bool:
        return self.caller.key.has_scope(AdminScope(scope))


Handler = Callable[[Request, Services, Console, Operator], Awaitable[Response]]
Action = Callable[[Request, Services, Operator, dict[str, str]], Awaitable[Notice | None]]
"""Takes the fields of the form; an ApplianceError is shown instead of the notice."""


class ForOperators:
    """A route for logged-in operators with a scope; forms must carry the token of their session."""

    def __init__(
        self, handler: Handler, *, scope: AdminScope | None = AdminScope.READ, is_live: bool = False
    ) -> None:
        """Wrap a handler; `is_live` if pages request it by themselves, which does not count as use."""
        self._handler, self._scope, self._is_live = handler, scope, is_live

    async def __call__(self, request: Request) -> Response:
        services, console = parts_of(request)
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
                return refuse(console, operator, message)
        try:
            if self._scope is not None:
                require_scopes(operator.caller.key, self._scope)
            return await self._handler(request, services, console, operator)
        except ApplianceError as error:
            return refuse(console, operator, str(error), spec_of(error).status)


def acting(action: Action, page: Callable[[Request], str]) -> Handler:
    """Do what a form of a page asks for, and show the page again; `page` is its path after the prefix."""

    async def answer(request: Request, services: Services, _console: Console, operator: Operator) -> Response:
        form = await read_form(request)
        try:
            operator.session.notice = await action(request, services, operator, form)
        except ApplianceError as error:
            sent = SentForm(path=request.scope["path"], fields=form)
            operator.session.notice = Notice(text=str(error), is_problem=True, sent=sent)
        return RedirectResponse(f"{PREFIX}{page(request)}", HTTPStatus.SEE_OTHER)

    return answer


def page(
    console: Console, name: str, *, code: int = 200, operator: Operator | None = None, **values: object
) -> Response:
    notice = operator.session.take_notice() if operator else None

    def refused(path: str, **hidden: str) -> dict[str, str]:
        """What the form of this path, with these hidden fields, contained if it has just been refused."""
        sent = notice.sent if notice else None
        is_it = sent is not None and sent.path == path and hidden.items() <= sent.fields.items()
        return dict(sent.fields) if sent and is_it else {}

    given = {
        "page": name,
        "problem": "",
        "operator": operator,
        "notice": notice,
        "refused": refused,
        **values,
    }
    return HTMLResponse(console.templates.get_template(f"{name}.html").render(**given), status_code=code)


def fragment(console: Console, name: str, **values: object) -> Response:
    """The live part of a page."""
    return HTMLResponse(console.templates.get_template(f"_{name}.html").render(**values))


def refuse(console: Console, operator: Operator, problem: str, code: int = HTTPStatus.FORBIDDEN) -> Response:
    return page(console, "refused", code=code, operator=operator, problem=problem)


def parts_of(request: Request) -> tuple[Services, Console]:
    services: Services = request.app.state.services
    assert services.console is not None  # noqa: S101 - the routes exist only with it
    return services, services.console


async def admin_of(request: Request, services: Services, credential: str) -> Caller | None:
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


async def _operator(
    request: Request, services: Services, console: Console, *, touches: bool
) -> Operator | None:
    """The logged-in operator; a revoked key ends its sessions."""
    session_id = request.cookies.get(COOKIE, "")
    session = console.sessions.find(session_id, touches=touches)
    if session is None:
        return None
    caller = await admin_of(request, services, session.credential)
    if caller is None:
        console.sessions.end(session_id)
        return None
    return Operator(session=session, caller=caller)
