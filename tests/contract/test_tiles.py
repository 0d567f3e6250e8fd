"""Hashes in the store: upgrades of stored logs, gateways of the former version, and what a start reads."""

import asyncio
import re
from contextlib import closing

import pytest
from sqlalchemy import create_engine, event, insert, update

from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_receipt
from appliance.audit.merkle import CompactRange
from appliance.audit.store import Head, SqlAuditStore
from appliance.audit.tables import audit_head, audit_leaves
from appliance.audit.witness.witnessing import make_request
from appliance.cli.audit_maintenance import upgrade
from appliance.errors import AuditVerificationError
from appliance.infra import schema
from appliance.infra.data_directory import locate
from appliance.infra.migrations.versions import m0008_tiles
from tests.audit_log import open_log, prepare, settings_for
from tests.consistency import AsLeft, assert_consistent
from tests.grower import Grower, append_many

INTENT, OUTCOME, READ = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME, EntryType.AUDIT_READ


class FormerVersion:
    """A writer of version 0.1.0: leaves and the head, and nothing else."""

    def __init__(self, url):
        self._engine, self.tree = create_engine(url), CompactRange()

    def append(self, *contents):
        leaves = Grower(None).leaves(*contents, tree=self.tree)
        for leaf in leaves:
            self.tree.append(leaf.leaf_hash)
        head = Head.of(self.tree)
        rows = [
            {
                "idx": leaf.index,
                "leaf": leaf.leaf,
                "leaf_hash": leaf.leaf_hash,
                "type": leaf.type,
                "request_id": leaf.request_id,
            }
            for leaf in leaves
        ]
        with self._engine.begin() as connection:
            connection.execute(
                update(audit_head).values(size=head.size, root=head.root, frontier=b"".join(head.subtrees))
            )
            connection.execute(insert(audit_leaves), rows)

    def close(self):
        self._engine.dispose()


@pytest.fixture
def old_url(empty_url, old_tables):
    """A database with the tables of version 0.1.0."""
    old_tables(empty_url, "0007")
    return empty_url


@pytest.fixture
def former(old_url):
    with closing(FormerVersion(old_url)) as former:
        yield former


def test_a_stored_log_is_upgraded_once_and_a_killed_upgrade_resumes(old_url, former, open_store, monkeypatch):
    """In small transactions, each of which is kept; open requests are those of the log."""
    former.append((INTENT, "a"), (INTENT, "b"), (OUTCOME, "a"), *[(READ, None)] * 70_000)
    schema.upgrade_database(old_url)
    told = []

    class KilledError(Exception):
        pass

    def progress(done, total):
        told.append((done, total))
        if len(told) == 3:
            raise KilledError

    with pytest.raises(KilledError):
        SqlAuditStore(old_url, progress=progress)
    with closing(SqlAuditStore(old_url, progress=lambda *each: told.append(each))) as store:
        assert_consistent(store)
        assert store.open_intents() == ["b"]
    total = 70_003 // 256 + 1
    assert told[:3] == [(0, total), (64, total), (128, total)]
    assert told[3:] == [(done, total) for done in (128, 192, 256, total)]
    with closing(SqlAuditStore(old_url, progress=lambda *each: told.append(each))):
        assert len(told) == 7, "nothing is left to do"


def test_gateways_of_the_former_version_may_append_until_they_are_restarted(old_url, former, open_store):
    """Whoever completes the next tile adds what they left out; a reader does not wait for that."""
    former.append((INTENT, "a"), *[(READ, None)] * 300)
    schema.upgrade_database(old_url)
    store, grower = open_store(old_url), Grower(None)
    former.append((OUTCOME, "a"), (INTENT, "b"), *[(READ, None)] * 600)
    grower = Grower(store)
    grower.tree = former.tree.copy()
    grower.append((INTENT, "c"), *[(READ, None)] * 256)
    with closing(AsLeft(old_url)) as left:
        assert_consistent(left)
    former.tree = grower.tree.copy()
    former.append(*[(READ, None)] * 300)
    assert len(store.hashes(1, 0, 5)) == 5
    assert store.open_intents() == ["b", "c"]
    assert_consistent(store)


def test_a_log_whose_hashes_do_not_make_its_head_is_refused(old_url, former, execute):
    former.append(*[(READ, None)] * 300)
    on = "" if old_url.startswith("sqlite") else " ON audit_leaves"
    execute(old_url, f"DROP TRIGGER audit_leaves_no_update{on}")
    forged = execute.bytes(old_url, bytes(32))
    execute(old_url, f"UPDATE audit_leaves SET leaf_hash = {forged} WHERE idx = 7")
    with pytest.raises(AuditVerificationError, match="the audit database is damaged"):
        upgrade(url=old_url, grant_to=None)


def test_the_triggers_know_every_type_that_ends_a_request():
    """Another one needs another migration."""
    ends = {kind.value for kind in EntryType if kind.closes_request}
    assert set(re.findall(r"'([a-z.]+)'", m0008_tiles._ENDS)) == ends


def test_gateways_cannot_change_hashes_or_open_requests(postgres, postgres_url, open_store, execute):
    """They add hashes; the trigger alone writes open requests, with the rights of the owner."""
    execute(postgres_url, 'CREATE ROLE "tile-gateway" LOGIN')
    execute(postgres_url, schema.grants("tile-gateway"))
    url = postgres.url_of(postgres_url.rpartition("/")[2], role="tile-gateway")
    store = open_store(url)
    grower = Grower(store)
    grower.append((INTENT, "a"), (INTENT, "b"), (OUTCOME, "a"), *[(READ, None)] * 256)
    assert_consistent(store)
    for statement in (
        "UPDATE audit_tile_hashes SET hash = hash",
        "DELETE FROM audit_tile_hashes",
        "TRUNCATE audit_tile_hashes",
        "INSERT INTO audit_open_requests VALUES ('x', 1)",
        "DELETE FROM audit_open_requests",
    ):
        with pytest.raises(Exception, match="permission denied"):
            execute(url, statement)


class Work:
    """What SQLite does for a store: statements, and thousands of instructions of its virtual machine."""

    def __init__(self, store):
        self.statements = self.steps = 0
        event.listen(store._engine, "before_cursor_execute", self._statement)
        event.listen(store._engine, "checkout", self._watch)

    def _statement(self, *_arguments):
        self.statements += 1

    def _watch(self, connection, _record, _proxy):
        connection.set_progress_handler(self._step, 100)

    def _step(self):
        self.steps += 1
        return 0

    def of(self, action):
        self.statements = self.steps = 0
        action()
        return self.statements, self.steps


def test_a_start_and_proofs_cost_the_same_whatever_the_size_of_the_log(tmp_path):
    """Three hundred times the entries: as many statements, and hardly more work of the database."""
    found = {}
    for size in (1_000, 300_000):
        directory = tmp_path / str(size)
        directory.mkdir()
        prepare(directory)
        settings = settings_for(directory)

        def start(settings=settings):
            async def start_():
                async with open_log(settings, store):
                    pass

            asyncio.run(start_())

        with closing(SqlAuditStore(locate(settings).database_url)) as store:
            work = Work(store)
            start()
            grower = Grower(store)
            grower.tree = CompactRange(store.head().size, store.head().subtrees)
            append_many(store, grower, size)
            start()
            found[size] = [
                work.of(start),
                *(
                    work.of(lambda index=index: export_receipt(store, index))
                    for index in (3, size // 2, size)
                ),
                *(work.of(lambda old=old: make_request(store, old)) for old in (3, size // 2, size)),
            ]
    for (few, little), (many, much) in zip(found[1_000], found[300_000], strict=True):
        assert many <= few + 8, found
        assert much <= 4 * little + 100, found
