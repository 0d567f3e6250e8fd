"""
A relay between a client and the gateway that changes nothing and keeps every byte of both directions.
At its end the search for leaks receives all of it.

It works on TCP: what a client or the gateway does with its connection, leaving in the middle included,
reaches the other side as it is.  What was said is read as HTTP afterwards.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

from tests import leaks

READ_BYTES = 2**16


@dataclass(kw_only=True)
class Exchange:
    """One request with its answer, as far as they came; header names are in lower case."""

    method: str = ""
    path: str = ""
    asked: dict[str, str] = field(default_factory=dict)
    """Headers of the request."""
    request: bytes = b""
    status: int = 0
    """0 where no answer came."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    """Whether the answer came to its end."""

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def events(self) -> Iterator[tuple[str, Any]]:
        """Name and decoded data of each event that came whole; `[DONE]` stays text."""
        for frame in self.body.decode("utf-8", "replace").split("\n\n")[:-1]:
            lines = [line.partition(":")[::2] for line in frame.split("\n") if not line.startswith(":")]
            name = "".join(value.strip() for part, value in lines if part == "event")
            data = "\n".join(value.removeprefix(" ") for part, value in lines if part == "data")
            if data:
                yield name, data if data == "[DONE]" else json.loads(data)


@dataclass
class _Connection:
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)


class Tap:
    """Listens on loopback while it is entered; `url` takes the place of the gateway's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._upstream = (parts.hostname, parts.port)
        self._connections: list[_Connection] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_reason: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        for exchange in self.exchanges():
            leaks.hear(exchange.request)
            leaks.hear_answer(exchange.body)

    def exchanges(self) -> list[Exchange]:
        """All traffic so far, in the order of the connections."""
        return [exchange for connection in self._connections for exchange in _parse(connection)]

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        return server

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        kept = _Connection()
        self._connections.append(kept)
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        pipes = {
            asyncio.ensure_future(_pipe(reader, upstream_writer, kept.sent)),
            asyncio.ensure_future(_pipe(upstream_reader, writer, kept.received)),
        }
        try:
            # HTTP/1.1 closes both directions at once: the first end is the end.
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            writer.close()
            upstream_writer.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    try:
        while data := await reader.read(READ_BYTES):
            kept += data
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass


def _parse(connection: _Connection) -> list[Exchange]:
    exchanges: list[Exchange] = []
    requests, answers = _Requests(exchanges), _Answers(exchanges)
    requests.parser = httptools.HttpRequestParser(requests)
    requests.parser.feed_data(bytes(connection.sent))
    answers.parser = httptools.HttpResponseParser(answers)
    answers.parser.feed_data(bytes(connection.received))
    return exchanges


class _Requests:
    parser: httptools.HttpRequestParser

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges

    def on_message_begin(self) -> None:
        self._exchanges.append(Exchange())

    def on_url(self, url: bytes) -> None:
        self._exchanges[-1].path += url.decode().partition("?")[0]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchanges[-1].asked[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._exchanges[-1].method = self.parser.get_method().decode()

    def on_body(self, body: bytes) -> None:
        self._exchanges[-1].request += body


class _Answers:
    parser: httptools.HttpResponseParser

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._waiting = iter(exchanges)
        self._exchange = Exchange()

    def on_message_begin(self) -> None:
        self._exchange = next(self._waiting)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._exchange.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._exchange.body += body

    def on_message_complete(self) -> None:
        self._exchange.complete = True
