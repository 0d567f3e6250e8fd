"""
The ASGI end of a relay: bytes out as they come, and an eye on whether the client is still there.
"""

import asyncio

from starlette.types import Receive, Send

from appliance.gateway.call import Call
from appliance.gateway.gateway import Gateway
from appliance.gateway.reply import ReplyHead

LISTEN_AFTER_SECONDS = 0.02
"""A request that is answered sooner is not worth a task that waits for its client to leave."""


async def relay_call(gateway: Gateway, call: Call, receive: Receive, send: Send) -> None:
    """
    Run `Gateway.relay`, and stop it when the client leaves.

    Unless it ends at once, a task listens for the disconnect next to it, and ends before this returns.
    What the relay raises before it has answered is for the caller to render, like any route's error.
    """
    reply = AsgiReply(send)
    relaying = asyncio.current_task()
    assert relaying is not None  # noqa: S101 - a coroutine runs in a task

    def leave(_listener: object) -> None:
        if not reply.ended:
            reply.client_left = True
            relaying.cancel()

    listener: asyncio.Future[None] | None = None

    def listen() -> None:
        nonlocal listener
        listener = asyncio.ensure_future(_disconnected(receive))
        listener.add_done_callback(leave)

    timer = asyncio.get_running_loop().call_later(LISTEN_AFTER_SECONDS, listen)
    try:
        await gateway.relay(call, reply)
    except asyncio.CancelledError:
        # Cancelled by somebody else as well: that is not ours to swallow.
        if not reply.client_left or relaying.uncancel():
            raise
    finally:
        reply.ended = True
        timer.cancel()
        if listener is not None:
            listener.cancel()


class AsgiReply:
    """`appliance.gateway.reply.ReplySink` on an ASGI send callable."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.client_left = False
        self.ended = False
        """Whether the client has all, so that its leaving means nothing."""

    async def start(self, head: ReplyHead) -> None:
        """Send status and headers."""
        headers = [(b"content-type", head.content_type.encode())]
        if head.length is not None:
            headers.append((b"content-length", b"%d" % head.length))
        if head.content_type.startswith("text/event-stream"):
            headers += _STREAM_HEADERS
        headers += [(name.encode(), value.encode("latin-1")) for name, value in head.headers.items()]
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send the last part of the body."""
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
