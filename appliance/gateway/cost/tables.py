"""
The three tables, as the newest of the log's migrations leaves them; tenants are in them by name.
"""

from sqlalchemy import BigInteger, Boolean, Column, MetaData, Table, Text

metadata = MetaData()


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _slot() -> Column[int]:
    return Column("slot", BigInteger, primary_key=True, autoincrement=False)


cost_periods = Table(
    "cost_periods",
    metadata,
    Column("start", Text, primary_key=True),
    Column("gateway", Text, nullable=False),
    _count("began_at"),
    _count("until"),
    _count("flush_seconds"),
    Column("closed", Boolean, nullable=False),
)

# A row is written by one start of one gateway, and read by reports.
cost_shares = Table(
    "cost_shares",
    metadata,
    _slot(),
    Column("start", Text, primary_key=True),
    Column("worker", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    _count("engine_us"),
    _count("millijoules"),
    _count("requests"),
    _count("prompt_tokens"),
    _count("delivered_tokens"),
    _count("draft_tokens"),
    _count("accepted_tokens"),
)

cost_workers = Table(
    "cost_workers",
    metadata,
    _slot(),
    Column("start", Text, primary_key=True),
    Column("worker", Text, primary_key=True),
    _count("observed_us"),
    _count("busy_us"),
    _count("estimated_us"),
    _count("gpu_us"),
    _count("millijoules"),
    _count("busy_millijoules"),
    _count("metered_us"),
    _count("unknown_power_us"),
    _count("draft_us"),
    _count("draft_tokens"),
    _count("target_only_us"),
    _count("target_only_low_us"),
    _count("target_only_high_us"),
)
