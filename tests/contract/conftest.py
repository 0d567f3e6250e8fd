"""Fixtures of the contract suites: one PostgreSQL for all of them, and stores of every kind."""

import pytest
from sqlalchemy import create_engine

from appliance.audit.store import SqlAuditStore
from appliance.infra.database import open_database
from appliance.infra.schema import migrate, upgrade_database
from tests.memory_store import MemoryAuditStore
from tests.postgres import private_postgres


@pytest.fixture(scope="session")
def postgres():
    with private_postgres() as server:
        yield server


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'audit.db'}"


@pytest.fixture
def postgres_url(postgres):
    """A new database with the log's tables, without entries."""
    url = postgres.new_database()
    upgrade_database(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request):
    """Of a database without any table."""
    if request.param == "sqlite":
        return request.getfixturevalue("sqlite_url")
    return request.getfixturevalue("postgres").new_database()


@pytest.fixture
def old_tables():
    """Make the tables of a version by its newest step."""

    def make(url, step):
        engine = open_database(url, busy_seconds=60)
        with engine.begin() as connection:
            migrate(connection, step)
        engine.dispose()

    return make


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request):
    """Of a database that keeps what it has."""
    return request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])


@pytest.fixture
def open_store():
    """Open stores, which are closed at the end."""
    opened = []

    def open_(url):
        opened.append(SqlAuditStore(url))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


class Execute:
    """Run one statement as the owner of the database."""

    def __call__(self, url, statement):
        engine = create_engine(url)
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(statement)
        finally:
            engine.dispose()

    def bytes(self, url, value):
        """A literal for bytes."""
        return f"x'{value.hex()}'" if url.startswith("sqlite") else f"'\\x{value.hex()}'"


@pytest.fixture
def execute():
    return Execute()


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request, open_store):
    """An empty store of every kind."""
    if request.param == "memory":
        return MemoryAuditStore()
    return open_store(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))
