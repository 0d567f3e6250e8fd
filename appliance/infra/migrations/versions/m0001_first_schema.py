"""
The first schema: the log itself, kept content, who writes, and what gateways share.

A SQLite file from before there were migrations has some of these tables already; they are the same,
and are kept as they are.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_POSITION = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_EMPTY_ROOT = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")


def upgrade() -> None:
    _make_log()
    _make_what_gateways_share()
    if op.get_context().dialect.name == "sqlite":
        for operation in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER IF NOT EXISTS audit_leaves_no_{operation} "
                f"BEFORE {operation.upper()} ON audit_leaves "
                "BEGIN SELECT RAISE(ABORT, 'audit leaves are write-once'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_leaves_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'audit leaves are write-once'; END $$"
    )
    for operation in ("update", "delete", "truncate"):
        op.execute(
            f"CREATE TRIGGER audit_leaves_no_{operation} BEFORE {operation.upper()} ON audit_leaves "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_leaves_refuse()"
        )


def _make_log() -> None:
    op.create_table(
        "audit_leaves",
        sa.Column("idx", _POSITION, primary_key=True, autoincrement=False),
        sa.Column("leaf", sa.LargeBinary, nullable=False),
        sa.Column("leaf_hash", sa.LargeBinary, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text),
        if_not_exists=True,
    )
    op.create_index(
        "audit_leaves_request_id_type",
        "audit_leaves",
        ["request_id", "type"],
        unique=True,
        if_not_exists=True,
    )
    op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("frontier", sa.LargeBinary, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "audit_checkpoints",
        sa.Column("size", _POSITION, primary_key=True, autoincrement=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("time", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "audit_payloads",
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("part", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("nonce", sa.LargeBinary, nullable=False),
        sa.Column("wrapped_key", sa.LargeBinary, nullable=False),
        sa.Column("ciphertext", sa.LargeBinary, nullable=False),
        sa.Column("time", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_index("audit_payloads_tenant_time", "audit_payloads", ["tenant", "time"], if_not_exists=True)
    # What an appliance from before migrations looks at: it must not take this for an empty database.
    schema = op.create_table(
        "audit_schema",
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        if_not_exists=True,
    )
    head = sa.table(
        "audit_head", sa.column("id"), sa.column("size"), sa.column("root"), sa.column("frontier")
    )
    if not op.get_bind().scalar(sa.select(sa.func.count()).select_from(schema)):
        op.execute(sa.insert(schema).values(version=1))
        op.execute(sa.insert(head).values(id=1, size=0, root=_EMPTY_ROOT, frontier=b""))


def _make_what_gateways_share() -> None:
    op.create_table(
        "audit_cosigned",
        sa.Column("witness", sa.Text, primary_key=True),
        sa.Column("size", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("time", sa.BigInteger, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "audit_writers",
        sa.Column("gateway", sa.Text, primary_key=True),
        sa.Column("seen_at", sa.Double, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "control_lease",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "speculation_override",
        sa.Column("worker", sa.Text, primary_key=True),
        sa.Column("mode", sa.Text, nullable=False),
        sa.Column("draft_tokens", sa.Integer),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        if_not_exists=True,
    )
