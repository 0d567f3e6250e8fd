"""
Storms of connections, heads and bodies: each is bounded in memory and time, and others are served meanwhile.

Every bound is generous, and of the kind that an unbounded gateway misses by a factor, not by a little.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable

import aiohttp
import pytest
import pytest_asyncio

from appliance.api.refusals import INTERVAL_SECONDS
from tests.abuse.conftest import gateways
from tests.abuse.gateway_under_test import MIB, PATIENT, allow_open_files, close_all, reset, wait_closed
from tests.fakes import FakeWorker, chat, until

IDLE = 10_000
SPARE_FILES = 1000
"""Open files that both processes need in addition to the connections of a storm."""
DRIP_SECONDS = 0.2
SHARED = pytest.mark.asyncio(loop_scope="module")
"""The loop of the worker behind the gateway that tests share."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory):
    """A gateway with small bounds."""
    bounds = {"head_seconds": 2, "body_seconds": 2, "stalled_seconds": 2, "max_body_bytes": MIB}
    async with gateways(tmp_path_factory.mktemp("bounded")) as start:
        yield await start(FakeWorker(), **bounds)


def opened(gateway, count: int) -> list[socket.socket]:
    """Idle connections."""
    connections: list[socket.socket] = []
    try:
        while len(connections) < count:
            connections.append(gateway.connect())
    except BaseException:
        close_all(connections)
        raise
    return connections


def drip(connections: Iterable[socket.socket], seconds: float) -> list[bytes]:
    """Send a byte from time to time on each until it is closed; returns their answers."""
    left, said = list(connections), []
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(DRIP_SECONDS)
        for connection in [*left]:
            connection.setblocking(False)
            heard: bytes | None = None
            with contextlib.suppress(BlockingIOError):
                try:
                    connection.send(b"x")
                    heard = connection.recv(65536)
                except ConnectionError:
                    heard = b""
            if heard is not None:
                left.remove(connection)
                said.append(heard)
                connection.close()
    close_all(left)
    return said


def pour(connection: socket.socket, piece: bytes, most_bytes: int) -> int:
    """Send the same piece over and over until the other side closes; returns the bytes it read."""
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < most_bytes:
            connection.sendall(piece)
            sent += len(piece)
    return sent


async def test_ten_thousand_idle_connections_cost_little_and_block_no_client(start):
    """Also where there may be no more; and what the first ten thousand took is used again by the second."""
    allow_open_files(IDLE + SPARE_FILES)
    gateway = await start(FakeWorker(), max_connections=IDLE)
    await gateway.serves_others()
    growth: list[int] = []
    before = gateway.resident_bytes
    for _ in range(2):
        connections = await asyncio.to_thread(opened, gateway, IDLE)
        try:
            await gateway.serves_others(told_to_wait=True)
            growth.append(gateway.peak_bytes - before)
        finally:
            close_all(connections)
        await until(lambda: gateway.open_files < IDLE / 10)
    assert growth[0] < IDLE * 64 * 1024
    assert growth[1] < 1.5 * growth[0] + 16 * MIB


@SHARED
@pytest.mark.parametrize("part", ["head", "body"])
async def test_client_that_sends_byte_by_byte_is_disconnected(gateway, part: str):
    """Five hundred at once, none of which completes its request."""
    slow = 500
    before, asked = gateway.resident_bytes, len(gateway.worker.bodies)
    connections = await asyncio.to_thread(opened, gateway, slow)
    beginning = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: " if part == "head" else gateway.head(MIB)
    )
    for connection in connections:
        connection.sendall(beginning)
    started = time.monotonic()
    dripping = asyncio.create_task(asyncio.to_thread(drip, connections, 60))
    await gateway.serves_others()
    said = await dripping
    assert len(said) == slow, (
        f"{slow - len(said)} of {slow} were still served after {time.monotonic() - started:.0f} s"
    )
    assert gateway.resident_bytes - before < 64 * MIB
    assert len(gateway.worker.bodies) == asked + 1, "the worker received a request that no client sent"
    await gateway.serves_others()


HEADS: dict[str, tuple[bytes, bytes]] = {
    "a line without end": (b"GET /healthz HTTP/1.1\r\nX: ", b"x" * 65536),
    "lines without end": (b"GET /healthz HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
    "a path without end": (b"GET /", b"x" * 65536),
    "a method without end": (b"", b"X" * 65536),
    "names without end": (b"GET /healthz HTTP/1.1\r\n", b"x" * 65536),
    "empty lines without end": (b"", b"\r\n" * 30_000),
    "a chunk size without end": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"x" * 65536,
    ),
    "trailers without end": (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"a: b\r\n" * 10_000,
    ),
}


@SHARED
@pytest.mark.parametrize("beginning", HEADS.values(), ids=HEADS.keys())
async def test_gateway_cuts_off_a_head_without_end(gateway, beginning: tuple[bytes, bytes]):
    """Eight at once, each willing to send a quarter of a gigabyte."""
    await gateway.serves_others()
    before = gateway.resident_bytes
    gateway.forget_peak()
    connections = await asyncio.to_thread(opened, gateway, 8)
    for connection in connections:
        connection.sendall(beginning[0])
    storm = [asyncio.to_thread(pour, connection, beginning[1], 256 * MIB) for connection in connections]
    taken = asyncio.gather(*storm)
    await gateway.serves_others()
    most = max(await taken)
    close_all(connections)
    assert gateway.peak_bytes - before < 64 * MIB
    # What the gateway does not read stays in the kernel's buffers, a few megabytes of each connection.
    assert most < 128 * MIB, "it continued to read"
    await gateway.serves_others()


def chunk(size: int) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n" % size + b" " * size + b"\r\n"


BODIES: dict[str, tuple[int | None, bytes]] = {
    "declared": (10**10, b" " * 65536),
    "chunked": (None, chunk(65536)),
    "in chunks of a byte": (None, chunk(1) * 10_000),
}


@SHARED
@pytest.mark.parametrize("key", [None, "sk-aaaaaaaa-" + "A" * 43], ids=["tenant", "stranger"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_gateway_cuts_off_a_body_without_end(gateway, body: tuple[int | None, bytes], key: str | None):
    """Eight at once, whether or not they have a key; the limit is a megabyte."""
    await gateway.serves_others()
    before = gateway.resident_bytes
    gateway.forget_peak()
    connections = await asyncio.to_thread(opened, gateway, 8)
    for connection in connections:
        connection.sendall(gateway.head(body[0], key=key))
    taken = asyncio.gather(*(asyncio.to_thread(pour, one, body[1], 1024 * MIB) for one in connections))
    await gateway.serves_others()
    most = max(await taken)
    close_all(connections)
    assert gateway.peak_bytes - before < 64 * MIB
    assert most < 512 * MIB, "it continued to read"
    await gateway.serves_others()


async def test_bodies_that_are_large_together_are_bounded_together(start):
    """Each is within its limit, and only two fit: the others get 429, and later there is room."""
    gateway = await start(FakeWorker(head_seconds=2), max_body_bytes=MIB, max_bodies_bytes=2 * MIB)
    body = chat(padding="x" * (MIB * 9 // 10))

    async def ask() -> tuple[int, str | None]:
        async with session.post(f"{gateway.process.url}/v1/chat/completions", json=body) as answer:
            content = await answer.json()
            return answer.status, content["error"]["code"] if "error" in content else None

    headers = {"Authorization": f"Bearer {gateway.process.key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=PATIENT) as session:
        for _ in range(2):
            answers = await asyncio.gather(*(ask() for _ in range(6)))
            assert set(answers) == {(200, None), (429, "at_capacity")}
            # Those that come together take room from each other, so at times there is only one.
            assert answers.count((200, None)) <= 2


@SHARED
async def test_pipelined_requests_without_reading_are_bounded(gateway):
    """A client that pipelines is served in turn; one that never reads is not read either."""
    before = gateway.resident_bytes
    connections = [gateway.connect(receive_bytes=4096) for _ in range(8)]
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 1000
    storm = asyncio.gather(*(asyncio.to_thread(pour, one, request, 256 * MIB) for one in connections))
    try:
        await gateway.serves_others()
        assert max(await storm) < 256 * MIB
    finally:
        close_all(connections)
    assert gateway.resident_bytes - before < 64 * MIB
    await gateway.serves_others()


async def test_thousands_of_vanished_clients_leave_no_state(start):
    """They send a request and disconnect: no open request, file or memory remains."""
    gateway = await start(FakeWorker(head_seconds=0.2))
    await gateway.serves_others()
    files, before = gateway.open_files, gateway.resident_bytes
    rounds, each = 10, 100

    def vanish() -> None:
        connections = opened(gateway, each)
        for connection in connections:
            connection.sendall(gateway.request(stream=True))
        for connection in connections:
            reset(connection)

    for _ in range(rounds):
        await asyncio.to_thread(vanish)
    await gateway.serves_others()
    intents = await asyncio.to_thread(gateway.entries, "request.intent")
    ends = await gateway.outcomes(len(intents))
    assert {end["outcome"] for end in ends} <= {"completed", "client_gone"}
    assert sorted(end["request_id"] for end in ends) == sorted(intent["request_id"] for intent in intents)
    await until(lambda: gateway.open_files <= files + 20)
    assert gateway.resident_bytes - before < 64 * MIB


async def test_a_flood_without_a_valid_key_writes_a_few_entries_and_lines(start):
    """Each caller is counted, also those of the last minute before the gateway stops."""
    gateway = await start(FakeWorker())
    began, workers, each = time.monotonic(), 20, 100
    headers = {"Authorization": f"Bearer {gateway.process.key}x"}
    async with aiohttp.ClientSession(timeout=PATIENT, headers=headers) as session:

        async def knock() -> None:
            for _ in range(each):
                async with session.get(f"{gateway.process.url}/v1/models") as answer:
                    assert answer.status == 401

        await asyncio.gather(*(knock() for _ in range(workers)))
    await asyncio.to_thread(gateway.process.stop)
    most = 2 + (time.monotonic() - began) // INTERVAL_SECONDS
    entries = gateway.entries("callers.refused")
    assert sum(entry["count"] for entry in entries) == workers * each
    assert {(entry["surface"], tuple(entry["clients"])) for entry in entries} == {
        ("api", (f"loopback: {entry['count']}",)) for entry in entries
    }
    assert len(entries) <= most
    lines = [line for line in gateway.process.output if "_refused" in line]
    assert 0 < len(lines) <= 2 * most


REFUSALS: dict[str, tuple[Callable, tuple[bytes, ...]]] = {
    "a large declared body": (lambda gateway: gateway.head(10**9), (b"413",)),
    "too many headers": (
        lambda _: b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
        (b"431",),
    ),
    "a header too long": (
        lambda _: b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        (b"431",),
    ),
    "no HTTP": (
        lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600) + b"\r\n\r\n",
        (b"400",),
    ),
}


@SHARED
@pytest.mark.parametrize(("what", "statuses"), REFUSALS.values(), ids=REFUSALS.keys())
async def test_refused_connections_get_an_error_in_the_usual_shape(gateway, what, statuses):
    """A status, four keys, and then the connection is closed."""
    connection = await asyncio.to_thread(gateway.connect)
    connection.sendall(what(gateway))
    said = await asyncio.to_thread(wait_closed, connection)
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.split()[1] in statuses
    for key in (b'"error"', b'"message"', b'"type"', b'"param"', b'"code"'):
        assert key in body
