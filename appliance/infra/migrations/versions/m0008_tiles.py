"""
The tree's hashes above the leaves, and the requests without an end.

The table of hashes is filled by `SqlAuditStore.complete`, in small transactions.  Open requests are filled
here and kept by triggers: gateways of the former version may append for as long as they run.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_INTENT = "'request.intent'"
_ENDS = "('request.outcome', 'request.aborted')"


def upgrade() -> None:
    op.create_table(
        "audit_tile_hashes",
        sa.Column("level", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "audit_open_requests",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("idx", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    if op.get_context().dialect.name == "sqlite":
        _make_sqlite_triggers()
    else:
        _make_postgresql_triggers()
    # After the triggers: on PostgreSQL they have waited for entries that are being added.  The bound makes
    # SQLite read the index alone.
    op.execute(
        "INSERT INTO audit_open_requests (request_id, idx) "  # noqa: S608 - constants
        "SELECT request_id, idx FROM audit_leaves AS intent "
        f"WHERE request_id > '' AND type = {_INTENT} AND NOT EXISTS (SELECT 1 FROM audit_leaves AS closing "
        f"WHERE closing.request_id = intent.request_id AND closing.type IN {_ENDS})"
    )


def _make_sqlite_triggers() -> None:
    for operation in ("update", "delete"):
        op.execute(
            f"CREATE TRIGGER audit_tile_hashes_no_{operation} BEFORE {operation.upper()} "
            "ON audit_tile_hashes "
            "BEGIN SELECT RAISE(ABORT, 'audit hashes are write-once'); END"
        )
    op.execute(
        f"CREATE TRIGGER audit_leaves_open AFTER INSERT ON audit_leaves WHEN new.type = {_INTENT} "  # noqa: S608
        "AND new.request_id IS NOT NULL "
        "BEGIN INSERT INTO audit_open_requests (request_id, idx) VALUES (new.request_id, new.idx); END"
    )
    op.execute(
        f"CREATE TRIGGER audit_leaves_close AFTER INSERT ON audit_leaves WHEN new.type IN {_ENDS} "  # noqa: S608
        "BEGIN DELETE FROM audit_open_requests WHERE request_id = new.request_id; END"
    )


def _make_postgresql_triggers() -> None:
    for operation in ("update", "delete", "truncate"):
        op.execute(
            f"CREATE TRIGGER audit_tile_hashes_no_{operation} BEFORE {operation.upper()} "
            "ON audit_tile_hashes "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_leaves_refuse()"
        )
    # With the owner's rights: gateways only read the table, and those of the former version have no rights.
    # By the index only: the table is small but has many dead rows, and a scan of them slows every commit.
    schema = op.get_bind().scalar(sa.select(sa.func.quote_ident(sa.func.current_schema())))
    op.execute(
        "CREATE FUNCTION audit_leaves_follow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "  # noqa: S608
        f"SET search_path = {schema}, pg_temp SET enable_seqscan = off AS $$ BEGIN "
        "INSERT INTO audit_open_requests (request_id, idx) SELECT request_id, idx FROM added "
        f"WHERE type = {_INTENT} AND request_id IS NOT NULL; "
        "DELETE FROM audit_open_requests WHERE request_id = "
        f"ANY (ARRAY(SELECT request_id FROM added WHERE type IN {_ENDS})); "
        "RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_leaves_open AFTER INSERT ON audit_leaves REFERENCING NEW TABLE AS added "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_leaves_follow()"
    )
