"""Entries that gateways have accepted and none has integrated, and how far each gateway's are integrated."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "audit_pending",
        sa.Column("gateway", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("previous_hash", sa.LargeBinary, nullable=False),
        sa.Column("leaf", sa.LargeBinary, nullable=False),
        sa.Column("leaf_hash", sa.LargeBinary, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text),
    )
    op.create_index("audit_pending_request_id_type", "audit_pending", ["request_id", "type"], unique=True)
    for column in (
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("instance", sa.Text, nullable=False, server_default=""),
        sa.Column("integrated_seq", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("integrated_hash", sa.LargeBinary),
    ):
        op.add_column("audit_writers", column)
    if op.get_context().dialect.name == "sqlite":
        return
    op.execute(
        "CREATE FUNCTION audit_pending_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'accepted audit entries are write-once'; END $$"
    )
    for operation in ("update", "truncate"):
        op.execute(
            f"CREATE TRIGGER audit_pending_no_{operation} BEFORE {operation.upper()} ON audit_pending "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_pending_refuse()"
        )
    # Every row is deleted within a second: the table stays small only if its space is used again.
    op.execute(
        "ALTER TABLE audit_pending SET "
        "(autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)"
    )
