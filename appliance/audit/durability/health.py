"""
The health of the audit log: what metrics, readiness and status show of spool, disks and stored entries.

The monitor only reads.  It fails open: a check that cannot be made is no reason to refuse requests, and a
disk that cannot be read is not low.  Damage it finds is a reason: see `DurableLog.damage`.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from appliance.audit.durability.durable import DurabilityState, DurableLog
from appliance.audit.durability.selfcheck import DamagedError, SelfCheck, Verification
from appliance.audit.log import AuditLog
from appliance.errors import AuditUnavailableError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics

DISK_SECONDS = 5.0
RELIEF = 1.1
"""A disk is low until a tenth more than the limit is free, so that it does not warn on every write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    name: str
    """What the disk is used for: `database`, `spool` or `data`."""
    free_bytes: int
    low: bool = False


def judge_disks(
    free: Mapping[str, int], before: Iterable[DiskSpace], *, low_bytes: int
) -> tuple[DiskSpace, ...]:
    """Tell which disks are low: below `low_bytes`, or since `before` and not relieved; `free` is in bytes."""
    was_low = {disk.name for disk in before if disk.low}
    return tuple(
        DiskSpace(name=name, free_bytes=each, low=each < low_bytes * (RELIEF if name in was_low else 1))
        for name, each in free.items()
    )


def changed_disks(before: Iterable[DiskSpace], now: Iterable[DiskSpace]) -> tuple[DiskSpace, ...]:
    """The disks that became low, or stopped being low."""
    was_low = {disk.name for disk in before if disk.low}
    return tuple(disk for disk in now if disk.low != (disk.name in was_low))


def read_disks(paths: Mapping[str, Path]) -> dict[str, int]:
    """Bytes that an unprivileged process may still write, by name; without disks that cannot be read."""
    free = {}
    for name, path in paths.items():
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        free[name] = found.f_bavail * found.f_frsize
    return free


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHealth:
    durability: DurabilityState = field(default_factory=DurabilityState)
    disks: tuple[DiskSpace, ...] = ()
    verification: Verification = field(default_factory=Verification)

    def problem(self, log_failure: str | None) -> str | None:
        """Why requests are refused, None while they are served; `log_failure`: why the database fails."""
        durability = self.durability
        if self.verification.damage:
            return self.verification.damage
        if durability.mode == "strict":
            return log_failure
        return f"{durability.reason}; the spool is full" if durability.spool_full else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should check, in one line each."""
        found: list[str] = []
        durability = self.durability
        if self.verification.damage:
            found.append(self.verification.damage)
        if durability.spooling:
            full = "; the spool is full" if durability.spool_full else ""
            waiting = f"{durability.spooled_entries} entries wait{full}"
            found.append(f"spooling since {durability.since}, {waiting}: {durability.reason}")
        if durability.gap_entries:
            found.append(f"{durability.gap_entries} entries were not recorded anywhere")
        found += [f"the {disk.name} disk has {disk.free_bytes} bytes free" for disk in self.disks if disk.low]
        if self.verification.failure:
            found.append(f"the log could not be checked: {self.verification.failure}")
        return tuple(found)


class HealthMonitor:
    """
    Checks disks and the stored log at intervals.

    `disks` are a path on each disk that matters, by what it is used for; `verify_seconds` pass between two
    rounds of verification, 0 for none; `clock` is Unix time.
    """

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
        self._log, self._durable, self._check = log, durable, check
        self._paths, self._low_disk_bytes = disks, low_disk_bytes
        self._verify_seconds, self._clock = verify_seconds, clock
        self._metrics, self._logger = metrics, logger
        self._disks: tuple[DiskSpace, ...] = ()
        self._verification = check.found
        if check.found.damage:
            # Before the first request: what a former process has found is not forgotten.
            self._found_damage(check.found.damage)

    def health(self) -> AuditHealth:
        return AuditHealth(
            durability=self._durable.state(), disks=self._disks, verification=self._verification
        )

    async def run(self) -> None:
        """Check until cancelled."""
        checks = self._verify_seconds or self._verification.damage
        await asyncio.gather(self._poll_disks(), *([self._verify()] if checks else []))

    async def _poll_disks(self) -> None:
        while True:
            free = await asyncio.to_thread(read_disks, self._paths)
            before, self._disks = self._disks, judge_disks(free, self._disks, low_bytes=self._low_disk_bytes)
            for disk in self._disks:
                self._metrics.disk_free_bytes.labels(disk.name).set(disk.free_bytes)
                self._metrics.disk_low.labels(disk.name).set(disk.low)
            for disk in changed_disks(before, self._disks):
                if disk.low:
                    self._logger.warning("audit_disk_low", detail=disk.name, count=disk.free_bytes)
                else:
                    self._logger.info("audit_disk_relieved", detail=disk.name, count=disk.free_bytes)
            await asyncio.sleep(DISK_SECONDS)

    async def _verify(self) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit-check") as thread:
            try:
                while True:
                    state = self._log.state()
                    verify = partial(self._check.round, state.size, state.root)
                    try:
                        await loop.run_in_executor(thread, verify)
                    except DamagedError as error:
                        # Until a restart, after which its place is checked first.
                        self._found_damage(str(error))
                        return
                    except AuditUnavailableError as error:
                        self._verification = replace(self._verification, failure=str(error))
                    else:
                        self._passed()
                    if not self._verify_seconds and self._verification.damage is None:
                        return
                    await asyncio.sleep(self._verify_seconds or DISK_SECONDS)
            finally:
                # Otherwise leaving this block would wait for a round over the whole log.
                self._check.stop()

    def _passed(self) -> None:
        if self._durable.damage:
            self._logger.info("audit_damage_repaired", tree_size=self._log.state().size)
        self._durable.damage, self._verification = None, self._check.found

    def _found_damage(self, damage: str) -> None:
        damage = f"the audit log is damaged: {damage}"
        self._verification = replace(self._verification, damage=damage)
        self._durable.damage = damage
        self._logger.error("audit_damage_found", error=damage, tree_size=self._log.state().size)
