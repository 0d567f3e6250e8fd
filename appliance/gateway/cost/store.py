"""
The rows in the audit log's database, in three tables as the newest migration leaves them.

Each write is one transaction of sums since a slot began: after a commit in doubt the same sums are written
again, and nothing is counted twice.
"""

import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Connection, MetaData, Table, Text, delete, func, select

from appliance.errors import CostUnavailableError
from appliance.gateway.cost.report import SILENT_AFTER
from appliance.gateway.cost.rows import (
    Recorded,
    RecordingPeriod,
    ShareKey,
    TenantUsage,
    WorkerKey,
    WorkerTime,
)
from appliance.infra.database import Database, SqlStore

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


class CostStore(SqlStore):
    """The tables are there already; raises ConfigurationError if the URL cannot be used."""

    subject = "recorded engine time"
    unavailable = CostUnavailableError

    def __init__(self, database: Database | str) -> None:
        super().__init__(database)
        # A cancelled call continues in its thread: the next one must not overtake it.
        self._turn = threading.Lock()

    def write(
        self,
        period: RecordingPeriod,
        shares: Mapping[ShareKey, TenantUsage],
        workers: Mapping[WorkerKey, WorkerTime],
    ) -> int:
        """
        Replace the rows that this start wrote before; durable on return.

        Returns the number of other active gateways.  After a CostUnavailableError nothing may have been
        written, or everything.
        """
        own = {"start": period.start}
        with self._turn, self._writing() as connection:
            self._upsert(connection, cost_periods, [asdict(period)])
            rows = [key._asdict() | own | asdict(share) for key, share in shares.items()]
            self._upsert(connection, cost_shares, rows)
            rows = [key._asdict() | own | asdict(time) for key, time in workers.items()]
            self._upsert(connection, cost_workers, rows)
            others = select(func.count(cost_periods.c.gateway.distinct())).where(
                cost_periods.c.gateway != period.gateway,
                cost_periods.c.closed.is_(False),
                cost_periods.c.until + SILENT_AFTER * cost_periods.c.flush_seconds > period.until,
            )
            return int(connection.scalar(others) or 0)

    def prune(self, before: int) -> None:
        """Delete slots that began before this Unix time; raises CostUnavailableError."""
        with self._turn, self._writing() as connection:
            connection.execute(delete(cost_shares).where(cost_shares.c.slot < before))
            connection.execute(delete(cost_workers).where(cost_workers.c.slot < before))
            connection.execute(delete(cost_periods).where(cost_periods.c.until < before))

    def read(self, begin: int, end: int) -> Recorded:
        """Slots that began from `begin` to before `end`, from one snapshot; raises CostUnavailableError."""
        with self._reading() as connection:
            periods = connection.execute(select(cost_periods).order_by(cost_periods.c.began_at)).all()
            shares = _between(connection, cost_shares, begin, end)
            workers = _between(connection, cost_workers, begin, end)
        return Recorded(
            periods=tuple(RecordingPeriod(**row._asdict()) for row in periods),
            shares=tuple(map(_share, shares)),
            workers=tuple(map(_worker, workers)),
        )


def _between(connection: Connection, table: Table, begin: int, end: int) -> list[dict[str, Any]]:
    wanted = select(table).where(table.c.slot >= begin, table.c.slot < end)
    found = connection.execute(wanted.order_by(*table.primary_key.columns))
    return [dict(row) for row in found.mappings()]


def _share(row: dict[str, Any]) -> tuple[str, ShareKey, TenantUsage]:
    return row.pop("start"), ShareKey(*(row.pop(name) for name in ShareKey._fields)), TenantUsage(**row)


def _worker(row: dict[str, Any]) -> tuple[str, WorkerKey, WorkerTime]:
    return row.pop("start"), WorkerKey(*(row.pop(name) for name in WorkerKey._fields)), WorkerTime(**row)
