"""Sends a relayed answer over ASGI, and cancels the relay when the client disconnects."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope, Send

from appliance.gateway.call import Call
from appliance.gateway.gateway import Gateway
from appliance.gateway.reply import ReplyHead

CONNECTION = "appliance.connection"
"""Key of the request's `Connection` in an ASGI scope's `extensions`; other servers than ours have none."""


class Connection(Protocol):
    """What a relay needs of a connection and ASGI has not, or only with a task for each request or frame."""

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Set what is called when the client disconnects."""

    def write_now(self, data: bytes) -> bool:
        """Send a part of a stream's body; False if it has to be sent by ASGI's `send`, which may wait."""


async def relay_call(gateway: Gateway, call: Call, scope: Scope, send: Send) -> None:
    """
    Run `Gateway.relay`, and cancel it when the client disconnects.

    The caller renders what the relay raises before it has answered, like any route's error.
    """
    connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
    reply = AsgiReply(send, connection)
    relaying = asyncio.current_task()
    assert relaying is not None  # noqa: S101 - a coroutine runs in a task

    def leave() -> None:
        if not reply.ended and not reply.client_left:
            reply.client_left = True
            relaying.cancel()

    if connection is not None:
        connection.watch(leave)
    try:
        await gateway.relay(call, reply)
    except asyncio.CancelledError:
        # Another task cancelled this one too: that must not be swallowed.
        if not reply.client_left or relaying.uncancel():
            raise
    finally:
        reply.ended = True
        if connection is not None:
            connection.watch(None)


class AsgiReply:
    """`appliance.gateway.reply.ReplySink` on an ASGI send callable."""

    def __init__(self, send: Send, connection: Connection | None) -> None:
        self._send = send
        self._connection = connection
        self.client_left = False
        self.ended = False
        """Whether the client has the whole answer, so that its disconnect means nothing."""

    async def start(self, head: ReplyHead) -> None:
        headers = [(b"content-type", head.content_type.encode())]
        if head.length is not None:
            headers.append((b"content-length", b"%d" % head.length))
        if head.content_type.startswith("text/event-stream"):
            headers += _STREAM_HEADERS
        headers += [(name.encode(), value.encode("latin-1")) for name, value in head.headers.items()]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes) -> bool:
        return self._connection is not None and self._connection.write_now(data)

    async def end(self, data: bytes) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
