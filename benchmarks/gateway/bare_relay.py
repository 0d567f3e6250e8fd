"""
A relay without any feature, `python -m benchmarks.gateway.bare_relay PORT WORKER`: how cheap Python can be.

uvicorn as in the gateway, and connections to the worker that are kept.  It reads a whole body, sends it on,
and sends each piece of the answer as it arrives.
"""

import asyncio
import sys
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvicorn


class WorkerConnection(asyncio.Protocol):
    """One request at a time; `arrived` has the answer's head, its pieces, and None at its end."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> None:
        self._parser, self._headers = httptools.HttpResponseParser(self), list[tuple[bytes, bytes]]()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in {b"content-type", b"content-length"}:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.arrived.put_nowait({"type": "http.response.start", "status": status, "headers": self._headers})

    def on_body(self, body: bytes) -> None:
        self.arrived.put_nowait({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        self.arrived.put_nowait(None)


class Relay:
    def __init__(self, worker: str) -> None:
        self._address = urlsplit(worker)
        self._idle: list[WorkerConnection] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        head = f"{scope['method']} {scope['path']} HTTP/1.1\r\nHost: {self._address.netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = self._idle.pop() if self._idle else await self._open()
        connection.ask(head.encode() + body)
        while (piece := await connection.arrived.get()) is not None:
            await send(piece)
        self._idle.append(connection)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _open(self) -> WorkerConnection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(WorkerConnection, self._address.hostname, self._address.port)
        return made


if __name__ == "__main__":
    uvicorn.run(
        Relay(sys.argv[2]),
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=False,
        backlog=4096,
    )
