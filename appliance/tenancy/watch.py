"""
Polls the database of tenants while a gateway runs, so that changes apply on all gateways.

While the database cannot be read, or holds what no gateway wrote, the last state stays in force: serving must
not depend on it.  Keys revoked meanwhile still work, for `stale_seconds` at most; metrics and readiness show
the age of the state.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from appliance.errors import TenantsUnavailableError
from appliance.infra.logs import Logger
from appliance.tenancy.directory import TenantDirectory
from appliance.tenancy.roster import Roster
from appliance.tenancy.store import TenantStore

POLL_SECONDS = 0.5
"""Time between two reads of the database's generation."""
CHECK_SECONDS = 60.0
"""Time after which all rows are read although the generation is the same: their MAC may be wrong."""
ASKED_POLL_SECONDS = 0.05
"""Time between two polls that refused callers ask for."""
ASKED_WAIT_SECONDS = 1.0
"""How long a refused caller waits for one."""
LATE_SECONDS = 5.0
"""Age of the state from which operators are warned."""


class TenantWatch:
    def __init__(
        self,
        *,
        store: TenantStore,
        directory: TenantDirectory,
        logger: Logger,
        clock: Callable[[], float],
        stale_seconds: float | None,
        seconds: float = POLL_SECONDS,
    ) -> None:
        """`clock` is monotonic; `stale_seconds` is None for no bound."""
        self._store, self._directory, self._logger = store, directory, logger
        self._clock, self._seconds, self._stale_seconds = clock, seconds, stale_seconds
        self._read_at = self._checked_at = clock()
        self._polled_at = float("-inf")  # when the last poll began
        self._asked = asyncio.Lock()
        self._failure: str | None = None
        self.generation = 0
        """Of the state in force."""

    @property
    def age_seconds(self) -> float:
        """Time since the database last confirmed the state in force."""
        return max(0.0, self._clock() - self._read_at)

    @property
    def next_key_expiry(self) -> int:
        """Unix time of the next expiry of a key without a successor; 0 if there is none."""
        return self._directory.next_key_expiry

    @property
    def warning(self) -> str | None:
        """For operators while the database cannot be read; otherwise None."""
        if self.age_seconds < LATE_SECONDS:
            return None
        reason = self._failure or "the database does not answer"
        return f"tenants and keys were last read {self.age_seconds:.0f} s ago: {reason}"

    def refuse_if_stale(self) -> None:
        """Raises TenantsUnavailableError once a revocation can be unknown for longer than is allowed."""
        if self._stale_seconds is not None and self.age_seconds > self._stale_seconds:
            raise TenantsUnavailableError(
                f"Keys could not be checked for {self.age_seconds:.0f} s. Try again later."
            )

    def apply(self, roster: Roster) -> None:
        self._directory.replace(roster.tenants)
        self.generation = roster.generation
        self._read_at = self._checked_at = self._clock()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            await self.poll()

    async def poll_for_refused(self) -> bool:
        """
        Whether tenants or keys changed since the last poll: a key may be a moment old.

        Refused callers share polls, and cannot make the gateway read more than one each ASKED_POLL_SECONDS.
        """
        known, asked_at = self.generation, self._clock()
        if self._failure is not None:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(ASKED_WAIT_SECONDS), self._asked:
                if self._polled_at <= asked_at:
                    await asyncio.sleep(self._polled_at + ASKED_POLL_SECONDS - self._clock())
                    await self.poll()
        return self.generation != known

    async def poll(self) -> None:
        """Apply changes since the last poll; a database that cannot be read raises nothing."""
        known = self.generation
        self._polled_at = self._clock()
        try:
            is_known = await asyncio.to_thread(self._store.generation) == known
            if is_known and self._clock() - self._checked_at < CHECK_SECONDS:
                self._read_at = self._clock()
            else:
                roster = await asyncio.to_thread(self._store.read)
                # A change made here meanwhile is newer than the one read.
                if self.generation == known:
                    self.apply(roster)
        except TenantsUnavailableError as error:
            if self._failure is None:
                self._logger.warning("tenants_unavailable", error=str(error))
            self._failure = str(error)
            return
        if self._failure is not None:
            self._logger.info("tenants_available")
        self._failure = None
