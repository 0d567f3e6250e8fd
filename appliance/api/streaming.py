"""
The ASGI end of a relay: bytes out as they come, and an eye on whether the client is still there.
"""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.call import Call
from appliance.gateway import Gateway, Head


class RelayResponse(Response):
    """
    Runs `Gateway.relay` and stops it when the client leaves.

    The relay runs in a task of its own next to one that listens for the disconnect; this method
    owns both and returns only when both have ended, so none outlives its request.  What the relay
    raises before it has answered is rendered like any route's error.
    """

    def __init__(self, gateway: Gateway, call: Call) -> None:
        super().__init__()
        self._gateway = gateway
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Answer the request."""
        reply = AsgiReply(send)
        relay = asyncio.ensure_future(self._gateway.relay(self._call, reply))
        listener = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({relay, listener}, return_when=asyncio.FIRST_COMPLETED)
            if not relay.done():
                reply.client_left = True
                relay.cancel()
            await relay
        except asyncio.CancelledError:
            if not reply.client_left:
                relay.cancel()
                await asyncio.wait({relay})
                raise
        finally:
            listener.cancel()
        if reply.started and not reply.client_left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class AsgiReply:
    """`gateway.Reply` on an ASGI send callable."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.client_left = False
        self.started = False

    async def start(self, head: Head) -> None:
        """Send status and headers."""
        headers = {"content-type": head.content_type, **head.headers}
        if head.content_type.startswith("text/event-stream"):
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": head.status,
                "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
            }
        )

    async def write(self, data: bytes) -> None:
        """Send part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
