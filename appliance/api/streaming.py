"""Sends a relayed answer over ASGI, and cancels the relay when the client disconnects."""

import asyncio

from starlette.types import Receive, Send

from appliance.gateway.call import Call
from appliance.gateway.gateway import Gateway
from appliance.gateway.reply import ReplyHead

LISTEN_AFTER_SECONDS = 0.02
"""A request that ends sooner costs no task that listens for the disconnect."""


async def relay_call(gateway: Gateway, call: Call, receive: Receive, send: Send) -> None:
    """
    Run `Gateway.relay`, and cancel it when the client disconnects.

    Unless it ends at once, a task listens for the disconnect, and ends before this returns.  The caller
    renders what the relay raises before it has answered, like any route's error.
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
        # Another task cancelled this one too: that must not be swallowed.
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
