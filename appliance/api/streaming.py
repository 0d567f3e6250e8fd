"""Sends a relayed answer over ASGI, and cancels the relay when the client disconnects."""

import asyncio
from collections.abc import Callable

from starlette.types import Scope, Send

from appliance.gateway.call import Call
from appliance.gateway.gateway import Gateway
from appliance.gateway.reply import ReplyHead

WATCH = "appliance.watch"
"""
Key of a function in an ASGI scope's `extensions`: it takes what to call when the client disconnects, or None.

ASGI's own way, `receive`, takes a task that waits beside each request.  Other servers than ours have none.
"""
Watch = Callable[[Callable[[], None] | None], None]


async def relay_call(gateway: Gateway, call: Call, scope: Scope, send: Send) -> None:
    """
    Run `Gateway.relay`, and cancel it when the client disconnects.

    The caller renders what the relay raises before it has answered, like any route's error.
    """
    reply = AsgiReply(send)
    relaying = asyncio.current_task()
    assert relaying is not None  # noqa: S101 - a coroutine runs in a task

    def leave() -> None:
        if not reply.ended and not reply.client_left:
            reply.client_left = True
            relaying.cancel()

    watch: Watch = scope.get("extensions", {}).get(WATCH, _watch_nothing)
    watch(leave)
    try:
        await gateway.relay(call, reply)
    except asyncio.CancelledError:
        # Another task cancelled this one too: that must not be swallowed.
        if not reply.client_left or relaying.uncancel():
            raise
    finally:
        reply.ended = True
        watch(None)


def _watch_nothing(_on_disconnect: Callable[[], None] | None) -> None:
    """Never tell of a disconnect."""


class AsgiReply:
    """`appliance.gateway.reply.ReplySink` on an ASGI send callable."""

    def __init__(self, send: Send) -> None:
        self._send = send
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

    async def end(self, data: bytes) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
