"""
The tables of tenants and keys, as the newest migration leaves them.

Lists and limits are JSON text in the format of the tenants file.  Times are Unix time.  The MAC covers every
column that is not null: a new column has to be nullable, so that existing MACs stay valid.
"""

from sqlalchemy import BigInteger, Boolean, Column, Integer, MetaData, Table, Text

metadata = MetaData()

tenants = Table(
    "tenants",
    metadata,
    Column("name", Text, primary_key=True),
    Column("models", Text, nullable=False),
    Column("speculation", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("priority", Text, nullable=False),
    Column("may", Text, nullable=False),
    Column("limits", Text, nullable=False),
    Column("disabled", Boolean, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("admin", Boolean, nullable=False),
    Column("models", Text),
    Column("replaces", Text),
    Column("created_at", BigInteger),
    Column("expires_at", BigInteger),
    Column("rotated_at", BigInteger),
    Column("revoked_at", BigInteger),
    Column("scopes", Text),
    Column("limits", Text),
    Column("manage_keys", Boolean),
    Column("made_by", Text),
)

# One row, incremented by every change, so that gateways poll only it; each change compares it first, so
# that concurrent changes cannot overwrite each other.
tenancy_generation = Table(
    "tenancy_generation",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("generation", BigInteger, nullable=False),
    Column("mac", Text),
)
