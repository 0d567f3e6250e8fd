"""
The other end: a client that takes little time itself, so that what is measured is not it.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from benchmarks.gateway.upstream import MODEL

PROMPT = [{"role": "user", "content": "x" * 400}]
_STAMP = re.compile(rb'"(\d+) (\d+)"')
_TAIL = 128


class WrongAnswerError(Exception):
    """An answer that is not the whole and right one; nothing measured with it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    name: str
    url: str
    key: str = ""
    pid: int | None = None
    """Process that is measured, with its children; None for none."""

    def request(self, **members: Any) -> bytes:  # noqa: ANN401 - JSON
        """A chat request, head and body."""
        body = json.dumps({"model": MODEL, "messages": PROMPT, **members}).encode()
        parts = urlsplit(self.url)
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
        ]
        return "\r\n".join([*head, "", ""]).encode() + body


@dataclass(slots=True)
class Answered:
    """One answer, as it came."""

    first_byte: float = 0.0
    """Reading of the clock when the first of the body came, in seconds."""
    complete: float = 0.0
    status: int = 0
    size: int = 0
    tail: bytes = b""
    """The last bytes."""
    delays: list[float] = field(default_factory=list)
    """Of every stamped frame, seconds from being written to being read."""
    next_number: int = 0


class Connection(asyncio.Protocol):
    """One connection, kept alive; one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0

    @classmethod
    async def open(cls, target: Target) -> "Connection":
        """Connect."""
        parts = urlsplit(target.url)
        _, made = await asyncio.get_running_loop().create_connection(cls, parts.hostname, parts.port)
        return made

    async def ask(self, request: bytes, *, stamped: bool = False) -> Answered:
        """Send a request and wait for the whole answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._stamped, self._rest = Answered(), stamped, b""
        self._done = self._loop.create_future()
        self._transport.write(request)
        await self._done
        return self._answer

    def close(self) -> None:
        """Close."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Note the time, and parse."""
        self._now = time.monotonic()
        self._parser.feed_data(data)

    def connection_lost(self, _error: Exception | None) -> None:
        """Fail what was in flight."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(WrongAnswerError("the connection was closed before the answer ended"))

    def on_body(self, body: bytes) -> None:
        """Keep the end of the answer, and read stamps."""
        answer = self._answer
        if not answer.size:
            answer.first_byte = self._now
        answer.size += len(body)
        answer.tail = (answer.tail + body)[-_TAIL:]
        if self._stamped:
            self._rest += body
            end = self._rest.rfind(b"\n\n") + 2
            for number, stamp in _STAMP.findall(self._rest, 0, end):
                if int(number) != answer.next_number:
                    self._fail(f"frame {int(number)} came where {answer.next_number} was due")
                answer.next_number += 1
                answer.delays.append(self._now - int(stamp) / 1e9)
            self._rest = self._rest[end:]

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        self._answer.status = self._parser.get_status_code()
        self._answer.complete = self._now
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(WrongAnswerError(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one stretch of load showed; times in seconds."""

    first_bytes: Sequence[float]
    totals: Sequence[float]
    seconds: float
    delays: Sequence[float] = ()
    failed: int = 0
    """Streams that were not answered whole and in order."""
    units: int = 0
    """Answered requests, or frames if they are paced."""
    cpu_seconds: float | None = None
    """Of the target's processes, in user and kernel mode."""


async def drive(target: Target, requests: int, concurrency: int, **members: Any) -> Segment:  # noqa: ANN401 - JSON
    """
    Send requests, so many at a time, each connection one after the other.

    Raises:
        WrongAnswerError: one was not answered whole.
    """
    request, is_stream = target.request(**members), bool(members.get("stream"))
    connections = [await Connection.open(target) for _ in range(concurrency)]
    left, first_bytes, totals = iter(range(requests)), [], []

    async def client(connection: Connection) -> None:
        for _ in left:
            started = time.monotonic()
            answer = await connection.ask(request)
            ending = b"data: [DONE]" if is_stream else b"}"
            if answer.status != 200 or not answer.tail.strip().endswith(ending):
                raise WrongAnswerError(f"{target.name} answered {answer.status}: {answer.tail!r}")
            first_bytes.append(answer.first_byte - started)
            totals.append(answer.complete - started)

    began = time.monotonic()
    await _together([lambda each=each: client(each) for each in connections])
    seconds = time.monotonic() - began
    for connection in connections:
        connection.close()
    return Segment(first_bytes=first_bytes, totals=totals, seconds=seconds, units=len(totals))


async def pace(target: Target, streams: int, per_second: int, seconds: float, ramp: float) -> Segment:
    """Keep so many streams open at once, each of so many frames a second, and time every frame."""
    frames = round(per_second * seconds)
    request = target.request(stream=True, max_tokens=frames, seed=per_second)
    first_bytes: list[float] = []
    delays: list[float] = []
    failed = 0

    async def stream(number: int) -> None:
        nonlocal failed
        # Spread out, as people are: workers that all write in the same millisecond would measure that.
        await asyncio.sleep(ramp * number / streams)
        try:
            connection = await Connection.open(target)
            started = time.monotonic()
            answer = await connection.ask(request, stamped=True)
            connection.close()
        except (OSError, WrongAnswerError):
            failed += 1
            return
        if answer.status != 200 or answer.next_number != frames:
            failed += 1
            return
        first_bytes.append(answer.first_byte - started)
        # Only while all streams were open.
        whole = answer.delays[round((ramp - ramp * number / streams) * per_second) :]
        delays.extend(whole[: max(0, round((seconds - ramp) * per_second))])

    began = time.monotonic()
    await _together([lambda number=number: stream(number) for number in range(streams)])
    return Segment(
        first_bytes=first_bytes,
        totals=(),
        seconds=time.monotonic() - began,
        delays=delays,
        failed=failed,
        units=frames * len(first_bytes),
    )


async def _together(works: Sequence[Callable[[], Awaitable[None]]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(cast(Any, work()))
