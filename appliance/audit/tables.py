"""
The log's tables, as the newest of `appliance.infra.migrations` leaves them.

The migrations also create triggers that keep leaves and hashes write-once; leaves that were disposed of may
be deleted.  They stop mistakes and honest tools; the owner of the database can drop them, so the tree is
signed.
"""

from sqlalchemy import BigInteger, Column, Double, Index, Integer, LargeBinary, MetaData, Table, Text

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
    # One intent and one outcome per request, even if the writer has a defect: a request
    # recorded twice would make the whole log invalid for good.  The one index also serves look-ups
    # by request and the search for intents without an end; a second would cost every commit pages.
    Index("audit_leaves_request_id_type", "request_id", "type", unique=True),
)

# Row (level, number), level 1 and up, is the root of the perfect subtree of 256 ** level leaves; level 0 is
# the leaves' own hashes.  A full or partial tile is a range of rows, so none is written twice.
audit_tile_hashes = Table(
    "audit_tile_hashes",
    metadata,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

# Intents without an end.  A trigger on the leaves maintains it, whoever appends.
audit_open_requests = Table(
    "audit_open_requests",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("idx", BigInteger, nullable=False),  # of the intent
    sqlite_with_rowid=False,
)

audit_head = Table(
    "audit_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    Column("root", LargeBinary, nullable=False),
    Column("frontier", LargeBinary, nullable=False),
)

# How far entries were disposed of; no row for never.
audit_disposal = Table(
    "audit_disposal",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1
    Column("below", BigInteger, nullable=False),  # entries with a smaller index, whole tiles
    Column("idx", BigInteger, nullable=False),  # of the newest `audit.disposed` entry that is carried out
)

# Entries below that stay, because later ones are judged by them: their leaves are still in `audit_leaves`.
audit_kept = Table(
    "audit_kept",
    metadata,
    Column("idx", _Position, primary_key=True, autoincrement=False),
    Column("path", LargeBinary, nullable=False),  # from the leaf to the root of its tile, eight hashes
)

audit_checkpoints = Table(
    "audit_checkpoints",
    metadata,
    Column("size", _Position, primary_key=True, autoincrement=False),
    Column("note", Text, nullable=False),
    Column("time", Text, nullable=False),
)

# Checkpoints with the signatures of the log and a witness: evidence that a witness can give again.
audit_cosigned = Table(
    "audit_cosigned",
    metadata,
    Column("witness", Text, primary_key=True),
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("time", BigInteger, nullable=False),  # by the witness's clock, Unix time
    Column("note", Text, nullable=False),
)

# Time stamps over checkpoints, write-once.
audit_timestamps = Table(
    "audit_timestamps",
    metadata,
    Column("size", _Position, primary_key=True, autoincrement=False),
    Column("token", LargeBinary, nullable=False),  # the authority's whole answer (TimeStampResp)
    Column("time", BigInteger, nullable=False),  # by the authority's clock, Unix time
)

# Encrypted content, outside the tree so that it can be erased by
# deleting rows; the leaves hold commitments and digests.
audit_payloads = Table(
    "audit_payloads",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("part", Text, primary_key=True),  # `request`, `response` or `sample`
    Column("tenant", Text, nullable=False),
    Column("key_id", Text, nullable=False),  # of the tenant's key that wrapped the data key
    Column("nonce", LargeBinary, nullable=False),
    Column("wrapped_key", LargeBinary, nullable=False),
    Column("ciphertext", LargeBinary, nullable=False),
    Column("time", Text, nullable=False),
    Index("audit_payloads_tenant_time", "tenant", "time"),
)

# Gateways that write this log, and when each was last alive: a dead one cannot end its requests.
audit_writers = Table(
    "audit_writers",
    metadata,
    Column("gateway", Text, primary_key=True),
    Column("seen_at", Double, nullable=False),  # Unix time
    # Grows at each start of the gateway, and when another declares it dead; it accepts under the newest.
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    # Of the process that started last; empty after another declared it dead.
    Column("instance", Text, nullable=False, server_default=""),
    Column("integrated_seq", BigInteger, nullable=False, server_default="0"),
    Column("integrated_hash", LargeBinary),  # of the leaf with that sequence number
)

# PostgreSQL only: entries that gateways have accepted, durable, and that are not in the tree yet.
audit_pending = Table(
    "audit_pending",
    metadata,
    Column("gateway", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),  # without gaps, from 1
    Column("epoch", BigInteger, nullable=False),
    Column("previous_hash", LargeBinary, nullable=False),  # of the gateway's entry before
    Column("leaf", LargeBinary, nullable=False),
    Column("leaf_hash", LargeBinary, nullable=False),
    Column("type", Text, nullable=False),
    Column("request_id", Text),
    Index("audit_pending_request_id_type", "request_id", "type", unique=True),
)

# How much of the log a SIEM has; at worst it gets entries again, so losing a row costs time.
audit_forwarding = Table(
    "audit_forwarding",
    metadata,
    Column("destination", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),  # a checkpoint: sending resumes behind it
    Column("frontier", LargeBinary, nullable=False),  # of the tree at that size
    Column("sent", BigInteger, nullable=False),  # entries sent at least once, for the lag
)
