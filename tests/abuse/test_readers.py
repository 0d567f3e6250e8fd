"""
Clients that read slowly or not at all: the worker is throttled, no data accumulates, and finally
they are disconnected.
"""

import asyncio
import socket
import time

import pytest
from aiohttp import web

from tests.abuse.gateway_under_test import MIB, GatewayUnderTest, close_all, wait_closed
from tests.fakes import MODEL, FakeWorker, frame_of, until

FRAME = frame_of(
    {
        "id": "c",
        "object": "chat.completion.chunk",
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": "x" * 65_000}}],
    }
)
DONE = b"data: [DONE]\n\n"
FRAMES = 2000
"""Of each stream, some 130 MB: many times what the kernel keeps on the way."""
READERS = 8


class CountingWorker(FakeWorker):
    """Streams without end, and counts the bytes read from it."""

    taken_frames = 0

    async def stream(self, request: web.Request, asked: dict) -> web.StreamResponse:
        """Write as fast as the connection takes it."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(FRAMES):
            await response.write(FRAME)
            self.taken_frames += 1
        await response.write(DONE)
        self.completed += 1
        return response

    async def is_held_back(self) -> None:
        """Wait until no more bytes are read."""
        before = -1
        while before != self.taken_frames or not before:
            before = self.taken_frames
            await asyncio.sleep(1)


def ask(gateway: GatewayUnderTest) -> socket.socket:
    """Request a stream, and leave it unread."""
    connection = gateway.connect(receive_bytes=16_384)
    connection.sendall(gateway.request(stream=True))
    return connection


def read_to_end(
    connection: socket.socket, *, most: int = MIB, pause: float = 0.0, seconds: float = 60.0
) -> bytes:
    """Read a stream until it is over, or for so long."""
    said, deadline = bytearray(), time.monotonic() + seconds
    while not said.endswith(b"0\r\n\r\n") and time.monotonic() < deadline:
        piece = connection.recv(most)
        if not piece:
            break
        said += piece
        time.sleep(pause)
    return bytes(said)


async def test_unread_bytes_stay_in_the_worker(start):
    """Eight streams of 130 MB: the gateway buffers almost nothing, and all arrive intact."""
    worker = CountingWorker()
    gateway = await start(worker)
    await gateway.serves_others()
    before = gateway.resident_bytes
    gateway.forget_peak()
    readers = [await asyncio.to_thread(ask, gateway) for _ in range(READERS)]
    await worker.is_held_back()
    assert worker.taken_frames < READERS * FRAMES / 2, "the worker was not held back"
    assert gateway.peak_bytes - before < 96 * MIB
    await gateway.serves_others()
    said = await asyncio.to_thread(read_to_end, readers[0])
    assert said.count(FRAME) >= FRAMES * 0.9, "frames are missing"
    assert said.replace(b"\r\n", b"").count(b"data: ") == FRAMES + 1
    assert DONE in said
    close_all(readers)
    ends = await gateway.outcomes(READERS + 2)
    assert sorted(end["outcome"] for end in ends) == ["client_gone"] * (READERS - 1) + ["completed"] * 3
    assert gateway.peak_bytes - before < 96 * MIB


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_client_that_reads_nothing_is_disconnected(start, stream: bool):
    """The worker stops, and the log has the delivered tokens."""
    worker = CountingWorker(answer=b'{"choices":[],"padding":"%s"}' % (b"x" * 32 * MIB))
    gateway = await start(worker, stalled_seconds=2)
    with gateway.connect(receive_bytes=16_384) as connection:
        connection.sendall(gateway.request(stream=stream))
        (end,) = await gateway.outcomes(1)
        await until(lambda: not gateway.holds(connection))
        said = await asyncio.to_thread(wait_closed, connection)
    if stream:
        assert DONE not in said
        assert (end["outcome"], end["status"], end["tokens_estimated"]) == ("client_gone", 499, True)
        assert 0 < end["completion_tokens"] < FRAMES
        await until(lambda: worker.aborted)
    else:
        assert len(said) < 32 * MIB, "all of it was kept for a client that does not read"


async def test_client_that_reads_slowly_is_served(start):
    """Although the kernel, which keeps megabytes, takes nothing from the gateway for many seconds."""
    worker = CountingWorker()
    gateway = await start(worker, stalled_seconds=1)
    connection = await asyncio.to_thread(ask, gateway)
    said = await asyncio.to_thread(read_to_end, connection, most=16_384, pause=0.2, seconds=6)
    assert len(said) > MIB / 4
    assert worker.aborted == 0
    said = await asyncio.to_thread(read_to_end, connection)
    assert DONE in said
    connection.close()
    (end,) = await gateway.outcomes(1)
    assert end["outcome"] == "completed"
