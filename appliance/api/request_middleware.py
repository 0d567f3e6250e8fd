"""
Middleware of every request: its id, the form of its path, and limits on body sizes.

Pure ASGI: a middleware that wraps responses would buffer or re-schedule streams.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.error_responses import render
from appliance.errors import (
    ApplianceError,
    AtCapacityError,
    BodyTooLargeError,
    ErrorSpec,
    GatewayStoppingError,
    InvalidRequestError,
    spec_of,
)
from appliance.serving.dialects.routes import ANTHROPIC
from appliance.tenancy import Caller

MAX_LENGTH_DIGITS = 18
"""Digits of a `Content-Length`; a longer number is too large in any case."""
CLIENT_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
DRAIN_BYTES = 8
"""Multiple of the limit that is read and dropped, so that the client receives the error."""
DRAIN_SECONDS = 10.0


NAMES_BELOW = b"/v1/models/"
"""Model names have slashes, which some clients escape: below this path `%2F` stands for one."""
NOT_PLAIN = re.compile(
    rb"^[^/]"  # not a path
    rb"|//|/\.{1,2}(?:/|$)|\\"  # an empty or dot segment, a backslash
    rb"|%(?![0-9A-Fa-f]{2})"  # not an escape
    rb"|%[01]|%7[Ff]"  # a control character
    rb"|%2[Ff]|%5[Cc]"  # a slash, a backslash
    rb"|%(?:2[DdEe]|3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|5[Ff]|7[Ee])"  # an unreserved character (RFC 3986)
)


class PlainPath:
    """
    Refuses paths that a proxy in front may read differently, before routing and authentication.

    A rule of a proxy such as "deny /admin" compares a prefix, of the raw or of the decoded path.  No path
    that passes here has such a prefix in one form only.
    """

    def __init__(self, app: ASGIApp, count: Callable[[ErrorSpec], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_plain(scope["raw_path"]):
            await self._app(scope, receive, send)
            return
        error = InvalidRequestError(
            "The path has an empty or dot segment, a backslash, or an escape that is malformed or not needed."
            " Send it in its plain form.",
            code="invalid_path",
        )
        self._count(spec_of(error))
        await render(error, scope["path"])(scope, receive, send)


def is_plain(path: bytes) -> bool:
    if path.startswith(NAMES_BELOW):
        path = path.replace(b"%2F", b"/").replace(b"%2f", b"/")
    return NOT_PLAIN.search(path) is None


@dataclass(slots=True)
class Stop:
    """How far this gateway's stop is; the composition root changes it."""

    has_begun: bool = False
    """Each connection is closed after its answer."""
    refuses: bool = False


class RequestIdentity:
    """
    Gives each request an id, echoes a well-formed one of the client, and adds a tenant's limit headers.

    While the gateway stops it sends clients elsewhere: by closing connections, later by refusing requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        new_request_id: Callable[[], str],
        limit_headers: Callable[[Caller, str | None], dict[str, str]],
        stop: Stop,
    ) -> None:
        self._app = app
        self._new_request_id = new_request_id
        self._limit_headers = limit_headers
        self._stop = stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._new_request_id()
        given = Headers(scope=scope).get("x-request-id", "")
        client_request_id = given if CLIENT_ID.match(given) else None
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, client_request_id=client_request_id)

        is_anthropic = scope["path"].startswith(ANTHROPIC)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", client_request_id or request_id)
                if "caller" in state:
                    limit_headers = self._limit_headers(state["caller"], state.get("model"))
                    for name, value in limit_headers.items():
                        headers.append(name, value)
                if is_anthropic:
                    headers["request-id"] = client_request_id or request_id
                if self._stop.has_begun:
                    headers["connection"] = "close"
            await send(message)

        if self._stop.refuses:
            refusal = GatewayStoppingError("This gateway is stopping. Send the request again.")
            await render(refusal, scope["path"])(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)


class BodyLimit:
    """
    Refuses bodies over the limit, and bodies that do not fit in memory with the others.

    A body counts from its first byte until its request has been answered; not on paths of `larger`, which
    have their own limit and read their body piece by piece.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        max_bodies_bytes: int,
        count: Callable[[ErrorSpec], None],
        larger: Mapping[str, int],
    ) -> None:
        self._app = app
        self._count = count
        self._max_body_bytes = max_body_bytes
        self._larger = larger
        self._room = _Room(max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        larger = self._larger.get(scope["path"])
        most = self._max_body_bytes if larger is None else larger
        declared = Headers(scope=scope).get("content-length", "")
        is_number = declared.isascii() and declared.isdigit()
        if is_number and (len(declared) > MAX_LENGTH_DIGITS or int(declared) > most):
            await self._refuse(_too_large(most), most, scope, receive, send)
            return
        refusal: ApplianceError | None = None
        body = _Body(self._room if larger is None else None, most, receive)
        try:
            await self._app(scope, body.receive, send)
        except _RefusedBodyError as refused:
            refusal = refused.error
        finally:
            self._room.held_bytes -= body.held_bytes
        if refusal is not None:
            await self._refuse(refusal, most, scope, receive, send)

    async def _refuse(
        self, error: ApplianceError, most: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer at once, and then read and drop some of what the client still sends."""
        self._count(spec_of(error))
        response = render(error, scope["path"])
        response.headers["connection"] = "close"
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # Closing now would reset the connection while the client sends, and it would never read the error.
        dropped, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while more and dropped < DRAIN_BYTES * most:
                    message = await receive()
                    more = bool(message.get("more_body", False))
                    dropped += len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(slots=True)
class _Room:
    max_bytes: int
    held_bytes: int = 0


@dataclass(slots=True)
class _Body:
    """One body, counted as it arrives; without a room only against its own limit."""

    room: _Room | None
    max_bytes: int
    source: Receive
    received_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.received_bytes if self.room is not None else 0

    async def receive(self) -> Message:
        """ASGI's `receive`; raises _RefusedBodyError beyond a limit."""
        message = await self.source()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.received_bytes += size
            if self.room is not None:
                self.room.held_bytes += size
            if self.received_bytes > self.max_bytes:
                raise _RefusedBodyError(_too_large(self.max_bytes))
            if self.room is not None and self.room.held_bytes > self.room.max_bytes:
                problem = "Other requests use all memory for request bodies. Try again in a moment."
                raise _RefusedBodyError(AtCapacityError(problem))
        return message


class _RefusedBodyError(Exception):
    """Ends the reading of a body, through whatever reads it."""

    def __init__(self, error: ApplianceError) -> None:
        super().__init__()
        self.error = error


def _too_large(most: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is larger than {most} bytes. Send a smaller one.")
