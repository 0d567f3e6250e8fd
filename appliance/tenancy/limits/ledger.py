"""
The books of all tenants, in the audit log's database, opened by one gateway at a time.

An exchange reads, changes and writes each book it is about in one transaction, under locks on their
rows, taken in the order of their names so that two gateways never wait for each other.  It fails
closed: what was not surely written was not handed out.  A crash in the middle changes nothing; one
between the commit and the answer leaves what was handed out held by nobody until the lease runs out.
"""

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from sqlalchemy import Connection, extract, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from appliance.errors import LimitsUnavailableError
from appliance.infra.database import first_line, open_database
from appliance.tenancy.limits.book import Book, Reply, Report, Terms, decode_book, encode_book, exchange
from appliance.tenancy.limits.quota import Quota
from appliance.tenancy.limits.tables import limit_books

BUSY_SECONDS = 2.0


class Asked(NamedTuple):
    """What is asked of one tenant's book."""

    quotas: Mapping[str, Quota]
    report: Report


class Ledger(Protocol):
    """Where books are kept; called from any thread."""

    def exchange(self, asked: Mapping[str, Asked]) -> dict[str, Reply]:
        """
        Enter reports, by tenant, and hand out what they ask for; durable on return.

        Raises:
            LimitsUnavailableError: nothing may have been entered, or everything.
        """


class MemoryLedger:
    """Books nobody else sees, gone with the process."""

    def __init__(self, *, gateway: str, terms: Terms, clock: Callable[[], float]) -> None:
        self._gateway, self._terms, self._clock = gateway, terms, clock
        self.books: dict[str, Book] = {}

    def exchange(self, asked: Mapping[str, Asked]) -> dict[str, Reply]:
        now = self._clock()
        return {
            tenant: exchange(
                self.books.setdefault(tenant, Book()), quotas, self._gateway, report,
                now=now, terms=self._terms,
            )
            for tenant, (quotas, report) in asked.items()
        }  # fmt: skip


class SqlLedger:
    """
    Books in a SQL database, which has the table already.

    Args:
        url: SQLAlchemy URL of a SQLite file or of PostgreSQL.
        gateway: names this start of this gateway; no two may ever be the same.
        terms: the same for all gateways.
        clock: Unix time; of use with SQLite only, where all gateways are on one machine.  PostgreSQL's
            own clock is used there, so that gateways' clocks need not agree.

    Raises:
        ConfigurationError: the URL cannot be used at all.
    """

    def __init__(self, url: str, *, gateway: str, terms: Terms, clock: Callable[[], float]) -> None:
        self._engine = open_database(url, busy_seconds=min(BUSY_SECONDS, terms.lease_seconds / 2))
        self._is_postgresql = self._engine.dialect.name == "postgresql"
        self._gateway, self._terms, self._clock = gateway, terms, clock
        # A cancelled call goes on in its thread: the next one must not overtake it.
        self._turn = threading.Lock()

    def close(self) -> None:
        """Give back every connection."""
        self._engine.dispose()

    def exchange(self, asked: Mapping[str, Asked]) -> dict[str, Reply]:
        tenants = sorted(asked)
        try:
            with self._turn, self._engine.begin() as connection:
                books = self._lock(connection, tenants)
                now = self._now(connection)
                replies = {
                    tenant: exchange(
                        books[tenant], asked[tenant].quotas, self._gateway, asked[tenant].report,
                        now=now, terms=self._terms,
                    )
                    for tenant in tenants
                }  # fmt: skip
                self._write(connection, books)
        except SQLAlchemyError as error:
            raise LimitsUnavailableError(
                f"the limits' books cannot be reached: {first_line(error)}"
            ) from error
        return replies

    def _lock(self, connection: Connection, tenants: list[str]) -> dict[str, Book]:
        books = self._select(connection, tenants)
        if len(books) < len(tenants):
            empty = [{"tenant": name, "book": encode_book(Book())} for name in tenants if name not in books]
            # Somebody else may be making the same; whoever is second waits here, and then reads what it has.
            connection.execute(self._insert().values(empty).on_conflict_do_nothing())
            books = self._select(connection, tenants)
        return books

    def _select(self, connection: Connection, tenants: list[str]) -> dict[str, Book]:
        wanted = select(limit_books.c.tenant, limit_books.c.book).where(limit_books.c.tenant.in_(tenants))
        rows = connection.execute(wanted.order_by(limit_books.c.tenant).with_for_update())
        return {row.tenant: decode_book(row.book) for row in rows}

    def _now(self, connection: Connection) -> float:
        # A statement of its own, after the locks: what was asked before them would be as old as the wait.
        if self._is_postgresql:
            return float(connection.execute(select(extract("epoch", func.clock_timestamp()))).scalar_one())
        return self._clock()

    def _write(self, connection: Connection, books: Mapping[str, Book]) -> None:
        rows = [{"tenant": tenant, "book": encode_book(book)} for tenant, book in books.items()]
        written = self._insert().values(rows)
        connection.execute(
            written.on_conflict_do_update(
                index_elements=[limit_books.c.tenant], set_={"book": written.excluded.book}
            )
        )

    def _insert(self) -> sqlite.Insert | postgresql.Insert:
        insert = postgresql.insert if self._is_postgresql else sqlite.insert
        return insert(limit_books)
