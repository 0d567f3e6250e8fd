"""Time stamps over checkpoints, write-once."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_POSITION = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit_timestamps",
        sa.Column("size", _POSITION, primary_key=True, autoincrement=False),
        sa.Column("token", sa.LargeBinary, nullable=False),
        sa.Column("time", sa.BigInteger, nullable=False),
    )
    if op.get_context().dialect.name == "sqlite":
        for operation in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER audit_timestamps_no_{operation} BEFORE {operation.upper()} "
                "ON audit_timestamps BEGIN SELECT RAISE(ABORT, 'time stamps are write-once'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_timestamps_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'time stamps are write-once'; END $$"
    )
    for operation in ("update", "delete", "truncate"):
        op.execute(
            f"CREATE TRIGGER audit_timestamps_no_{operation} BEFORE {operation.upper()} ON audit_timestamps "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_timestamps_refuse()"
        )
