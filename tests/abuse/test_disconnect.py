"""
When a client leaves, the worker stops at once, for every route and every way of leaving.
"""

import asyncio
import socket
from collections.abc import Callable

import pytest

from tests.abuse.gateway_under_test import close_all, reset
from tests.fakes import FakeWorker, until
from tests.integration.caller import fetch, sample

CROWD = 50


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closed", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_fifty_that_leave_at_once_stop_fifty_generations(start, stream: bool, leave: Callable):
    """Each is in the log as gone, with all tokens generated for it; nothing is left in flight."""
    worker = FakeWorker(pieces=["x"] * 3000, pause_seconds=0.02, piece_tokens=3, counts=True)
    gateway = await start(worker)
    worker.plugin_token = (gateway.process.data / "control.token").read_text().strip()
    crowd = [await asyncio.to_thread(gateway.connect) for _ in range(CROWD)]
    for connection in crowd:
        connection.sendall(gateway.request(stream=stream))
    await until(lambda: len(worker.bodies) == CROWD, 30)
    if stream:
        for connection in crowd:
            await asyncio.to_thread(read_first_frame, connection)
    for connection in crowd:
        leave(connection)
    await until(lambda: worker.aborted == CROWD, 10)
    ends = await gateway.outcomes(CROWD)
    assert [end["outcome"] for end in ends] == ["client_gone"] * CROWD
    assert not any(end["tokens_estimated"] for end in ends)
    assert all(end["completion_tokens"] == worker.generated.get(end["request_id"], 0) for end in ends)
    assert all(end["completion_tokens"] > 0 for end in ends) or not stream
    worker.pieces, worker.pause_seconds = ["x"], 0.0
    # The scripted worker shares this process, and may have been too busy to be looked at.
    await gateway.serves_others(told_to_wait=True)
    page = await asyncio.to_thread(fetch, f"{gateway.process.admin_url}/metrics")
    assert sample(page, 'appliance_requests_in_flight{model="demo"}') == 0


async def test_client_that_leaves_does_not_affect_other_streams(start):
    """Neighbours on the same worker get every frame."""
    worker = FakeWorker(pieces=[f"token {number} " for number in range(100)], pause_seconds=0.01)
    gateway = await start(worker)
    crowd = [await asyncio.to_thread(gateway.connect) for _ in range(20)]
    for connection in crowd:
        connection.sendall(gateway.request(stream=True))
    await until(lambda: len(worker.bodies) == len(crowd), 30)
    close_all(crowd[::2])
    said = await asyncio.gather(*(asyncio.to_thread(read_stream, one) for one in crowd[1::2]))
    expected = b"".join(worker.frames("/v1/chat/completions", {}))
    assert set(said) == {expected}
    ends = await gateway.outcomes(len(crowd))
    assert sorted(end["outcome"] for end in ends) == ["client_gone"] * 10 + ["completed"] * 10


def read_first_frame(connection: socket.socket) -> None:
    """Read on until some of the answer is there, and not only its head."""
    said = b""
    while b"data: " not in said:
        said += (piece := connection.recv(65536))
        assert piece, "the stream broke off"


def read_stream(connection: socket.socket) -> bytes:
    """The body of a chunked answer."""
    said = bytearray()
    while not said.endswith(b"0\r\n\r\n"):
        piece = connection.recv(65536)
        assert piece, "the stream broke off"
        said += piece
    connection.close()
    _, _, rest = bytes(said).partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
