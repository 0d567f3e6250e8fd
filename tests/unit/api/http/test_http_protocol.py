"""Limits of one connection."""

import asyncio
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from appliance.api.http.protocol import (
    BODY_BYTES_PER_SECOND,
    CROWDED_IDLE_SECONDS,
    LINGER_BYTES,
    LINGER_SECONDS,
    MAX_PIPELINED,
    SMALL_PIECES,
    SPARE_CONNECTIONS,
    BoundedProtocol,
)
from appliance.api.streaming import CONNECTION, Connection
from appliance.errors import ApplianceError
from appliance.infra.read_turns import READS_PER_TURN, ReadTurns
from appliance.infra.settings import ApiSettings
from appliance.tenancy.identity.certificates import EXTENSION, ClientCertificate
from tests.fakes import until

SETTINGS = ApiSettings(max_connections=4)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that records what is written and how it ended."""

    def __init__(self, **extra: Any) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2), **extra})
        self.written = b""
        self.writes = 0
        self.ended: str | None = None
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written += data
        self.writes += 1

    def is_closing(self) -> bool:
        return self.ended in {"closed", "aborted"}

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = "eof"

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    @property
    def status(self) -> int:
        return int(self.written.split(b" ", 2)[1])

    @property
    def code(self) -> str:
        """The error in the last answer, once its shape and length are checked."""
        *_, last = re.finditer(rb"HTTP/1\.1 \d{3} ", self.written)
        head, _, body = self.written[last.start() :].partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert f"content-length: {len(body)}".encode() in head
        error = json.loads(body)["error"]
        assert list(error) == ["message", "type", "param", "code"]
        return error["code"]


class App:
    """Answers once the body has arrived, or as configured; records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], bytes]] = []
        self.gone = 0
        self.waits = asyncio.Event()
        self.waits.set()
        self.reads = True
        self.headers = [(b"content-length", b"2")]

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        body, more = b"", self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.requests.append((scope, body))
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await self.waits.wait()
        await send({"type": "http.response.body", "body": b"ok"})


class Connections:
    """Makes connections to one application."""

    def __init__(self, settings: ApiSettings) -> None:
        self.app = App()
        self.settings = settings
        self.refused: list[ApplianceError] = []
        self.state = ServerState()
        self.turns = ReadTurns()
        self.config = Config(self.app, lifespan="off", log_config=None, ws="none", proxy_headers=False)

    def open(self, **extra: Any) -> tuple[BoundedProtocol, Wire]:
        connection = BoundedProtocol(
            config=self.config,
            server_state=self.state,
            turns=self.turns,
            settings=self.settings,
            on_refusal=self.refused.append,
        )
        wire = Wire(**extra)
        connection.connection_made(wire)
        return connection, wire


@pytest.fixture
async def connections() -> Connections:
    return Connections(SETTINGS)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_request_is_answered_and_the_connection_stays_open(connections):
    """In one piece, byte by byte, and several in a row."""
    connection, wire = connections.open()
    connection.data_received(POST + b"hello")
    await settle()
    for byte in POST + b"again":
        connection.data_received(bytes([byte]))
    await settle()
    connection.data_received(GET + GET)
    await settle()
    assert [body for _, body in connections.app.requests] == [b"hello", b"again", b"", b""]
    assert wire.written.count(b"200 OK") == 4
    assert (wire.ended, connections.refused) == (None, [])


async def test_an_answer_of_known_length_is_one_write(connections):
    connections.app.waits.clear()
    connection, wire = connections.open()
    connection.data_received(GET)
    await settle()
    assert wire.written == b""
    connections.app.waits.set()
    await settle()
    assert wire.writes == 1
    assert wire.written.endswith(b"content-length: 2\r\n\r\nok")


async def test_the_head_of_a_stream_is_sent_at_once(connections):
    connections.app.waits.clear()
    connections.app.headers = []
    connection, wire = connections.open()
    connection.data_received(GET)
    await settle()
    assert wire.written.endswith(b"transfer-encoding: chunked\r\n\r\n")


async def test_an_answer_to_head_has_no_body_to_wait_for(connections):
    connection, wire = connections.open()
    connection.data_received(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    assert wire.written.endswith(b"content-length: 2\r\n\r\n")


async def test_a_client_that_asks_first_is_told_to_go_on_at_once(connections):
    connection, wire = connections.open()
    connection.data_received(POST[:-2] + b"expect: 100-continue\r\n\r\n")
    await settle()
    assert wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.data_received(b"hello")
    await settle()
    assert wire.written.endswith(b"\r\n\r\nok")


async def test_a_kept_head_is_sent_if_the_body_never_comes(connections):
    """The client sees that an answer was cut off, as it would of a stream."""

    async def fail() -> None:
        raise RuntimeError

    connections.app.waits.wait = fail
    connection, wire = connections.open()
    connection.data_received(GET)
    await settle()
    assert wire.written.endswith(b"content-length: 2\r\n\r\n")
    assert wire.ended == "closed"


# Size.


@pytest.mark.parametrize("pieces", [1, 7, 400])
@pytest.mark.parametrize(
    "flood",
    [
        b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(101)) + b"\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 2**16 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"y" * 2**17,
        b"GET /" + b"y" * 2**17 + b" HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 2**17,
        b"\r\n" * 2**16,
    ],
    ids=["lines", "value", "name", "path", "endless value", "empty lines"],
)
async def test_a_head_that_is_too_large_is_refused_however_it_arrives(connections, flood, pieces):
    """With 431; the application is not called."""
    connection, wire = connections.open()
    size = -(-len(flood) // pieces)
    for start in range(0, len(flood), size):
        connection.data_received(flood[start : start + size])
    await settle()
    assert (wire.status, wire.code, wire.ended) == (431, "head_too_large", "eof")
    assert connections.app.requests == []
    assert len(connections.refused) == 1


async def test_the_maximum_head_is_accepted(connections):
    """A hundred lines and sixty thousand bytes."""
    connection, wire = connections.open()
    lines = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 590) for number in range(100))
    connection.data_received(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")
    await settle()
    assert wire.status == 200


async def test_trailers_are_no_headers_and_are_bounded(connections):
    """A trailer cannot add a key after the headers were checked, nor fill the memory."""
    connection, _wire = connections.open()
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    connection.data_received(head + b"2\r\nhi\r\n0\r\nauthorization: Bearer x\r\n\r\n")
    await settle()
    scope, body = connections.app.requests[0]
    assert (body, [name for name, _ in scope["headers"]]) == (b"hi", [b"host", b"transfer-encoding"])
    connection.data_received(head + b"0\r\n")
    for _ in range(40):
        connection.data_received(b"x: %s\r\n" % (b"y" * 4000))
    assert connections.refused
    assert len(connections.app.requests) == 1


async def test_the_number_of_pipelined_requests_is_bounded(connections):
    """Each takes memory until its turn."""
    connections.app.waits.clear()
    connection, wire = connections.open()
    connection.data_received(GET)
    await settle()
    connection.data_received(GET * MAX_PIPELINED)
    assert wire.ended is None
    connection.data_received(GET)
    assert wire.ended == "aborted"
    assert len(connection.pipeline) == MAX_PIPELINED


# Time.


async def test_slow_headers_time_out(connections):
    """However many bytes arrive, the limit is the same."""
    connection, wire = connections.open()
    for number, byte in enumerate(GET[:20]):
        connection.data_received(bytes([byte]))
        connection.check(later(number / 20 * SETTINGS.head_seconds))
    assert wire.ended is None
    connection.check(later(SETTINGS.head_seconds + 1))
    assert (wire.status, wire.code, wire.ended) == (408, "request_too_slow", "eof")


async def test_a_slow_body_times_out_and_the_application_is_disconnected(connections):
    """A steady one, however long, does not."""
    connection, wire = connections.open()
    connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    steady = 50 * BODY_BYTES_PER_SECOND
    connection.data_received(b"x" * steady)
    connection.check(later(0))
    connection.check(later(SETTINGS.body_seconds + 49))
    await settle()
    assert wire.ended is None
    connection.check(later(SETTINGS.body_seconds + 51))
    await settle()
    assert (wire.status, wire.code, wire.ended) == (408, "request_too_slow", "eof")
    assert connections.app.gone == 1


async def test_a_request_in_progress_has_no_time_limit(connections):
    """Generating may take minutes; bytes of the next request do not make it late."""
    connections.app.waits.clear()
    connection, wire = connections.open()
    connection.data_received(POST + b"hello")
    await settle()
    connection.data_received(b"GET / HT")
    for seconds in (100, 1000, 10_000):
        connection.check(later(seconds))
    assert wire.ended is None
    connections.app.waits.set()
    await settle()
    assert wire.written.endswith(b"ok")


async def test_a_connection_without_a_request_is_closed(connections):
    """After the first request uvicorn's own timer closes it."""
    connection, wire = connections.open()
    connection.check(later(SETTINGS.idle_seconds - 1))
    assert wire.ended is None
    connection.check(later(SETTINGS.idle_seconds + 1))
    assert wire.ended == "closed"


async def test_at_the_limit_idle_connections_are_closed_sooner(connections):
    """Those with a request in flight are served, and below the limit nothing is closed so soon."""
    connections.app.waits.clear()
    opened = [connections.open() for _ in range(SETTINGS.max_connections - 1)]
    _, (busy, busy_wire), _ = opened
    busy.data_received(GET)
    for connection, _ in opened:
        connection.check(later(CROWDED_IDLE_SECONDS + 1))
    assert [wire.ended for _, wire in opened] == [None] * len(opened)
    connections.open()
    for connection, _ in opened:
        connection.check(later(CROWDED_IDLE_SECONDS + 1))
    assert [wire.ended for _, wire in opened] == ["closed", None, "closed"]
    connections.app.waits.set()
    await settle()
    assert busy_wire.status == 200


async def test_a_client_that_does_not_read_is_aborted(connections):
    """Closing would wait forever."""
    connection, wire = connections.open()
    connection.data_received(GET)
    await settle()
    connection.pause_writing()
    connection.check(later(SETTINGS.stalled_seconds - 1))
    assert wire.ended is None
    connection.check(later(SETTINGS.stalled_seconds + 1))
    assert wire.ended == "aborted"


async def test_a_connection_that_cannot_close_is_aborted(connections):
    """For example if the client never reads the end of an answer."""
    connection, wire = connections.open()
    wire.close()
    connection.check(later(0))
    connection.check(later(SETTINGS.stalled_seconds - 1))
    assert wire.ended == "closed"
    connection.check(later(SETTINGS.stalled_seconds + 1))
    assert wire.ended == "aborted"


async def test_a_refused_client_has_time_to_read_the_error(connections):
    """What it still sends is dropped, up to a limit of bytes and seconds."""
    connection, wire = connections.open()
    connection.data_received(b"nonsense\r\n\r\n")
    assert (wire.status, wire.code, wire.ended) == (400, "invalid_http", "eof")
    connection.data_received(b"x" * LINGER_BYTES)
    assert wire.ended == "eof"
    connection.data_received(b"x")
    assert wire.ended == "aborted"
    other, other_wire = connections.open()
    other.data_received(b"nonsense\r\n\r\n")
    other.check(later(LINGER_SECONDS + 1))
    assert other_wire.ended == "aborted"
    assert len(connections.refused) == 2


# Number.


async def test_connections_over_the_limit_get_an_error(connections):
    """Those within it continue; far over the limit connections are aborted."""
    within = [connections.open() for _ in range(SETTINGS.max_connections)]
    over, over_wire = connections.open()
    over.data_received(GET)
    assert (over_wire.status, over_wire.code, over_wire.ended) == (503, "too_many_connections", "eof")
    assert b"retry-after" in over_wire.written.lower()
    silent, silent_wire = connections.open()
    silent.check(later(LINGER_SECONDS + 1))
    assert silent_wire.ended == "aborted"
    for connection, wire in within:
        connection.data_received(GET)
        await settle()
        assert wire.status == 200
    for connection in (over, silent):
        connection.connection_lost(None)
    assert [connections.open()[1].ended for _ in range(SPARE_CONNECTIONS + 1)][-1] == "aborted"


async def test_a_closed_connection_makes_room_for_the_next(connections):
    """The limit counts open connections."""
    opened = [connections.open()[0] for _ in range(SETTINGS.max_connections)]
    opened[0].connection_lost(None)
    connection, wire = connections.open()
    connection.data_received(GET)
    await settle()
    assert wire.status == 200


# Other behaviour of clients.


@pytest.mark.parametrize("turns", [0, 5])
async def test_malformed_bytes_after_a_request_do_not_reach_its_answer(connections, turns):
    """The connection is aborted instead, whether the answer has begun or not."""
    connections.app.waits.clear()
    connections.app.headers = []
    connection, wire = connections.open()
    connection.data_received(GET)
    for _ in range(turns):
        await asyncio.sleep(0)
    written = wire.written
    assert bool(written) is bool(turns)
    connection.data_received(b"nonsense\r\n\r\n")
    assert (wire.written, wire.ended) == (written, "aborted")


async def test_a_malformed_body_is_refused_before_it_is_used(connections):
    """The application receives a disconnect."""
    connection, wire = connections.open()
    connection.data_received(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
    await settle()
    connection.data_received(b"no size\r\n")
    await settle()
    assert (wire.status, wire.code, wire.ended) == (400, "invalid_http", "eof")
    assert (connections.app.requests, connections.app.gone) == ([], 1)


async def test_a_body_after_its_answer_gets_no_second_answer(connections):
    """When it is then too slow, the connection is aborted."""
    connections.app.reads = False
    connection, wire = connections.open()
    connection.data_received(POST + b"he")
    await settle()
    connection.check(later(0))
    connection.check(later(SETTINGS.body_seconds + 10))
    assert wire.written.count(b"HTTP/1.1") == 1
    assert wire.ended == "aborted"


async def test_an_endless_body_after_its_answer_is_aborted(connections):
    """Not at once: a client that still sends must be able to read its answer."""
    connections.settings = ApiSettings(max_body_bytes=1024)
    connections.app.reads = False
    connection, wire = connections.open()
    connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    await settle()
    connection.data_received(b"x" * 8 * 1024)
    assert (wire.status, wire.ended) == (200, None)
    connection.data_received(b"x")
    assert wire.ended == "aborted"


LARGE_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"


async def test_a_large_body_after_its_answer_is_dropped_slowly(connections):
    """No one waits for it, and dropping it at once takes time that others need."""
    connections.app.reads = False
    connection, wire = connections.open()
    connection.data_received(LARGE_HEAD)
    await settle()
    connection.data_received(b"x" * 60_000)
    assert wire.is_reading
    connection.data_received(b"x" * 60_000)
    await settle()
    assert not wire.is_reading
    await until(lambda: wire.is_reading)


async def test_connections_with_large_bodies_are_read_from_in_turn(connections):
    """Many chunks in one turn of the event loop would delay every other answer."""
    opened = [connections.open() for _ in range(4)]
    for connection, _ in opened:
        connection.data_received(LARGE_HEAD + b"x" * 100_000)
    assert not any(wire.is_reading for _, wire in opened)
    reading = [0]
    for _ in range(20):
        await asyncio.sleep(0)
        reading.append(sum(wire.is_reading for _, wire in opened))
    assert reading[-1] == len(opened)
    assert max(after - before for before, after in pairwise(reading)) == READS_PER_TURN


@pytest.mark.parametrize("reads", [True, False], ids=["awaited", "answered already"])
async def test_a_body_in_too_many_small_chunks_is_refused(connections, reads):
    """A byte per chunk is a thousand times the work; the number of large chunks is not limited."""
    connections.app.reads = reads
    head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    connection, wire = connections.open()
    connection.data_received(head)
    await settle()
    connection.data_received(b"1\r\nx\r\n" * SMALL_PIECES)
    assert wire.ended is None
    connection.data_received(b"1\r\nx\r\n" * 100)
    assert wire.ended == ("eof" if reads else "aborted")
    assert str(connections.refused[0]).startswith("The body comes in too many small pieces")
    usual, usual_wire = connections.open()
    usual.data_received(head + (b"64\r\n%s\r\n" % (b"x" * 100)) * 2 * SMALL_PIECES)
    assert usual_wire.ended is None


async def test_a_disconnect_ends_running_and_pipelined_requests(connections):
    """The request being answered is disconnected even if others were pipelined."""
    connection, _wire = connections.open()
    connection.data_received(POST)
    connection.data_received(b"hello" + GET)
    connection.data_received(POST)
    running = connection._running
    connections.app.waits.clear()
    await settle()
    connection.connection_lost(None)
    await settle()
    assert running.disconnected
    assert not connection.pipeline


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
async def test_an_upgrade_header_is_ignored_and_the_body_read(connections, name):
    """Java's HTTP client offers HTTP/2 with its first request."""
    connection, wire = connections.open()
    head = (
        POST[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\n" + name + b": h2c\r\nHTTP2-Settings: AA\r\n\r\n"
    )
    connection.data_received(head + b"hello")
    await settle()
    assert wire.status == 200
    assert connections.app.requests[0][1] == b"hello"


async def test_an_upgrade_header_in_a_body_is_not_changed(connections):
    """Only the head is edited."""
    connection, _wire = connections.open()
    body = b"\r\nUpgrade: h2c\r\n\r\n"
    connection.data_received(POST.replace(b"5", b"%d" % len(body)) + body)
    await settle()
    assert connections.app.requests[0][1] == body


async def test_another_protocol_is_refused(connections):
    """A body must never be read as requests, nor requests as a body."""
    for request in (
        b"CONNECT x:1 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x00",
    ):
        connection, wire = connections.open()
        connection.data_received(request)
        await settle()
        assert (wire.status, wire.code) == (400, "invalid_http")
        connection.connection_lost(None)
    for byte in POST[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\nhello":
        connection, wire = (connection, wire) if wire.written == b"" else connections.open()
        connection.data_received(bytes([byte]))
    assert connections.app.requests == []


async def test_the_client_certificate_reaches_the_application(connections):
    """Its names, on every request of the connection; without a certificate nothing."""
    connection, _ = connections.open(peercert={"subject": ((("commonName", "billing"),),)})
    connection.data_received(GET)
    await settle()
    connection.data_received(GET)
    plain, _ = connections.open()
    plain.data_received(GET)
    await settle()
    first, second, third = (scope for scope, _ in connections.app.requests)
    assert first["extensions"] == second["extensions"]
    assert first["extensions"].keys() == {CONNECTION, EXTENSION}
    assert first["extensions"][EXTENSION] == ClientCertificate(("cn:billing",))
    assert third["extensions"].keys() == {CONNECTION}


async def answering(
    connections: Connections, request: bytes = GET
) -> tuple[BoundedProtocol, Wire, Connection]:
    """A connection whose request is being answered, and what the request knows of it."""
    connections.app.waits.clear()
    connection, wire = connections.open()
    connection.data_received(request)
    await settle()
    return connection, wire, connections.app.requests[-1][0]["extensions"][CONNECTION]


async def test_who_watches_the_client_is_told_once_that_it_left(connections):
    connection, _, known = await answering(connections)
    watch, left = known.watch, list[str]()
    watch(lambda: left.append("first"))
    watch(lambda: left.append("second"))
    assert left == []
    connection.connection_lost(None)
    assert left == ["second"]
    watch(lambda: left.append("too late"))
    assert left == ["second", "too late"]


async def test_who_watches_no_more_is_told_nothing(connections):
    """Nor is a request in memory for as long as its connection waits for the next."""
    connection, _, known = await answering(connections)
    watch, left = known.watch, list[str]()
    watch(lambda: left.append("gone"))
    watch(None)
    connection.connection_lost(None)
    assert left == []


async def test_a_part_of_a_stream_is_sent_at_once_if_the_client_takes_it(connections):
    connections.app.headers = []
    connection, wire, known = await answering(connections)
    write, head = known.write_now, wire.written
    assert write(b"0123456789abcdef")
    assert wire.written == head + b"10\r\n0123456789abcdef\r\n"
    connection.pause_writing()
    assert not write(b"held back")
    connection.resume_writing()
    assert write(b"x")
    connections.app.waits.set()
    await settle()
    assert wire.written == head + b"10\r\n0123456789abcdef\r\n1\r\nx\r\n2\r\nok\r\n0\r\n\r\n"
    assert not write(b"after the end")


@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.1", b"HEAD / HTTP/1.1"])
async def test_only_a_stream_is_sent_in_parts(connections, request_line):
    """Nor to a client that left."""
    connections.app.headers = [] if request_line.startswith(b"HEAD") else connections.app.headers
    _, _, known = await answering(connections, request_line + b"\r\nhost: x\r\n\r\n")
    assert not known.write_now(b"part")
    connections.app.headers = []
    gone, _, known = await answering(connections)
    gone.connection_lost(None)
    assert not known.write_now(b"part")


async def test_the_end_of_a_watched_connection_is_seen_after_a_large_body(connections):
    """Reading pauses at a large piece; the end of the connection is behind it."""
    connections.app.reads = False
    connections.app.waits.clear()
    connection, wire = connections.open()
    connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"a" * 100000)
    await settle()
    assert not wire.is_reading
    connections.app.requests[0][0]["extensions"][CONNECTION].watch(lambda: None)
    await until(lambda: wire.is_reading)


async def test_a_stopping_server_does_not_wait_for_refused_clients(connections):
    """Others may finish their requests."""
    connections.app.waits.clear()
    refused, refused_wire = connections.open()
    refused.data_received(b"nonsense\r\n\r\n")
    refused.shutdown()
    busy, busy_wire = connections.open()
    busy.data_received(GET)
    await settle()
    busy.shutdown()
    assert (refused_wire.ended, busy_wire.ended) == ("aborted", None)
    connections.app.waits.set()
    await settle()
    assert busy_wire.ended == "closed"


@pytest.mark.parametrize("how", ["stop", "no request", "after a request"])
async def test_an_idle_client_that_does_not_end_tls_is_aborted(connections, how, monkeypatch):
    """It has a moment to close; without TLS the connection closes at once."""
    monkeypatch.setattr("appliance.api.http.protocol.LINGER_SECONDS", 0.05)
    for extra, ended in (({"sslcontext": object()}, "aborted"), ({}, "closed")):
        connection, wire = connections.open(**extra)
        if how == "after a request":
            connection.data_received(GET)
            await settle()
            connection.timeout_keep_alive_handler()
        elif how == "stop":
            connection.shutdown()
        else:
            connection.check(later(SETTINGS.idle_seconds + 1))
        assert wire.ended == "closed"
        await asyncio.sleep(0.2)
        assert wire.ended == ended
