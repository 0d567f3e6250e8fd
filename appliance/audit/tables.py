"""
The log's tables, and the triggers that make leaves write-once.

The triggers stop mistakes and honest tools; whoever owns the database file can drop them.  That is
what the signed tree is for.
"""

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    event,
)

SCHEMA_VERSION = 1

metadata = MetaData()

# An INTEGER primary key is SQLite's own row id: appending needs no second index.
_Position = BigInteger().with_variant(Integer(), "sqlite")

audit_leaves = Table(
    "audit_leaves",
    metadata,
    Column("idx", _Position, primary_key=True, autoincrement=False),
    Column("leaf", LargeBinary, nullable=False),
    Column("leaf_hash", LargeBinary, nullable=False),
    Column("type", Text, nullable=False),
    Column("request_id", Text),
    # One intent and one outcome per request, even if the writer is wrong about it: a request
    # recorded twice would make the whole log invalid for good.  The one index also serves look-ups
    # by request and the search for intents without an end; a second would cost every commit pages.
    Index("audit_leaves_request_id_type", "request_id", "type", unique=True),
)

audit_head = Table(
    "audit_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    Column("root", LargeBinary, nullable=False),
    Column("frontier", LargeBinary, nullable=False),
)

audit_checkpoints = Table(
    "audit_checkpoints",
    metadata,
    Column("size", _Position, primary_key=True, autoincrement=False),
    Column("note", Text, nullable=False),
    Column("time", Text, nullable=False),
)

audit_schema = Table(
    "audit_schema",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
)

for _operation in ("UPDATE", "DELETE"):
    event.listen(
        audit_leaves,
        "after_create",
        DDL(  # type: ignore[no-untyped-call]
            f"CREATE TRIGGER audit_leaves_no_{_operation.lower()} BEFORE {_operation} ON audit_leaves "
            "BEGIN SELECT RAISE(ABORT, 'audit leaves are write-once'); END"
        ).execute_if(dialect="sqlite"),
    )
