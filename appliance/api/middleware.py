"""
What happens to every request before a route sees it: an id, and a limit on its size.

Pure ASGI: a middleware that wraps responses would buffer or re-schedule streams.
"""

import asyncio
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.api.errors import Rendering, render, rendering_of
from appliance.errors import BodyTooLargeError

CLIENT_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")
DRAIN_BYTES = 8
"""How many times the limit is still read and thrown away, so that the client hears why."""
DRAIN_SECONDS = 10.0


class RequestIdentity:
    """Give each request an id of ours, and echo the client's own if it sent a sane one."""

    def __init__(self, app: ASGIApp, new_request_id: Callable[[], str]) -> None:
        self._app = app
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._new_request_id()
        given = Headers(scope=scope).get("x-request-id", "")
        client_request_id = given if CLIENT_ID.match(given) else None
        scope.setdefault("state", {}).update(request_id=request_id, client_request_id=client_request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", client_request_id or request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)


class BodyLimit:
    """Refuse bodies over the limit without keeping them in memory."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, count: Callable[[Rendering], None]) -> None:
        self._app = app
        self._count = count
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            await self._refuse(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"The body is larger than {self._max_body_bytes} bytes. Send a smaller one.")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that is still sending would meet a closed connection and never read the answer,
        # so a bounded amount of what it sends is read and dropped first.
        dropped, more = 0, True
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while more and dropped < DRAIN_BYTES * self._max_body_bytes:
                    message = await receive()
                    more = bool(message.get("more_body", False))
                    dropped += len(message.get("body", b""))
        except TimeoutError:
            pass
        error = self._too_large()
        self._count(rendering_of(error))
        response = render(error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)
