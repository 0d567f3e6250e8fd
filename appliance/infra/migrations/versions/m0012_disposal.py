"""
Disposal of entries: how far it went, and the paths of the leaves that stay.

Leaves that were disposed of can be deleted, which needs the right to: gateways never have it.  All others
stay write-once.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_POSITION = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_IS_KEPT = "old.idx >= coalesce((SELECT max(below) FROM audit_disposal), 0)"


def upgrade() -> None:
    op.create_table(
        "audit_disposal",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("below", sa.BigInteger, nullable=False),
        sa.Column("idx", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "audit_kept",
        sa.Column("idx", _POSITION, primary_key=True, autoincrement=False),
        sa.Column("path", sa.LargeBinary, nullable=False),
    )
    if op.get_context().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_leaves_no_delete")
        op.execute(
            f"CREATE TRIGGER audit_leaves_no_delete BEFORE DELETE ON audit_leaves WHEN {_IS_KEPT} "
            "BEGIN SELECT RAISE(ABORT, 'audit leaves are write-once'); END"
        )
        return
    op.execute("DROP TRIGGER audit_leaves_no_delete ON audit_leaves")
    op.execute(
        "CREATE FUNCTION audit_leaves_refuse_kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF {_IS_KEPT} THEN RAISE EXCEPTION 'audit leaves are write-once'; END IF; "
        "RETURN old; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_leaves_no_delete BEFORE DELETE ON audit_leaves "
        "FOR EACH ROW EXECUTE FUNCTION audit_leaves_refuse_kept()"
    )
