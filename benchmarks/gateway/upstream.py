"""
The stand-in for a worker: answers in vLLM's shapes at once, or at a steady pace, and takes little time.

What it does is asked for in members of the body that every gateway passes on: `stream`, `max_tokens`
for the number of frames, `seed` for frames per second (0 for all at once).  Each paced frame carries
its number and the time it was written, by the clock that all processes of a machine share.
"""

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import httptools
import uvloop

FRAMES = 64
LARGE_BYTES = 2**17
"""Beyond this a body is not looked at: it asks for nothing."""
MODEL = "bench"
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
PAGES = {
    b"/health": (b"text/plain", b""),
    b"/version": (b"application/json", b'{"version":"0.32.0"}'),
    b"/metrics": (
        b"text/plain; version=0.0.4",
        "".join(f'# TYPE vllm:{name} gauge\nvllm:{name}{{engine="0"}} 0\n' for name in _GAUGES).encode(),
    ),
}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_DONE = b"data: [DONE]\n\n"
_END = b"0\r\n\r\n"


@contextmanager
def upstream(think_ms: float = 0.0, *, model: str = MODEL, niceness: int = 0) -> Iterator[str]:
    """Serve in a process of its own; yields the base URL."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(think_ms, model, niceness, sender), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(think_ms: float, model: str, niceness: int, sender: multiprocessing.connection.Connection) -> None:
    os.nice(niceness)
    listed = {"object": "list", "data": [{"id": model, "object": "model", "created": 1}]}
    PAGES[b"/v1/models"] = (b"application/json", json.dumps(listed).encode())

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(think_ms / 1000), "127.0.0.1", 0, backlog=4096)
        sender.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


def _usage(frames: int) -> dict[str, int]:
    return {"prompt_tokens": 100, "completion_tokens": frames, "total_tokens": 100 + frames}


def _base(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": MODEL}


def _page(content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (content_type, len(body)) + body


def _plain() -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * FRAMES},
        "finish_reason": "stop",
    }
    body = {**_base("chat.completion"), "choices": [choice], "usage": _usage(FRAMES)}
    return _page(b"application/json", json.dumps(body).encode())


def _frame(content: str) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
    return b"data: " + json.dumps({**_base("chat.completion.chunk"), "choices": [choice]}).encode() + b"\n\n"


def _last_frames(frames: int, *, usage: bool) -> list[bytes]:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
    last = {**_base("chat.completion.chunk"), "choices": [choice]}
    found = [b"data: " + json.dumps(last).encode() + b"\n\n"]
    if usage:
        counts = {**_base("chat.completion.chunk"), "choices": [], "usage": _usage(frames)}
        found.append(b"data: " + json.dumps(counts).encode() + b"\n\n")
    return [*found, _DONE]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_PLAIN = _plain()
_WORD = _chunk(_frame("word "))
_STAMPED = _frame("NUMBER STAMP").split(b"NUMBER STAMP")


class _Connection(asyncio.Protocol):
    def __init__(self, think_seconds: float) -> None:
        self._think_seconds = think_seconds
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._path, self._body = b"", bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, body = self._path.partition(b"?")[0], bytes(self._body)
        if len(body) > LARGE_BYTES:
            body = b"{}"
        if path != b"/v1/chat/completions":
            page = PAGES.get(path)
            self._transport.write(_page(*page) if page else b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
        elif self._think_seconds:
            self._loop.call_later(self._think_seconds, self._answer, json.loads(body))
        else:
            self._answer(json.loads(body))

    def _answer(self, asked: dict[str, Any]) -> None:
        if not asked.get("stream"):
            self._transport.write(_PLAIN)
            return
        frames, per_second = asked.get("max_tokens") or FRAMES, asked.get("seed") or 0
        usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        ends = b"".join(map(_chunk, _last_frames(frames, usage=usage))) + _END
        if not per_second:
            self._transport.write(_STREAM_HEAD + _WORD * frames + ends)
            return
        self._transport.write(_STREAM_HEAD)
        self._pace(0, frames, self._loop.time(), per_second, ends)

    def _pace(self, number: int, frames: int, started: float, per_second: int, ends: bytes) -> None:
        if self._transport.is_closing():
            return
        if number == frames:
            self._transport.write(ends)
            return
        stamp = b"%d %d" % (number, time.monotonic_ns())
        self._transport.write(_chunk(_STAMPED[0] + stamp + _STAMPED[1]))
        at = started + (number + 1) / per_second
        self._loop.call_at(at, self._pace, number + 1, frames, started, per_second, ends)
