"""One connection to a worker: the answer does not depend on where reads end."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import WorkerFailedError, WorkerTimeoutError
from appliance.infra.read_turns import READS_PER_TURN, ReadTurns
from appliance.serving.client import ReadTimeouts
from appliance.serving.connection import MAX_HEAD_BYTES, MAX_UNREAD_BYTES, WorkerConnection
from tests.fakes import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PLAIN = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


class Transport:
    """What a connection does to its socket."""

    def __init__(self):
        self.sent, self.is_open, self.reads = b"", True, True

    def write(self, data):
        self.sent += data

    def abort(self):
        self.is_open = False

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True


def _asked(turns=None):
    connection, transport = WorkerConnection(turns or ReadTurns()), Transport()
    connection.connection_made(transport)
    connection.send(b"POST / HTTP/1.1\r\n\r\n", ())
    return connection, transport


async def _answer(connection):
    await connection.read_head(5)
    body = b""
    while read := await connection.read(5):
        body += read
    return connection.status, connection.content_type, body


@given(st.sampled_from([PLAIN, CHUNKED]), st.sets(st.integers(1, 120)))
def test_answer_is_the_same_wherever_reads_end(answer, cuts):
    """Reads end anywhere; afterwards the connection takes another request."""

    async def run():
        connection, transport = _asked()
        edges = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
        reading = asyncio.ensure_future(_answer(connection))
        for start, end in itertools.pairwise(edges):
            connection.data_received(answer[start:end])
            await asyncio.sleep(0)
        assert await reading == (200, "text/event-stream", b"hello")
        assert connection.finish()
        assert connection.is_usable
        assert transport.is_open
        connection.send(b"POST / HTTP/1.1\r\n\r\n", ())
        connection.data_received(PLAIN)
        assert await _answer(connection) == (200, "text/event-stream", b"hello")

    asyncio.run(run())


async def test_an_answer_without_a_length_ends_with_the_connection():
    """HTTP/1.0 servers answer so; the connection is not used again."""
    connection, _ = _asked()
    connection.data_received(HEAD + b"\r\nhel")
    connection.data_received(b"lo")
    connection.eof_received()
    assert await _answer(connection) == (200, "text/event-stream", b"hello")
    assert not connection.finish()


async def test_informational_response_is_skipped():
    connection, _ = _asked()
    connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN)
    assert await _answer(connection) == (200, "text/event-stream", b"hello")
    assert connection.finish()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "could not be reached: it closed the connection"),
        (b"SSH-2.0-x\r\n", "could not be reached: what it sent is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", "its headers are too long"),
        (HEAD + b"Content-Length: 9\r\n\r\nhello", "broke off: it closed the connection"),
        (
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\nX\r\n",
            "broke off: what it sent is not HTTP",
        ),
    ],
)
async def test_incomplete_answer_is_an_error(said, why):
    """A worker that breaks off is distinguished from one that has finished."""
    connection, transport = _asked()
    if said:
        connection.data_received(said)
    connection.eof_received()
    with pytest.raises(WorkerFailedError, match=why):
        await _answer(connection)
    assert not connection.finish()
    assert not transport.is_open


@pytest.mark.parametrize("more", [b"x", PLAIN])
async def test_bytes_after_an_answer_close_the_connection(more):
    """It would pass for the answer to the next request."""
    connection, transport = _asked()
    connection.data_received(PLAIN + more)
    assert (await _answer(connection))[2] == b"hello"
    assert not connection.finish()
    assert not transport.is_open


async def test_unsolicited_bytes_close_the_connection():
    """Also on an idle connection."""
    connection, transport = _asked()
    connection.data_received(PLAIN)
    await _answer(connection)
    assert connection.finish()
    connection.data_received(PLAIN)
    assert not connection.is_usable
    assert not transport.is_open


async def test_abandoned_answer_closes_the_connection():
    """That is what makes a worker stop generating."""
    connection, transport = _asked()
    connection.data_received(HEAD + b"Content-Length: 9\r\n\r\nhello")
    await connection.read_head(5)
    assert await connection.read(5) == b"hello"
    assert not connection.finish()
    assert not transport.is_open


LARGE_HEAD = HEAD + b"Content-Length: 10000000\r\n\r\n"


async def test_slow_reader_applies_back_pressure():
    """Unread bytes are bounded; the worker continues once the client has taken them and waits for more."""
    connection, transport = _asked()
    connection.data_received(LARGE_HEAD + b"x" * MAX_UNREAD_BYTES)
    assert transport.reads
    connection.data_received(b"x")
    assert not transport.reads
    assert len(await connection.read(5)) == MAX_UNREAD_BYTES + 1
    await asyncio.sleep(0)
    assert not transport.reads
    reading = asyncio.ensure_future(connection.read(5))
    await until(lambda: transport.reads)
    connection.data_received(b"more")
    assert await reading == b"more"


async def test_connections_with_much_to_read_are_read_from_in_turn():
    """Many full sockets in one turn of the event loop would delay every other answer."""
    turns = ReadTurns()
    asked = [_asked(turns) for _ in range(4)]
    for connection, transport in asked:
        connection.data_received(LARGE_HEAD + b"x" * (MAX_UNREAD_BYTES + 1))
        assert not transport.reads
        await connection.read(5)
    waiting = [asyncio.ensure_future(connection.read(5)) for connection, _ in asked]
    reading = [0]
    for _ in range(20):
        await asyncio.sleep(0)
        reading.append(sum(transport.reads for _, transport in asked))
    assert reading[-1] == len(asked)
    assert max(after - before for before, after in itertools.pairwise(reading)) == READS_PER_TURN
    for connection, _ in asked:
        connection.data_received(b"more")
    assert await asyncio.gather(*waiting) == [b"more"] * len(asked)


async def test_connection_is_read_again_after_a_large_answer():
    """The gateway has to notice that the worker closes it, and reads the next answer from it."""
    connection, transport = _asked()
    size = MAX_UNREAD_BYTES + 1
    connection.data_received(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
    assert not transport.reads
    assert len(await connection.read(5)) == size
    assert connection.finish()
    connection.send(b"POST / HTTP/1.1\r\n\r\n", ())
    await until(lambda: transport.reads)
    connection.data_received(PLAIN)
    assert await _answer(connection) == (200, "text/event-stream", b"hello")


async def test_read_timeout_does_not_end_the_answer():
    """The caller decides whether to read again; later bytes are still delivered."""
    connection, _ = _asked()
    connection.data_received(HEAD + b"Content-Length: 5\r\n\r\n")
    await connection.read_head(5)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await connection.read(0.01)
    connection.data_received(b"hel")
    assert await connection.read(0.01) == b"hel"
    asyncio.get_running_loop().call_later(0.02, connection.data_received, b"lo")
    assert await connection.read(5) == b"lo"


async def test_what_arrives_while_a_reader_waits_is_passed_on_without_waking_it():
    """What is refused is read, in order with what came before the reader could take it."""
    connection, _ = _asked()
    connection.data_received(LARGE_HEAD + b"first")
    await connection.read_head(5)
    passed: list[bytes] = []

    def pass_on(read: bytes) -> bool:
        if b"!" in read:
            return False
        passed.append(read)
        return True

    assert await connection.read(5, pass_on) == b"first"
    connection.data_received(b"nobody waits ")
    assert await connection.read(5, pass_on) == b"nobody waits "
    reading = asyncio.ensure_future(connection.read(5, pass_on))
    await asyncio.sleep(0)
    for piece in (b"a", b"b"):
        connection.data_received(piece)
        await asyncio.sleep(0)
    assert (passed, reading.done()) == ([b"a", b"b"], False)
    connection.data_received(b"stop!")
    connection.data_received(b" c")
    assert await reading == b"stop! c"
    assert passed == [b"a", b"b"]


async def test_the_end_of_an_answer_is_left_to_its_reader():
    connection, _ = _asked()
    connection.data_received(CHUNKED[:-12])
    await connection.read_head(5)
    passed: list[bytes] = []
    reading = asyncio.ensure_future(connection.read(5, lambda read: not passed.append(read)))
    await asyncio.sleep(0)
    assert await reading == b"hel"
    reading = asyncio.ensure_future(connection.read(5, lambda read: not passed.append(read)))
    await asyncio.sleep(0)
    connection.data_received(CHUNKED[-12:])
    assert await reading == b"lo"
    assert connection.is_complete
    assert passed == []


async def test_a_reader_waits_for_silence_after_what_was_passed_on():
    connection, _ = _asked()
    connection.data_received(LARGE_HEAD)
    await connection.read_head(5)
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    for at in (0.04, 0.08, 0.12):
        loop.call_at(began + at, connection.data_received, b"x")
    with pytest.raises(TimeoutError):
        await connection.read(0.1, lambda _read: True)
    assert loop.time() - began >= 0.2


async def test_a_socket_that_was_paused_is_read_on_after_much_was_passed_on():
    connection, transport = _asked()
    connection.data_received(LARGE_HEAD)
    await connection.read_head(5)
    reading = asyncio.ensure_future(connection.read(5, lambda _read: True))
    await asyncio.sleep(0)
    connection.data_received(b"x" * (MAX_UNREAD_BYTES + 1))
    await until(lambda: transport.reads)
    reading.cancel()


async def test_silence_is_counted_from_what_was_passed_on():
    """Many short silences are not a long one; each has its keep-alives."""
    connection, _ = _asked()
    connection.data_received(LARGE_HEAD)
    await connection.read_head(5)
    loop, began, kept = asyncio.get_running_loop(), asyncio.get_running_loop().time(), list[float]()
    for number in range(1, 6):
        loop.call_at(began + 0.15 * number, connection.data_received, b"x")

    async def keep_alive() -> None:
        kept.append(loop.time() - began)

    timeouts = ReadTimeouts(keep_alive_seconds=0.1, silence_seconds=0.25)
    with pytest.raises(WorkerTimeoutError):
        await timeouts.read(connection, keep_alive, lambda _read: True)
    assert loop.time() - began >= 0.75 + 0.2
    assert len(kept) >= 5
