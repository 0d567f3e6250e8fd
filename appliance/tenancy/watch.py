"""
Follows the database of tenants while a gateway runs, so that what one changes holds in all.

While the database cannot be read, what was read last stays in force: serving must not depend on
it.  That a key was revoked is then not known here; metrics and readiness say since when.
"""

import asyncio
from collections.abc import Callable

from appliance.errors import TenantsUnavailableError
from appliance.infra.logs import Logger
from appliance.tenancy.directory import TenantDirectory
from appliance.tenancy.roster import Roster
from appliance.tenancy.store import TenantStore

POLL_SECONDS = 0.5
"""Time between two reads of the database's generation."""
LATE_SECONDS = 5.0
"""Age of what is known from which on operators are warned."""


class TenantWatch:
    """Keeps a directory the way the database is."""

    def __init__(
        self,
        *,
        store: TenantStore,
        directory: TenantDirectory,
        logger: Logger,
        clock: Callable[[], float],
        seconds: float = POLL_SECONDS,
    ) -> None:
        self._store = store
        self._directory = directory
        self._logger = logger
        self._clock = clock
        self._seconds = seconds
        self._read_at = clock()
        self._failure: str | None = None
        self.generation = 0
        """Of what is in force here."""

    @property
    def age_seconds(self) -> float:
        """How long ago the database last confirmed what is in force."""
        return max(0.0, self._clock() - self._read_at)

    @property
    def next_key_end(self) -> int:
        """Unix time at which the next key ends that nobody has rotated; 0 if none does."""
        return self._directory.next_key_end

    @property
    def warning(self) -> str | None:
        """What operators are told while the database cannot be read; None while all is well."""
        if self.age_seconds < LATE_SECONDS:
            return None
        reason = self._failure or "the database does not answer"
        return f"tenants and keys are as they were {self.age_seconds:.0f} s ago: {reason}"

    def adopt(self, roster: Roster) -> None:
        """Put in force what was read or written just now."""
        self._directory.replace(roster.tenants)
        self.generation = roster.generation
        self._read_at = self._clock()

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await asyncio.sleep(self._seconds)
            await self.look()

    async def look(self) -> None:
        """Adopt what has changed since; nothing is raised when the database cannot be read."""
        known = self.generation
        try:
            if await asyncio.to_thread(self._store.generation) == known:
                self._read_at = self._clock()
            else:
                roster = await asyncio.to_thread(self._store.read)
                # A change made here meanwhile is newer than what was read.
                if self.generation == known:
                    self.adopt(roster)
        except TenantsUnavailableError as error:
            if self._failure is None:
                self._logger.warning("tenants_not_read", error=str(error))
            self._failure = str(error)
            return
        if self._failure is not None:
            self._logger.info("tenants_read_again")
        self._failure = None
