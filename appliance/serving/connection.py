"""
One HTTP/1.1 connection to a worker.

The parser is llhttp's, by `httptools`, which uvicorn uses at the other end.  A general client costs more
than everything else that the gateway does for a request; what it adds (redirects, cookies, proxies,
compression) must not happen here anyway.

Back-pressure: beyond `MAX_UNREAD_BYTES` that the client has not taken, the socket is not read.  It is read
again in its turn, once they are taken: many full sockets would fill a turn of the event loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import httptools

from appliance.errors import WorkerFailedError
from appliance.infra.read_turns import ReadTurns
from appliance.serving.worker_protocol import LEAVING_HEADER

MAX_UNREAD_BYTES = 2**16
MAX_HEAD_BYTES = 2**16
JOINED_BYTES = 2**16
"""Up to here joining a request is cheaper than sending its pieces."""
Piece = bytes | memoryview
PassOn = Callable[[bytes], bool]
"""Takes what has arrived within the event loop's callback; False leaves it for the reader."""
_INFORMATIONAL = 200
_LEAVING = LEAVING_HEADER.encode()


class WorkerConnection(asyncio.Protocol):
    def __init__(self, turns: ReadTurns) -> None:
        self._turns = turns
        self._is_paused = self._is_listed = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wait_until = self._wait_seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pass_on: PassOn | None = None
        self._lost: str | None = None
        self.idle_since = 0.0
        """By the loop's clock."""
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._unread = self._head_bytes = 0
        self._has_head = self._has_length = self._keeps_alive = False
        self.status = 0
        self.content_type = ""
        self.is_leaving = False
        """Whether the worker refused the request because it is stopping."""
        self.is_complete = False
        self._is_busy = False
        self.passed = 0
        """How often something was passed on."""
        self.has_received = False
        """Whether anything has arrived since the request was sent."""

    @property
    def is_usable(self) -> bool:
        return self._lost is None and not self._is_busy

    def send(self, head: bytes, body: Sequence[Piece]) -> None:
        """Send a request; the connection must be usable."""
        assert self._transport is not None  # noqa: S101 - connected before the caller has it
        self._begin()
        self._is_busy = True
        if sum(map(len, body)) > JOINED_BYTES:
            self._transport.writelines((head, *body))
        else:
            self._transport.write(b"".join((head, *body)))

    async def read_head(self, seconds: float) -> None:
        """Wait for status and headers; raises TimeoutError if nothing arrived within `seconds`."""
        while not self._has_head:
            self._refuse_if_lost("could not be reached")
            await self._wait(seconds)

    async def read(self, seconds: float, pass_on: PassOn | None = None) -> bytes:
        """
        Bytes of the body that have arrived, empty at the end; raises TimeoutError, and may be called again.

        While this waits, `pass_on` is offered what arrives before the end: waking a task costs more.
        """
        self._pass_on = pass_on
        try:
            while not self._parts and not self.is_complete:
                self._refuse_if_lost("broke off")
                if self._is_paused:
                    self._read_on()
                await self._wait(seconds)
        finally:
            self._pass_on = None
        return self._take()

    def _take(self) -> bytes:
        parts, self._parts, self._unread = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _has_passed(self) -> bool:
        """Whether what has arrived was passed on, so that the reader can wait longer."""
        if self._pass_on is None or not self._parts or self.is_complete or self._lost is not None:
            return False
        read = self._take()
        if self._pass_on(read):
            self.passed += 1
            self._wait_until = self._loop.time() + self._wait_seconds
            if self._is_paused:
                self._read_on()
            return True
        self._parts, self._unread = [read], len(read)
        return False

    async def peek(self, seconds: float) -> bytes:
        """The whole of a short body, or its beginning; `read` returns it again."""
        while not self.is_complete and not self._is_paused and self._lost is None:
            await self._wait(seconds)
        return b"".join(self._parts)

    def finish(self) -> bool:
        """End the exchange; False if the connection was closed because it cannot be used again."""
        reusable = self.is_complete and self._lost is None and not self._parts and self._keeps_alive
        if reusable:
            self._is_busy = False
            self.idle_since = self._loop.time()
            if self._is_paused:
                self._read_on()
        else:
            # Closed rather than read to its end: that is what makes a worker abort the request.
            self.abort()
        return reusable

    def _read_on(self) -> None:
        if not self._is_listed:
            self._is_listed = True
            self._turns.add(self._resume_in_turn)

    def _resume_in_turn(self) -> None:
        self._is_listed = False
        if self._is_paused and self._lost is None and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._lost = self._lost or "closed"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def _refuse_if_lost(self, what: str) -> None:
        if self._lost is not None:
            raise WorkerFailedError(f"The worker {what}: {self._lost}.")

    async def _wait(self, seconds: float) -> None:
        self._waiter = self._loop.create_future()
        # One timer for many waits: when it fires it checks whether there was a later one.
        self._wait_seconds, self._wait_until = seconds, self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._wait_until:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._wait_until, self._ring)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _ring(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._wait_until:
            self._waiter.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_at(self._wait_until, self._ring)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            # Unsolicited bytes: what follows could not be distinguished from an answer.
            self.abort()
            return
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lose("what it sent is not HTTP")
        if not self._has_passed():
            self._wake()

    def eof_received(self) -> None:
        """The end of the connection is the end of an answer without a length."""
        if self._has_head and not self._has_length and not self.is_complete:
            self.is_complete = True
            self._keeps_alive = False
        self._lose("it closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(type(exc).__name__ if exc else "it closed the connection")

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self._wake()

    def on_message_begin(self) -> None:
        """Refuse bytes after the answer: they would pass for the answer to the next request."""
        if self.is_complete:
            self._lose("it sent more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._lose("its headers are too long")
            self.abort()
            return
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name == _LEAVING:
            self.is_leaving = True
        elif name in {b"content-length", b"transfer-encoding"}:
            self._has_length = True

    def on_headers_complete(self) -> None:
        if self._lost is not None:
            return
        self.status = self._parser.get_status_code()
        if self.status < _INFORMATIONAL:
            self._has_length = False
            return
        self._has_head = True
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._lost is not None:
            return
        self._parts.append(body)
        self._unread += len(body)
        if self._unread > MAX_UNREAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_complete = True
