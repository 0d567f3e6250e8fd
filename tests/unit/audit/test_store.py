"""One suite for every audit store, and what only a SQL database can do wrong."""

import sqlite3

import pytest
from sqlalchemy import event

from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.registry import EntryType
from appliance.audit.store import Head, Leaf, SqlAuditStore, StoredCheckpoint
from appliance.errors import AuditEntryError, AuditForkError, AuditUnavailableError


@pytest.fixture(params=["memory_store", "sql_store"])
def store(request):
    return request.getfixturevalue(request.param)


class Grower:
    """Appends to a store as the log does."""

    def __init__(self, store):
        self.store = store
        self.tree = CompactRange()

    def leaves(self, *contents):
        start = self.tree.size
        return [
            Leaf(
                index=start + offset,
                leaf=f"{kind} {request_id}".encode(),
                leaf_hash=hash_leaf(f"{kind} {request_id}".encode()),
                type=kind.value,
                request_id=request_id,
            )
            for offset, (kind, request_id) in enumerate(contents)
        ]

    def append(self, *contents):
        expected, leaves, tree = Head.of(self.tree), self.leaves(*contents), self.tree.copy()
        for leaf in leaves:
            tree.append(leaf.leaf_hash)
        self.store.append(leaves, expected=expected, new=Head.of(tree))
        self.tree = tree
        return leaves


INTENT, OUTCOME, ABORTED, READ = (
    EntryType.REQUEST_INTENT,
    EntryType.REQUEST_OUTCOME,
    EntryType.REQUEST_ABORTED,
    EntryType.AUDIT_READ,
)


def test_a_new_store_holds_the_empty_tree(store):
    """Size 0 and the hash of nothing."""
    head = store.head()
    assert (head, head.subtrees) == (Head.of(CompactRange()), ())
    assert store.latest_checkpoint() is None
    assert list(store.leaf_hashes()) == store.leaves(0, 10) == store.open_intents() == []


def test_appended_leaves_come_back_in_order(store):
    """Bytes, hashes, type, request and head are what was appended."""
    grower = Grower(store)
    leaves = grower.append((INTENT, "a"), (READ, None)) + grower.append((OUTCOME, "a"))
    assert store.leaves(0, 100) == leaves
    assert store.leaves(1, 2) == leaves[1:2]
    assert list(store.leaf_hashes()) == [leaf.leaf_hash for leaf in leaves]
    assert list(store.leaf_hashes(2)) == [leaf.leaf_hash for leaf in leaves[:2]]
    assert store.leaf_by_request("a") == [leaves[0], leaves[2]]
    head = store.head()
    assert (head, head.subtrees) == (Head.of(grower.tree), grower.tree.subtrees)


def test_a_writer_with_an_old_head_is_refused(store):
    """Two writers that both think they are alone: one of them stops."""
    first, second = Grower(store), Grower(store)
    first.append((READ, None))
    with pytest.raises(AuditForkError):
        second.append((INTENT, "b"))
    assert store.head().size == 1
    assert store.open_intents() == []


def test_a_writer_with_the_right_size_and_another_root_is_refused(store):
    """The root is compared too: a rewritten log of equal length is another log."""
    first, second = Grower(store), Grower(store)
    first.append((READ, None))
    second.tree.append(hash_leaf(b"something else"))
    with pytest.raises(AuditForkError):
        second.append((READ, None))


def test_a_request_cannot_be_recorded_twice(store):
    """A second intent or outcome changes nothing, and neither do the leaves beside it."""
    grower = Grower(store)
    grower.append((INTENT, "a"), (OUTCOME, "a"))
    for kind in (INTENT, OUTCOME):
        with pytest.raises(AuditEntryError):
            grower.append((READ, None), (kind, "a"))
    assert store.head() == Head.of(grower.tree)
    assert len(store.leaves(0, 100)) == 2
    grower.append((READ, None), (READ, None))


def test_open_intents_are_those_without_an_end(store):
    """What a restart has to close, oldest first."""
    grower = Grower(store)
    grower.append((INTENT, "z"), (INTENT, "b"), (INTENT, "c"), (INTENT, "a"))
    grower.append((OUTCOME, "b"), (ABORTED, "c"), (READ, None))
    assert store.open_intents() == ["z", "a"]


def test_the_latest_checkpoint_is_the_largest(store):
    """Order of saving does not matter, and the same size is replaced."""
    for size, note in ((5, "five"), (3, "three"), (5, "five again")):
        store.save_checkpoint(StoredCheckpoint(size=size, note=note, time="t"))
    assert store.latest_checkpoint() == StoredCheckpoint(size=5, note="five again", time="t")


def test_hashes_are_read_in_chunks(sql_store):
    """More leaves than one chunk holds come back complete and in order."""
    grower = Grower(sql_store)
    hashes = []
    for _ in range(3):
        hashes += [leaf.leaf_hash for leaf in grower.append(*[(READ, None)] * 3000)]
    assert list(sql_store.leaf_hashes()) == hashes
    assert list(sql_store.leaf_hashes(4096)) == hashes[:4096]
    assert list(sql_store.leaf_hashes(8999)) == hashes[:8999]


def test_what_was_appended_is_there_for_another_connection(sql_store, tmp_path):
    """A reader in another process sees what was acknowledged."""
    Grower(sql_store).append((INTENT, "a"))
    reader = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")
    assert reader.head().size == 1
    assert reader.open_intents() == ["a"]
    reader.close()


def test_sqlite_runs_with_full_synchronisation(sql_store):
    """NORMAL would lose acknowledged entries in a power cut."""
    with sql_store._engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5000, "foreign_keys": 1}


@pytest.mark.parametrize("statement", ["UPDATE audit_leaves SET leaf = x'00'", "DELETE FROM audit_leaves"])
def test_leaves_are_write_once(sql_store, tmp_path, statement):
    """A tool or a mistake cannot change a leaf; dropping the trigger first is what the tree is for."""
    Grower(sql_store).append((READ, None))
    connection = sqlite3.connect(tmp_path / "audit.db")
    with pytest.raises(sqlite3.IntegrityError, match="write-once"):
        connection.execute(statement)
    connection.close()


def test_finding_open_intents_uses_the_index(sql_store):
    """Start-up reads one index in order, not the leaves of months."""
    statements = []

    @event.listens_for(sql_store._engine, "before_cursor_execute")
    def remember(_connection, _cursor, statement, parameters, _context, _many):
        statements.append((statement, parameters))

    sql_store.open_intents()
    statement, parameters = statements[-1]
    with sql_store._engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    steps = [row[-1] for row in plan if row[-1].startswith(("SCAN", "SEARCH"))]
    assert len(steps) == 2
    assert all("USING COVERING INDEX audit_leaves_request_id_type" in step for step in steps)


def test_a_full_disk_is_one_clear_line(sql_store, tmp_path):
    """The operator reads what is wrong and where; nothing was added."""
    grower = Grower(sql_store)
    grower.append((READ, None))
    with sql_store._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(AuditUnavailableError, match=r"audit\.db could not be written: .*full") as caught:
        grower.append(*[(READ, None)] * 500)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    with sql_store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert sql_store.head() == Head.of(grower.tree)
    grower.append((READ, None))


def test_a_locked_database_is_unavailable(sql_store, tmp_path):
    """Somebody else's long transaction refuses entries instead of losing them."""
    grower = Grower(sql_store)
    other = sqlite3.connect(tmp_path / "audit.db")
    other.execute("BEGIN IMMEDIATE")
    with sql_store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 10")
    with pytest.raises(AuditUnavailableError, match="locked"):
        grower.append((READ, None))
    other.rollback()
    other.close()
    grower.append((READ, None))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "URL"),
        ("nosuchdialect:///x", "URL"),
        ("sqlite://", "must be a file"),
        ("sqlite:////no/such/directory/audit.db", "could not be opened"),
    ],
)
def test_a_database_that_cannot_be_used_says_why(url, words):
    """One line, at start."""
    with pytest.raises(AuditUnavailableError, match=words):
        SqlAuditStore(url)


def test_a_file_that_is_no_database_says_so(tmp_path):
    """A damaged or wrong file is refused before anything is written to it."""
    (tmp_path / "audit.db").write_bytes(b"no database" * 1000)
    with pytest.raises(AuditUnavailableError, match="not a database"):
        SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")


def test_another_schema_version_is_refused(sql_store, tmp_path):
    """An older appliance does not write into a newer log."""
    connection = sqlite3.connect(tmp_path / "audit.db")
    with connection:
        connection.execute("INSERT INTO audit_schema VALUES (99)")
    connection.close()
    with pytest.raises(AuditUnavailableError, match="schema version 99"):
        SqlAuditStore(f"sqlite:///{tmp_path}/audit.db")


def test_leaves_beyond_the_head_are_a_fork(sql_store, tmp_path):
    """A head that was set back by hand does not lead to leaves being overwritten."""
    grower = Grower(sql_store)
    old = grower.tree.copy()
    grower.append((READ, None))
    connection = sqlite3.connect(tmp_path / "audit.db")
    with connection:
        head = Head.of(old)
        connection.execute("UPDATE audit_head SET size = 0, root = ?, frontier = ?", (head.root, b""))
    connection.close()
    grower.tree = old
    with pytest.raises(AuditForkError):
        grower.append((READ, None))
