"""
The control lease: of several gateways with the same workers, one holds it and acts.

The lease is one row in the audit log's database, moved by compare-and-swap.  It fails by not acting: a lease
that is not surely held is not held, and the workers keep their last command.

Expiry is read from each machine's own clock.  A machine whose clock is ahead by some seconds takes over that
much too early, so the lease must be much longer than clocks disagree: with clocks kept within a second by
NTP, 15 seconds are ample.  A holder renews at half of that, so another takes over early only if the holder
could not reach the database for the other half.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from sqlalchemy import BigInteger, Column, Connection, Double, MetaData, Table, Text, case, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from appliance.errors import ControlRefusedError
from appliance.infra.database import Database, SqlStore, first_line

LEASE_BUSY_SECONDS = 2.0
NO_HOLDER = ""
NEVER = float("-inf")

_lease = Table(
    "control_lease",
    MetaData(),
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
    # Grows with each change of holder: of two orders, the one with the larger number is newer.
    Column("epoch", BigInteger, nullable=False),
)


class Lease(Protocol):
    """The right to act, held by at most one at a time."""

    async def hold(self) -> bool:
        """Take or renew the lease; whether it is held now."""
        ...

    async def release(self) -> None:
        """Give it up, so that another need not wait for it to expire."""
        ...


def require_lease(*, is_held: bool) -> None:
    if not is_held:
        message = "This gateway does not hold the control lease: ask the one that does; see monitor.control."
        raise ControlRefusedError(message)


class SqlLease(SqlStore):
    """
    A lease in a SQL database with the tables of `infra.schema`, shared by all who name it alike.

    `holder` names this process and this start of it; no two may ever be the same.  `seconds` is how long it
    lasts from each renewal, `clock` gives Unix time.
    """

    def __init__(
        self, database: Database | str, *, name: str, holder: str, seconds: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(database, busy_seconds=min(LEASE_BUSY_SECONDS, seconds / 4))
        self._name = name
        self._holder = holder
        self._seconds = seconds
        self._clock = clock
        self._held_until = NEVER
        self._epoch = 0
        self._failure: str | None = None
        # A cancelled call continues in its thread: the next one must not overtake it.
        self._turn = threading.Lock()

    @property
    def epoch(self) -> int:
        """Fencing number of the last time it was held; larger than that of every holder before."""
        return self._epoch

    @property
    def failure(self) -> str | None:
        """Why the database failed the last time; None if it did not."""
        return self._failure

    async def hold(self) -> bool:
        return await asyncio.to_thread(self._hold)

    async def release(self) -> None:
        """Release it; without the database, it expires."""
        await asyncio.to_thread(self._release)

    def _hold(self) -> bool:
        with self._turn:
            now = self._clock()
            if self._seconds / 2 < self._held_until - now <= self._seconds:
                # No other gateway takes it before it expires, so the database is not needed.
                return True
            try:
                with self._engine.begin() as connection:
                    epoch = self._take(connection, now)
            except SQLAlchemyError as error:
                # A commit in doubt may have renewed it; not acting is right either way.
                self._fail(error)
                return False
            self._failure = None
            if epoch is None:
                self._held_until = NEVER
                return False
            self._epoch, self._held_until = epoch, now + self._seconds
            # The database may have kept us waiting for longer than the lease lasts.
            return self._clock() < self._held_until

    def _release(self) -> None:
        with self._turn:
            self._held_until = NEVER
            mine = (_lease.c.name == self._name) & (_lease.c.holder == self._holder)
            try:
                with self._engine.begin() as connection:
                    connection.execute(update(_lease).where(mine).values(holder=NO_HOLDER))
            except SQLAlchemyError as error:
                self._fail(error)

    def _fail(self, error: SQLAlchemyError) -> None:
        self._failure, self._held_until = first_line(error), NEVER

    def _take(self, connection: Connection, now: float) -> int | None:
        """Take the row if it is ours, free or expired; return its epoch, or None."""
        is_ours = _lease.c.holder == self._holder
        may_take = is_ours | (_lease.c.holder == NO_HOLDER) | (_lease.c.expires_at < now)
        taken = connection.execute(
            update(_lease)
            .where(_lease.c.name == self._name, may_take)
            .values(
                holder=self._holder,
                expires_at=now + self._seconds,
                epoch=_lease.c.epoch + case((is_ours, 0), else_=1),
            )
            .returning(_lease.c.epoch)
        ).one_or_none()
        if taken is not None:
            return int(taken.epoch)
        dialect = postgresql if self._is_postgresql else sqlite
        first = (
            dialect.insert(_lease)
            .values(name=self._name, holder=self._holder, expires_at=now + self._seconds, epoch=1)
            # An error to catch would be in the database's log, each second of every gateway that waits.
            .on_conflict_do_nothing()
            .returning(_lease.c.epoch)
        )
        epoch: int | None = connection.scalar(first)
        return epoch
