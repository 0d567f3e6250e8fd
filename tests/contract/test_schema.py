"""The tables: made by migrations, the same on both databases, never older or newer than the program."""

import re
import sqlite3

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, create_engine, text

from appliance.audit import tables
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange
from appliance.audit.store import Head
from appliance.control import approvals, override
from appliance.errors import AuditUnavailableError
from appliance.gateway.batch import tables as batch
from appliance.gateway.cost import store as cost
from appliance.infra import lease, migrations, schema
from appliance.tenancy import tables as tenancy
from appliance.tenancy.limits import store as limits
from tests.grower import Grower

READ = EntryType.AUDIT_READ
BEFORE_MIGRATIONS = """
CREATE TABLE audit_leaves (
    idx INTEGER NOT NULL, leaf BLOB NOT NULL, leaf_hash BLOB NOT NULL, type TEXT NOT NULL,
    request_id TEXT, PRIMARY KEY (idx)
);
CREATE UNIQUE INDEX audit_leaves_request_id_type ON audit_leaves (request_id, type);
CREATE TABLE audit_head (
    id INTEGER NOT NULL, size BIGINT NOT NULL, root BLOB NOT NULL, frontier BLOB NOT NULL, PRIMARY KEY (id)
);
CREATE TABLE audit_checkpoints (
    size INTEGER NOT NULL, note TEXT NOT NULL, time TEXT NOT NULL, PRIMARY KEY (size)
);
CREATE TABLE audit_schema (version INTEGER NOT NULL, PRIMARY KEY (version));
CREATE TRIGGER audit_leaves_no_update BEFORE UPDATE ON audit_leaves
    BEGIN SELECT RAISE(ABORT, 'audit leaves are write-once'); END;
CREATE TRIGGER audit_leaves_no_delete BEFORE DELETE ON audit_leaves
    BEGIN SELECT RAISE(ABORT, 'audit leaves are write-once'); END;
CREATE TABLE control_lease (
    name TEXT NOT NULL, holder TEXT NOT NULL, expires_at DOUBLE NOT NULL, epoch BIGINT NOT NULL,
    PRIMARY KEY (name)
);
INSERT INTO control_lease VALUES ('control', 'somebody', 1.5, 3);
INSERT INTO audit_schema VALUES (1);
"""
"""What the first release made of a new file, with the lease next to it."""


def _everything():
    """Every table in the declarations of the program."""
    together = MetaData()
    ours = (tables, tenancy, limits, batch, cost)
    declared = [table for each in ours for table in each.metadata.sorted_tables]
    for table in (*declared, lease._lease, override._overrides, approvals._approvals, schema._schema):
        table.to_metadata(together)
    return together


def test_migrations_create_the_declared_tables(url, open_store):
    """No table, column, type or index is missing or unused."""
    open_store(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": schema.VERSION_TABLE, "compare_type": True}
        )
        assert compare_metadata(context, _everything()) == []
    engine.dispose()


def test_the_program_knows_every_step_there_is():
    """The newest step is written down, so that opening a database need not read the others."""
    config = Config()
    config.set_main_option("script_location", migrations.__path__[0])
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    assert script.get_current_head() == schema.NEWEST
    assert {step.revision for step in script.walk_revisions()} == set(schema.KNOWN)


def test_a_log_from_before_migrations_is_adopted_without_loss(sqlite_url, tmp_path, open_store):
    """Entries, checkpoints and other contents of the file are unchanged, and it stays usable."""
    with sqlite3.connect(tmp_path / "audit.db") as old:
        old.executescript(BEFORE_MIGRATIONS)
        tree = CompactRange()
        for leaf in Grower(None).leaves((READ, None), (EntryType.REQUEST_INTENT, "a")):
            row = (leaf.index, leaf.leaf, leaf.leaf_hash, leaf.type, leaf.request_id)
            old.execute("INSERT INTO audit_leaves VALUES (?, ?, ?, ?, ?)", row)
            tree.append(leaf.leaf_hash)
        head = Head.of(tree)
        old.execute("INSERT INTO audit_head VALUES (1, 2, ?, ?)", (head.root, b"".join(head.subtrees)))
        old.execute("INSERT INTO audit_checkpoints VALUES (2, 'a note', 'a time')")
    old.close()
    store = open_store(sqlite_url)
    assert store.head() == head
    assert store.open_intents() == ["a"]
    assert store.latest_checkpoint().note == "a note"
    grower = Grower(store)
    grower.tree = tree
    grower.append((READ, None))
    assert store.writers() == {}
    with sqlite3.connect(tmp_path / "audit.db") as adopted:
        assert adopted.execute("SELECT * FROM control_lease").fetchall() == [("control", "somebody", 1.5, 3)]
        with pytest.raises(sqlite3.IntegrityError, match="write-once"):
            adopted.execute("DELETE FROM audit_leaves")
    adopted.close()


def test_upgrading_again_changes_nothing(url, open_store):
    """An operator may run it again."""
    grower = Grower(open_store(url))
    grower.append((READ, None))
    schema.upgrade_database(url)
    assert open_store(url).head() == Head.of(grower.tree)


def test_postgresql_without_tables_names_the_command(postgres, open_store):
    """The gateway's role cannot make them, and does not try."""
    with pytest.raises(AuditUnavailableError, match="appliance audit upgrade-database") as caught:
        open_store(postgres.new_database())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE audit_migrations SET version_num = '9999'", "step 9999"),
        ("INSERT INTO audit_schema VALUES (99)", "schema version 99"),
    ],
)
def test_a_newer_database_is_refused(url, open_store, execute, statement, words):
    """An older appliance neither writes to a newer log nor downgrades it."""
    open_store(url)
    execute(url, statement)
    for use in (open_store, schema.upgrade_database):
        with pytest.raises(AuditUnavailableError, match=words):
            use(url)


def test_the_rights_of_gateways_cover_every_table():
    """A table without rights would show at run time only."""
    granted = set(re.findall(r" ON (\w+) TO ", schema.grants("gateway")))
    assert granted == {*_everything().tables, schema.VERSION_TABLE}


def test_a_role_that_may_only_append_can_do_that_and_no_more(postgres, postgres_url, open_store, execute):
    """The printed rights are enough to write, and not enough to change what was written."""
    execute(postgres_url, 'CREATE ROLE "gate""way" LOGIN')
    execute(postgres_url, schema.grants('gate"way'))
    database = postgres_url.rpartition("/")[2]
    url = postgres.url_of(database, role="gate%22way")
    store = open_store(url)
    grower = Grower(store)
    kept = grower.append((READ, None))
    kept += grower.append_behind((READ, None))[1]
    store.beat("one", 1.0)
    forbidden = (
        "UPDATE audit_leaves SET type = 'x'",
        "DELETE FROM audit_leaves",
        "TRUNCATE audit_leaves",
        "DELETE FROM audit_head",
        "DELETE FROM audit_checkpoints",
        "DROP TRIGGER audit_leaves_no_update ON audit_leaves",
        "ALTER TABLE audit_leaves DISABLE TRIGGER ALL",
        "DROP TABLE audit_leaves",
    )
    for statement in forbidden:
        with pytest.raises(Exception, match=r"permission denied|must be owner"):
            execute(url, statement)
    assert store.leaves(0, 10) == kept


def test_not_even_the_owner_empties_the_log_by_mistake(postgres_url, open_store, execute):
    """TRUNCATE goes past the rules for rows; it is refused by one of its own."""
    store = open_store(postgres_url)
    kept = Grower(store).append((READ, None))
    with pytest.raises(Exception, match="write-once"):
        execute(postgres_url, "TRUNCATE audit_leaves")
    assert store.leaves(0, 10) == kept


def test_commits_are_durable_whatever_the_server_settings(postgres_url, open_store, execute):
    """A default of the database that acknowledges too early is overruled; a stricter one is kept."""
    database = postgres_url.rpartition("/")[2]
    for given, used in (("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")):
        execute(postgres_url, f"ALTER DATABASE {database} SET synchronous_commit = {given}")
        store = open_store(postgres_url)
        with store._engine.connect() as connection:
            assert connection.scalar(text("SHOW synchronous_commit")) == used
