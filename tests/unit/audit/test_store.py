"""What only SQLite can do wrong; the suite for every store is in tests/contract."""

import sqlite3

import pytest
from sqlalchemy import event

from appliance.audit.entry_types import EntryType
from appliance.audit.store import Head, SqlAuditStore
from appliance.errors import AuditUnavailableError, ConfigurationError
from tests.grower import Grower

READ = EntryType.AUDIT_READ


def test_sqlite_runs_with_full_synchronisation(sql_store):
    """NORMAL would lose acknowledged entries in a power cut."""
    with sql_store._engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5000, "foreign_keys": 1}


def test_a_full_disk_is_one_clear_line(sql_store, tmp_path):
    """The operator reads what is wrong and where; nothing was added."""
    grower = Grower(sql_store)
    grower.append((READ, None))
    with sql_store._engine.connect() as connection:
        most_pages = [connection.exec_driver_sql("PRAGMA page_count").scalar()]

    @event.listens_for(sql_store._engine, "connect")
    def bound(connection, _record):
        connection.execute(f"PRAGMA max_page_count = {most_pages[0]}")

    sql_store.close()
    with pytest.raises(AuditUnavailableError, match=r"audit\.db could not be written: .*full") as caught:
        grower.append(*[(READ, None)] * 500)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    most_pages[0] = 1_000_000
    sql_store.close()
    assert sql_store.head() == Head.of(grower.tree)
    grower.append((READ, None))


def test_a_locked_database_is_unavailable(sql_store, tmp_path):
    """Another client's long transaction refuses entries instead of losing them."""
    grower = Grower(sql_store)
    other = sqlite3.connect(tmp_path / "audit.db")
    other.execute("BEGIN IMMEDIATE")
    with sql_store._reader.connect() as connection:
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
def test_unusable_database_is_reported_in_one_line(url, words):
    """One line, at start."""
    with pytest.raises((AuditUnavailableError, ConfigurationError), match=words):
        SqlAuditStore(url)


def test_file_that_is_not_a_database_is_refused(tmp_path):
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
