"""Share between unit tests what costs each of them the same: the tables of an empty database."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from sqlalchemy import Connection, inspect

from appliance.audit.store import SqlAuditStore
from appliance.infra import schema


@pytest.fixture(scope="session", autouse=True)
def tables_of_an_empty_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the migrations once in this process; other empty SQLite databases get the tables they made."""
    path = tmp_path_factory.mktemp("tables") / "audit.db"
    SqlAuditStore(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as connection:
        statements = [line for line in connection.iterdump() if line not in {"BEGIN TRANSACTION;", "COMMIT;"}]
    migrate, newest = schema.upgrade, schema.NEWEST

    def upgrade(connection: Connection) -> None:
        is_copy = (schema.NEWEST, connection.dialect.name) == (newest, "sqlite")
        if is_copy and not inspect(connection).get_table_names():
            for statement in statements:
                connection.exec_driver_sql(statement)
        else:
            migrate(connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "upgrade", upgrade)
        yield
