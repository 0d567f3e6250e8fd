"""
One HTTP/1.1 connection to a worker: a request out, an answer in, as few steps between as there can be.

The parser is llhttp's, by `httptools`, which uvicorn uses at the other end.  A general client costs a
request more than all else the gateway does for it; what it knows beyond this (redirects, cookies,
proxies, compression) must not happen here anyway.

What a reader has not taken is bounded: beyond `MOST_UNREAD` the socket is not read, and the worker
feels the client's slowness.
"""

import asyncio
from typing import cast

import httptools

from appliance.errors import WorkerFailedError

MOST_UNREAD = 2**18
"""Bytes of an answer that may wait here for the client to take them."""
MOST_HEADERS = 2**16
"""Bytes of an answer's head."""
_INFORMATIONAL = 200


class WorkerConnection(asyncio.Protocol):
    """A connection that is idle, or carries one request and its answer."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wait_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._lost: str | None = None
        self.idle_since = 0.0
        """When it last became idle, by the loop's clock."""
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._unread = self._head_bytes = 0
        self._has_head = self._has_length = self._is_paused = self._keeps_alive = False
        self.status = 0
        self.content_type = ""
        self.is_complete = False
        """Whether the whole answer has arrived."""
        self._is_asked = False
        self.has_heard = False
        """Whether anything came since it was asked."""

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self._lost is None and not self._is_asked

    def ask(self, request: bytes) -> None:
        """Send a request, head and body; the connection must be usable."""
        assert self._transport is not None  # noqa: S101 - connected before anybody has it
        self._begin()
        self._is_asked = True
        self._transport.write(request)

    async def read_head(self, seconds: float) -> None:
        """
        Wait for status and headers.

        Raises:
            WorkerFailedError: the worker closed before it answered, or answered no HTTP.
            TimeoutError: nothing came for so many seconds.
        """
        while not self._has_head:
            self._refuse_if_lost("could not be reached")
            await self._wait(seconds)

    async def read(self, seconds: float) -> bytes:
        """
        Return what has arrived of the body, waiting if nothing has; empty at the end.

        Raises:
            WorkerFailedError: the connection broke.
            TimeoutError: nothing came for so many seconds; it can be asked again.
        """
        while not self._parts and not self.is_complete:
            self._refuse_if_lost("broke off")
            await self._wait(seconds)
        parts, self._parts, self._unread = self._parts, [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def finish(self) -> bool:
        """End the exchange; False if the connection cannot be used again, and is closed."""
        reusable = self.is_complete and self._lost is None and not self._parts and self._keeps_alive
        if reusable:
            self._is_asked = False
            self.idle_since = self._loop.time()
        else:
            # Closed rather than read to its end: that is what makes a worker abort the request.
            self.abort()
        return reusable

    def abort(self) -> None:
        """Close at once."""
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
        # One timer for many waits: it looks when it rings whether there was a later one.
        self._wait_until = self._loop.time() + seconds
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
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if not self._is_asked:
            # Said without being asked: nothing after it could be told from an answer.
            self.abort()
            return
        self.has_heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lose("what it sent is not HTTP")
        self._wake()

    def eof_received(self) -> None:
        """Take the end of the connection for the end of an answer that gave no length."""
        if self._has_head and not self._has_length and not self.is_complete:
            self.is_complete = True
            self._keeps_alive = False
        self._lose("it closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        self._lose(type(exc).__name__ if exc else "it closed the connection")

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self._wake()

    def on_message_begin(self) -> None:
        """Refuse what comes after the answer: it would pass for that of the next request."""
        if self.is_complete:
            self._lose("it sent more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the few headers that matter."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MOST_HEADERS:
            self._lose("its headers are too long")
            self.abort()
            return
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name in {b"content-length", b"transfer-encoding"}:
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Let the answer be read."""
        if self._lost is not None:
            return
        self.status = self._parser.get_status_code()
        if self.status < _INFORMATIONAL:
            self._has_length = False
            return
        self._has_head = True
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Keep part of the body until it is taken."""
        if self._lost is not None:
            return
        self._parts.append(body)
        self._unread += len(body)
        if self._unread > MOST_UNREAD and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        if self._has_head:
            self.is_complete = True
