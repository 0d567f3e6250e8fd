"""
PostgreSQL or the connection to it fails at every statement, while entries are accepted and integrated.

The promise: a transaction happens whole or not at all, also if its answer is lost; what was accepted is in
the log once, no request ends twice, and an auditor finds the log valid.
"""

import asyncio
import itertools
import secrets
import socket
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress

import pytest
from sqlalchemy import event

from appliance.audit import verify
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_log
from appliance.audit.integration import accept_after
from appliance.audit.merkle import CompactRange
from appliance.audit.pending import EntryMaker
from appliance.audit.pending_rows import INTEGRATION, Fence, Writing
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import Head, Leaf, SqlAuditStore
from appliance.errors import AuditUnavailableError
from appliance.infra.lease import SqlLease
from appliance.infra.schema import upgrade_database
from tests.audit_log import ORIGIN, intent, outcome
from tests.consistency import AsLeft, assert_consistent
from tests.postgres import private_postgres
from tests.writer_process import open_gateway

INTENT, OUTCOME, ABORTED = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME, EntryType.REQUEST_ABORTED
LONG_SECONDS = 3600.0
COMMIT = "COMMIT"


@pytest.fixture(scope="module")
def server():
    with private_postgres() as server:
        yield server


def _cut(connection):
    connection.connection.dbapi_connection._usock.shutdown(socket.SHUT_RDWR)


def _connection_cut(_server, connection, _statement):
    """As if the gateway was killed, or the network failed."""
    _cut(connection)


def _answer_lost(_server, connection, statement):
    """The commit happens, and the gateway does not learn it."""
    if statement == COMMIT:
        connection.connection.dbapi_connection.commit()
    _cut(connection)


def _backends_ended(server, _connection, _statement):
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


def _server_killed(server, _connection, _statement):
    server.kill()
    server.start()


FAULTS = (_connection_cut, _answer_lost, _backends_ended, _server_killed)


class Site:
    """A log with gateways: `one` accepts, `two` integrates, and `gone` dies again and again."""

    def __init__(self, directory, url):
        self.store, self.directory = SqlAuditStore(url), directory
        self.maker = EntryMaker(
            origin=ORIGIN,
            clock=time.time,  # noqa: TID251 - a root of its own
            random_bytes=secrets.token_bytes,
            gateway="one",
        )
        self.one, self.two, self.gone = (self.register(name) for name in ("one", "two", "gone"))
        self.lease = SqlLease(
            url, name=INTEGRATION, holder=self.two.writing.holder, seconds=LONG_SECONDS, clock=lambda: 0.0
        )
        assert asyncio.run(self.lease.hold())
        self.promised = Counter()
        """Leaf hashes of what was accepted."""
        self.open = set()
        """Requests that `gone` has begun, and not ended."""

    def register(self, name):
        return self.store.register(Writing(gateway=name, instance=secrets.token_hex(4)), 0.0)

    def rows(self, registered, *contents):
        """Rows that follow what the gateway has accepted."""

        async def make():
            return [self.maker.make(kind, fields) for kind, fields in contents]

        writing = registered.writing
        return accept_after(registered.end, asyncio.run(make()), writing.gateway, writing.epoch)

    def accept(self, registered, *contents):
        """Accept entries without a fault."""
        rows = self.rows(registered, *contents)
        self.store.accept(registered.writing, rows)
        self.promised.update(row.leaf_hash for row in rows)

    def integrate(self, *, dead=()):
        """Move everything, and end the requests of the dead."""
        tree = CompactRange()

        def make(head, _newer, plan):
            nonlocal tree
            tree = CompactRange(head.size, head.subtrees)
            plan.extend(tree)
            return Head.of(tree)

        def end_requests(_head, requests):
            leaves = []
            for request in requests:
                fields = {"request_id": request.request_id, "reason": "gateway_stopped"}
                content = self.maker.leaf(ABORTED, fields)
                leaves.append(Leaf.of(tree.size, content, ABORTED, request.request_id))
                tree.append(leaves[-1].leaf_hash)
            return leaves, Head.of(tree)

        fence = Fence(writing=self.two.writing, lease_epoch=self.lease.epoch)
        self.store.integrate(
            self.store.head().size,
            make,
            fence=fence,
            dead=dead,
            silent_since=1.0,
            end_requests=end_requests if dead else None,
        )

    def in_the_log(self):
        return Counter(leaf.leaf_hash for leaf in self.store.leaves(0, 1_000_000))

    def ended(self):
        leaves = self.store.leaves(0, 1_000_000)
        return Counter(leaf.request_id for leaf in leaves if EntryType(leaf.type).closes_request)

    @contextmanager
    def failing_at(self, number, server, fault):
        """Let the fault happen at one statement or commit; yields those that were reached."""
        reached = []

        def reach(connection, statement):
            reached.append(statement)
            if len(reached) == number:
                fault(server, connection, statement)

        def before_statement(connection, _cursor, statement, *_rest):
            reach(connection, statement)

        def before_commit(connection):
            reach(connection, COMMIT)

        engine = self.store._writer
        event.listen(engine, "before_cursor_execute", before_statement)
        event.listen(engine, "commit", before_commit)
        try:
            with suppress(AuditUnavailableError):
                yield reached
        finally:
            event.remove(engine, "before_cursor_execute", before_statement)
            event.remove(engine, "commit", before_commit)


@pytest.fixture
def site(server, tmp_path):
    """A site whose log an auditor finds valid at the end, once a gateway has signed it."""
    url = server.new_database()
    upgrade_database(url)
    create_signing_key(tmp_path / "audit.key")
    site = Site(tmp_path, url)
    with closing(site.store), closing(site.lease):
        yield site
        assert site.store.accepted_leaves() == []
        assert site.promised - site.in_the_log() == Counter()
        assert max(site.ended().values()) == 1
        asyncio.run(site.lease.release())

        async def sign():
            async with open_gateway(tmp_path, site.store, "auditor"):
                pass

        asyncio.run(sign())
        with closing(AsLeft(url)) as store:
            assert_consistent(store)
        signer = load_signing_key(tmp_path / "audit.key", ORIGIN)
        export_log(site.store, tmp_path / "export", vkey=signer.vkey)
        report = verify.verify_export(tmp_path / "export", verify.parse_key(signer.vkey), None)
        assert report.problems == []


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_at_a_statement_loses_or_doubles_what_a_gateway_accepts(site, server, fault):
    """Registered again, the gateway finds all of a transaction or nothing, and what it finds stays so."""
    for number in itertools.count(1):
        request = f"{fault.__name__}-{number}"
        rows = site.rows(site.one, (INTENT, intent(request)), (OUTCOME, outcome(request)))
        returned = False
        with site.failing_at(number, server, fault) as reached:
            site.store.accept(site.one.writing, rows)
            returned = True
        again = site.store.register(site.one.writing, 0.0, again=True)
        hashes = tuple(row.leaf_hash for row in rows)
        assert again.pending in ((), hashes)
        assert again.pending or not returned
        if fault is _answer_lost and reached[-1] == COMMIT:
            assert again.pending == hashes
        site.one = again
        site.promised.update(again.pending)
        site.integrate()
        site.one = site.store.register(again.writing, 0.0, again=True)
        if returned:
            break
        if not again.pending:
            # Nothing happened: the request can be recorded as if it had not been tried.
            site.accept(site.one, (INTENT, intent(request)), (OUTCOME, outcome(request)))
            site.integrate()
            site.one = site.store.register(site.one.writing, 0.0, again=True)
    assert reached[-1] == COMMIT
    assert number > 3


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_at_a_statement_of_an_integration_loses_or_doubles_an_entry(site, server, fault):
    """Entries of a living and of a dead gateway; the request that the dead one left open is ended once."""
    for number in itertools.count(1):
        request = f"{fault.__name__}-{number}"
        site.gone = site.register("gone")
        site.accept(site.one, (INTENT, intent(request)), (OUTCOME, outcome(request)))
        site.maker._gateway = "gone"
        site.accept(site.gone, (INTENT, intent(f"open-{request}")))
        site.maker._gateway = "one"
        before, returned = site.in_the_log(), False
        with site.failing_at(number, server, fault) as reached:
            site.integrate(dead=["gone"])
            returned = True
        after = site.in_the_log()
        happened = after != before
        assert happened or not returned
        if happened:
            assert site.promised - after == Counter()
            assert site.ended()[f"open-{request}"] == 1
        if fault is _answer_lost and reached[-1] == COMMIT:
            assert happened
        site.integrate(dead=["gone"])
        assert site.promised - site.in_the_log() == Counter()
        assert site.ended()[f"open-{request}"] == 1
        site.one = site.store.register(site.one.writing, 0.0, again=True)
        if returned:
            break
    assert reached[-1] == COMMIT
    assert number > 10
