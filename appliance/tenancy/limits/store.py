"""
The ledgers of all tenants, in the audit log's database.

An exchange reads, changes and writes each of its ledgers in one transaction, under locks on their
rows, taken in the order of tenants' names so that two gateways never deadlock.  It fails closed: what
was not certainly written was not allocated.  A crash before the commit changes nothing; a crash between
the commit and the answer leaves the allocated units unused until the lease ends.
"""

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from sqlalchemy import Column, Connection, MetaData, Table, Text, extract, func, select

from appliance.errors import LimitsUnavailableError
from appliance.infra.database import Database, SqlStore
from appliance.tenancy.limits.ledger import (
    LeaseTerms,
    LedgerReply,
    TenantLedger,
    UsageReport,
    decode_ledger,
    encode_ledger,
    exchange,
)
from appliance.tenancy.limits.quota import Quota

LEDGER_BUSY_SECONDS = 2.0
metadata = MetaData()

# As the newest migration leaves it.  A row is written only under its lock, after it was read under that lock.
limit_books = Table(
    "limit_books",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("book", Text, nullable=False),
)


class ExchangeRequest(NamedTuple):
    quotas: Mapping[str, Quota]
    report: UsageReport


class LedgerStore(Protocol):
    """Where ledgers are kept; called from any thread."""

    def exchange(self, requests: Mapping[str, ExchangeRequest]) -> dict[str, LedgerReply]:
        """
        Apply reports, by tenant, and allocate what they request; durable on return.

        After LimitsUnavailableError nothing may have been applied, or everything.
        """


class SqlLedgerStore(SqlStore):
    """
    Ledgers in a SQL database, which has the table already.

    `gateway` names this start of this gateway, never the same for two; `terms` are the same for all.  `clock`
    is Unix time, used with SQLite only, where all gateways are on one machine.  With PostgreSQL the server's
    clock is used, so that gateways' clocks need not agree.
    """

    subject = "the units of limits"
    unavailable = LimitsUnavailableError

    def __init__(
        self, database: Database | str, *, gateway: str, terms: LeaseTerms, clock: Callable[[], float]
    ) -> None:
        super().__init__(database, busy_seconds=min(LEDGER_BUSY_SECONDS, terms.lease_seconds / 2))
        self._gateway, self._terms, self._clock = gateway, terms, clock
        # A cancelled call continues in its thread: the next one must not overtake it.
        self._turn = threading.Lock()

    def exchange(self, requests: Mapping[str, ExchangeRequest]) -> dict[str, LedgerReply]:
        tenants = sorted(requests)
        with self._turn, self._writing() as connection:
            ledgers = self._lock(connection, tenants)
            now = self._now(connection)
            replies = {
                tenant: exchange(
                    ledgers[tenant], requests[tenant].quotas, self._gateway, requests[tenant].report,
                    now=now, terms=self._terms,
                )
                for tenant in tenants
            }  # fmt: skip
            self._write(connection, ledgers)
        return replies

    def _lock(self, connection: Connection, tenants: list[str]) -> dict[str, TenantLedger]:
        ledgers = self._select(connection, tenants)
        if len(ledgers) < len(tenants):
            new = [
                {"tenant": name, "book": encode_ledger(TenantLedger())}
                for name in tenants
                if name not in ledgers
            ]
            # Another gateway may insert the same row: the second waits here, then reads the first one's.
            connection.execute(self._insert(limit_books).values(new).on_conflict_do_nothing())
            ledgers = self._select(connection, tenants)
        return ledgers

    def _select(self, connection: Connection, tenants: list[str]) -> dict[str, TenantLedger]:
        wanted = select(limit_books.c.tenant, limit_books.c.book).where(limit_books.c.tenant.in_(tenants))
        rows = connection.execute(wanted.order_by(limit_books.c.tenant).with_for_update())
        return {row.tenant: decode_ledger(row.book) for row in rows}

    def _now(self, connection: Connection) -> float:
        # A separate statement after the locks: a time read before them would be as old as the wait.
        if self._is_postgresql:
            return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())
        return self._clock()

    def _write(self, connection: Connection, ledgers: Mapping[str, TenantLedger]) -> None:
        rows = [{"tenant": tenant, "book": encode_ledger(ledger)} for tenant, ledger in ledgers.items()]
        written = self._insert(limit_books).values(rows)
        connection.execute(
            written.on_conflict_do_update(
                index_elements=[limit_books.c.tenant], set_={"book": written.excluded.book}
            )
        )
