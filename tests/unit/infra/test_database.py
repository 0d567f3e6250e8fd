"""One database of a process: its stores share connections, and none waits for another's."""

import sqlite3
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from sqlalchemy import text

from appliance.infra.database import IDLE_CONNECTIONS, Database, SqlStore


@pytest.fixture
def database(tmp_path: Path):
    opened = Database(f"sqlite:///{tmp_path / 'one.db'}")
    yield opened
    opened.close()


def test_stores_with_the_same_time_out_share_an_engine(database: Database):
    """Eight stores do not open eight pools."""
    one, other, hasty = SqlStore(database), SqlStore(database), SqlStore(database, busy_seconds=2)
    assert one._engine is other._engine
    assert one._engine is not hasty._engine
    with hasty._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 2000


def test_a_reserved_engine_is_shared_with_no_other_store(database: Database):
    """The log's writer keeps its connection."""
    reserved = database.engine(5.0, reserved=True)
    assert reserved is not database.engine(5.0)
    assert reserved.pool.size() == 1


def test_no_store_waits_for_the_connections_of_others(database: Database):
    """A wait in the pool would come on top of the store's own time-out."""
    reader = database.engine(5.0).execution_options(writes=False)
    with ExitStack() as stack:
        for _ in range(20):
            assert stack.enter_context(reader.connect()).scalar(text("SELECT 1")) == 1
        assert database.engine(5.0).pool.checkedout() == 20
    assert database.engine(5.0).pool.checkedin() == IDLE_CONNECTIONS


def test_closing_a_store_leaves_a_shared_database_open(database: Database):
    """It belongs to its opener."""
    store, other = SqlStore(database), SqlStore(database)
    with other._engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    store.close()
    assert database.engine(5.0).pool.checkedin() == 1
    database.close()
    assert database.engine(5.0).pool.checkedin() == 0


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_opening_a_new_file_waits_for_another_process_that_does(tmp_path: Path, begin: str):
    """SQLite itself refuses to change the journal of a file that another connection writes to."""
    path = tmp_path / "new.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("CREATE TABLE t (x)")
        other.execute(begin)
        other.execute("SELECT * FROM t").fetchall()
        threading.Timer(0.3, other.execute, ["COMMIT"]).start()
        store = SqlStore(f"sqlite:///{path}")
        with store.database.engine(5.0).connect() as connection:
            assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        store.close()
