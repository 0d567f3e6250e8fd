"""
PostgreSQL is gone at each statement of what is kept beside the entries, before it was done and after.

A cut connection leaves a server that goes on; a killed server recovers from its disk.
"""

import asyncio
import itertools
import re
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NamedTuple

import pytest
from cryptography import x509
from sqlalchemy import make_url

from appliance.audit.entry_types import EntryType
from appliance.audit.forward import forwarder, reader
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.authority import Authority
from appliance.audit.timestamps.store import Timestamps
from appliance.audit.timestamps.timestamping import import_response, latest_text
from appliance.audit.verify import ExitCode
from appliance.errors import AuditUnavailableError
from appliance.infra.database import BUSY_SECONDS
from appliance.infra.schema import upgrade_database
from tests.audit_log import intent, open_log, outcome, prepare, settings_for, signer_in
from tests.forwarding import Collected, indices, judge_stream, make_forwarder
from tests.postgres import PATIENCE_SECONDS, private_postgres
from tests.timestamp_authority import TimestampAuthority

ENTRIES_AT_ONCE = 3
REQUESTS = 2
MESSAGE_BYTES = 2**20
STATEMENTS = re.compile(rb"[QP]")
"""A query without parameters, and one that is sent with them."""
WRITES = re.compile(rb"[QP].{4}\0?\s*(INSERT|UPDATE|COMMIT)", re.DOTALL | re.IGNORECASE)
"""Those that change something; between others, a server may die as its connection may."""


class Way:
    """Passes statements on to the server, up to one of them; then every connection ends."""

    def __init__(self, port: int, statements: re.Pattern[bytes]) -> None:
        self._port, self._counted = port, statements
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._statements, self._last, self._is_done, self._end = 0, 0, False, lambda: None
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    @property
    def is_cut(self) -> bool:
        return 0 < self._last <= self._statements

    def cut_at(self, statement: int, *, done: bool, end) -> None:
        """End at this statement from now on, 0 for none; if `done`, once the server has answered it."""
        self._is_over.clear()
        self._statements, self._last, self._is_done, self._end = 0, statement, done, end

    def wait_until_over(self) -> None:
        """Return once the server is there again and no connection of before is."""
        assert self._is_over.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        self._listener.close()
        self._cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with closing(client), closing(server), suppress(OSError):
            while message := client.recv(MESSAGE_BYTES):
                is_counted = self._counted.match(message) is not None
                self._statements += is_counted
                is_last = is_counted and self._statements == self._last
                if not is_last or self._is_done:
                    server.sendall(message)
                    answer = _answer(server)
                if is_last:
                    self._end()
                    self._cut()
                    self._is_over.set()
                    return
                client.sendall(answer)

    def _cut(self) -> None:
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)


def _answer(server: socket.socket) -> bytes:
    """All that the server sends until it is ready for more; N answers the question for TLS."""
    answer = b""
    while answer != b"N" and answer[-6:-1] != b"Z\0\0\0\x05":
        if not (chunk := server.recv(MESSAGE_BYTES)):
            raise ConnectionError
        answer += chunk
    return answer


@pytest.fixture(scope="module")
def server():
    with private_postgres() as server:
        yield server


class End(NamedTuple):
    """What happens to the server, and at which statements."""

    statements: re.Pattern[bytes]
    happen: Callable[[], object]


@pytest.fixture(params=["cut", "killed"])
def end(request, server):
    def kill_and_start() -> None:
        server.kill()
        server.start()

    return End(WRITES, kill_and_start) if request.param == "killed" else End(STATEMENTS, lambda: None)


@pytest.fixture
def log(server, tmp_path, end):
    """A small log, its settings, and a store of it that is reached by a way which can be cut."""
    url = server.new_database()
    upgrade_database(url)
    prepare(tmp_path)
    settings = settings_for(tmp_path, url)
    whole = SqlAuditStore(url)

    async def record() -> None:
        async with open_log(settings, whole) as opened:
            for number in range(REQUESTS):
                for entry_type, fields in (
                    (EntryType.REQUEST_INTENT, intent(f"r{number}")),
                    (EntryType.REQUEST_OUTCOME, outcome(f"r{number}")),
                ):
                    await opened.sink.append(entry_type, **fields)

    asyncio.run(record())
    with closing(whole), closing(Way(server.port, end.statements)) as way:
        there = make_url(url).set(port=way.port).render_as_string()
        with closing(SqlAuditStore(there)) as store:
            yield whole, store, way


def forget(store, table):
    """Empty a table that its triggers keep."""
    with store.database.engine(BUSY_SECONDS).begin() as connection:
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        connection.exec_driver_sql(f"TRUNCATE {table}")


def at_each_statement(way, end, attempt):
    """Run `attempt` unharmed; then, for each of its statements, with an end before or after it, and again."""
    way.cut_at(0, done=False, end=end)
    attempt(is_harmed=False)
    refused = 0
    for statement in itertools.count(1):
        for done in (False, True):
            way.cut_at(statement, done=done, end=end)
            try:
                attempt(is_harmed=True)
            except AuditUnavailableError:
                refused += 1
            else:
                if not way.is_cut:
                    # Not every end is noticed: of a connection that was idle a new one is made.
                    assert refused > statement // 2
                    return
            way.wait_until_over()
            way.cut_at(0, done=False, end=end)
            attempt(is_harmed=False)


def test_a_time_stamp_is_kept_whole_or_asked_for_again(log, end, tmp_path):
    whole, store, way = log
    authority = TimestampAuthority(tmp_path / "authority")
    text, size = latest_text(whole)
    response = authority.stamp(text.encode())
    unit = Authority(certificates=tuple(x509.load_pem_x509_certificates(authority.certificate.read_bytes())))

    in_doubt = set()

    def kept():
        return [(one.size, one.token) for one in Timestamps(whole.database).all()]

    def attempt(*, is_harmed) -> None:
        if is_harmed:
            forget(whole, "audit_timestamps")
        try:
            import_response(store, unit, response)
        except AuditUnavailableError:
            in_doubt.add(len(kept()))
            raise
        assert kept() == [(size, response)]

    at_each_statement(way, end.happen, attempt)
    assert in_doubt == {0, 1}, "a refused one may be there, or not"


def test_the_cursor_skips_no_entry(log, end, tmp_path, monkeypatch):
    """A destination that was read half has every entry in the end, in a stream that proves it."""
    whole, store, way = log
    monkeypatch.setattr(reader, "BATCH_ENTRIES", ENTRIES_AT_ONCE)
    monkeypatch.setattr(forwarder, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(forwarder, "MARK_BYTES", 1)
    size, vkey = whole.head().size, signer_in(tmp_path).vkey
    collector = Collected()

    def attempt(*, is_harmed) -> None:
        if is_harmed:
            forget(whole, "audit_forwarding")
            collector.messages.clear()
        asyncio.run(make_forwarder(store, collector, window_bytes=0).forward(until_sent=True))
        assert set(indices(collector.messages)) == set(range(size))
        (tmp_path / "stream").write_bytes(collector.stream)
        code, report = judge_stream(tmp_path / "stream", vkey)
        assert (code, report["end"]) == (ExitCode.VALID, size), report

    at_each_statement(way, end.happen, attempt)
