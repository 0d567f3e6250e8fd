"""
The tables of files and batches, as the newest migration leaves them.

They are in the audit log's database, shared by all gateways; the bytes of a file are on a disk, and only
the gateway that its row names manages them.
"""

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, MetaData, Table, Text

metadata = MetaData()

batch_files = Table(
    "batch_files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("gateway", Text, nullable=False),  # whose directory has the bytes
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),  # as the tenant sees them
    Column("sealed", Boolean, nullable=False),  # whether they are encrypted on disk
    Column("created_at", BigInteger, nullable=False),  # times are Unix seconds
    Column("expires_at", BigInteger, nullable=False),
    # Set: the file is hidden; the row is deleted after the bytes and their key.
    Column("deleted", Text),  # why: `deleted`, `expired` or `erased`; `refused` while it is being uploaded
    Index("batch_files_tenant_id", "tenant", "id"),
)

batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text, nullable=False),  # of the API key it was created with and runs under
    Column("gateway", Text, nullable=False),  # that runs it
    Column("client", Text, nullable=False),  # address class of the client
    Column("endpoint", Text, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("sealed", Boolean, nullable=False),
    Column("status", Text, nullable=False),
    Column("model", Text),
    Column("metadata", Text, nullable=False),  # JSON object of strings
    Column("errors", Text, nullable=False),  # JSON list
    Column("output_seconds", BigInteger, nullable=False),  # how long its output is kept
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("in_progress_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("completed_at", BigInteger),
    Column("failed_at", BigInteger),
    Column("expired_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("cancelled_at", BigInteger),
    Index("batches_tenant_id", "tenant", "id"),
    Index("batches_gateway_status", "gateway", "status"),
)
