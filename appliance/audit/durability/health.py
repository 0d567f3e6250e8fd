"""
How well the audit log does, in one place: what metrics, readiness and status are made of.

The tasks here look, and say what they saw; they change nothing.  They fail open: a look that fails
is no reason to refuse requests.  What they find may be: see `DurableLog.damage`.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from appliance.audit.durability.durable import DurabilityState, DurableLog
from appliance.audit.durability.selfcheck import DamagedError, SelfCheck, Verification
from appliance.audit.durability.watermark import Disk, changes, judge, read_disks
from appliance.audit.log import AuditLog
from appliance.errors import AuditUnavailableError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics

DISK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHealth:
    """What is known of the log beside its own state."""

    durability: DurabilityState = field(default_factory=DurabilityState)
    disks: tuple[Disk, ...] = ()
    verification: Verification = field(default_factory=Verification)

    @property
    def spool_entries(self) -> int:
        """Entries in the spool."""
        return self.durability.spooled_entries

    @property
    def spool_bytes(self) -> int:
        """Size of the spool."""
        return self.durability.spooled_bytes

    @property
    def gap_entries(self) -> int:
        """Entries recorded nowhere that the log has not admitted yet."""
        return self.durability.gap_entries

    @property
    def verified_size(self) -> int:
        """Entries that were verified since the start."""
        return self.verification.size

    @property
    def verified_time(self) -> float:
        """When the log was last verified, in seconds since the epoch."""
        return self.verification.time

    @property
    def is_damaged(self) -> bool:
        """Whether what is stored is not what was written."""
        return self.verification.damage is not None

    def problem(self, log_failure: str | None) -> str | None:
        """
        Why requests are refused; None while they are served.

        Args:
            log_failure: why the database takes no entries, or None.
        """
        durability = self.durability
        if durability.mode == "open":
            return None
        if self.verification.damage:
            return self.verification.damage
        if durability.mode == "strict":
            return log_failure
        return f"{durability.reason}; the spool is full" if durability.spool_full else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What somebody should look at, in one line each."""
        found: list[str] = []
        durability = self.durability
        if self.verification.damage:
            found.append(self.verification.damage)
        if durability.spooling:
            full = "; the spool is full" if durability.spool_full else ""
            found.append(
                f"spooling since {durability.since}, {durability.spooled_entries} entries wait{full}: "
                f"{durability.reason}"
            )
        if durability.gap_entries:
            found.append(f"{durability.gap_entries} entries were not recorded anywhere")
        found += [f"the {disk.name} disk has {disk.free_bytes} bytes free" for disk in self.disks if disk.low]
        if self.verification.failure:
            found.append(f"the log could not be checked: {self.verification.failure}")
        return tuple(found)


class HealthWatch:
    """Looks at disks and at the stored log, now and then."""

    def __init__(
        self,
        *,
        log: AuditLog,
        durable: DurableLog,
        check: SelfCheck,
        disks: Mapping[str, Path],
        low_disk_bytes: int,
        verify_seconds: float,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
    ) -> None:
        """
        Know nothing yet.

        Args:
            log: whose state says what should be stored.
            durable: told of damage.
            check: reads what is stored.
            disks: a path on each disk that matters, by what it is used for.
            low_disk_bytes: below it, a disk is low.
            verify_seconds: between two rounds; 0 for none at all.
            metrics: told of the disks.
            logger: the operator log.
            clock: seconds since the epoch.
        """
        self._log, self._durable, self._check = log, durable, check
        self._paths, self._low_disk_bytes = disks, low_disk_bytes
        self._verify_seconds, self._clock = verify_seconds, clock
        self._metrics, self._logger = metrics, logger
        self._disks: tuple[Disk, ...] = ()
        self._verification = Verification()

    def health(self) -> AuditHealth:
        """Return what is known now."""
        return AuditHealth(
            durability=self._durable.state(), disks=self._disks, verification=self._verification
        )

    async def run(self) -> None:
        """Look until cancelled."""
        await asyncio.gather(self._watch_disks(), *([self._verify()] if self._verify_seconds else []))

    async def look_at_disks(self) -> None:
        """Ask how much is free, and say so when a disk becomes low or is no longer."""
        free = await asyncio.to_thread(read_disks, self._paths)
        before, self._disks = self._disks, judge(free, self._disks, low_bytes=self._low_disk_bytes)
        for disk in self._disks:
            self._metrics.disk_free_bytes.labels(disk.name).set(disk.free_bytes)
            self._metrics.disk_low.labels(disk.name).set(disk.low)
        for disk in changes(before, self._disks):
            if disk.low:
                self._logger.warning("audit_disk_low", detail=disk.name, count=disk.free_bytes)
            else:
                self._logger.info("audit_disk_relieved", detail=disk.name, count=disk.free_bytes)

    async def _watch_disks(self) -> None:
        while True:
            await self.look_at_disks()
            await asyncio.sleep(DISK_SECONDS)

    async def _verify(self) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit-check") as thread:
            try:
                while self._verification.damage is None:
                    state = self._log.state()
                    look = partial(self._check.round, state.size, state.root)
                    try:
                        await loop.run_in_executor(thread, look)
                    except DamagedError as error:
                        self._found_damage(f"the audit log is damaged: {error}")
                    except AuditUnavailableError as error:
                        self._verification = replace(self._verification, failure=str(error))
                    else:
                        self._verification = Verification(time=self._clock(), size=self._check.size)
                    await asyncio.sleep(self._verify_seconds)
            finally:
                # Else leaving this block would wait for a round over the whole log.
                self._check.stop()

    def _found_damage(self, damage: str) -> None:
        self._verification = replace(self._verification, time=self._clock(), damage=damage)
        self._durable.damage = damage
        self._logger.error("audit_damage_found", error=damage, tree_size=self._check.size)
