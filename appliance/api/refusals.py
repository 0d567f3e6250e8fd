"""
Refused callers, for the audit log and the operator log.

Anyone can send requests without a valid credential, so refusals are counted: in each interval, the log gets
one entry for each surface, and the operator log the first line of each reason at once and its count at the
end.  A crash loses the counts of the interval.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from appliance.audit.entry import format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Receipt
from appliance.audit.sink import AuditSink
from appliance.errors import AuditError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.tenancy.identity.rejection import RefusalReason

INTERVAL_SECONDS = 60.0


class Surface(StrEnum):
    API = "api"
    ADMIN = "admin"
    CONSOLE = "console"


@dataclass(slots=True, kw_only=True)
class Refusals:
    """Of one surface, not in the audit log yet; times are Unix times of the first and the last."""

    since: float
    until: float
    reasons: Counter[str] = field(default_factory=Counter)
    clients: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Refusals") -> None:
        self.since, self.until = min(self.since, other.since), max(self.until, other.until)
        self.reasons += other.reasons
        self.clients += other.clients


class RefusedCallers:
    """`clock` gives Unix time."""

    def __init__(
        self, *, audit: AuditSink, metrics: Metrics, logger: Logger, clock: Callable[[], float]
    ) -> None:
        self._audit = audit
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._unrecorded: dict[Surface, Refusals] = {}
        self._lines: Counter[tuple[Surface, RefusalReason]] = Counter()

    def count(self, surface: Surface, reason: RefusalReason, client: str, request_id: str) -> None:
        """`client` is the class of its address; nothing that the caller sent is recorded."""
        self._metrics.callers_refused.labels(reason).inc()
        if not self._lines[surface, reason]:
            self._logger.info(
                "caller_refused", reason=str(reason), detail=str(surface), request_id=request_id
            )
        self._lines[surface, reason] += 1
        now = self._clock()
        one = Refusals(since=now, until=now, reasons=Counter([str(reason)]), clients=Counter([client]))
        self._restore(surface, one)

    async def run(self) -> None:
        """Report until cancelled, then the rest; the log must outlive it."""
        try:
            while True:
                await asyncio.sleep(INTERVAL_SECONDS)
                self.report()
        finally:
            self.report()

    def report(self) -> None:
        """Write what was counted since the last report; what the audit log does not take stays counted."""
        lines, self._lines = self._lines, Counter()
        for (surface, reason), count in lines.items():
            if count > 1:
                self._logger.info("callers_refused", reason=str(reason), detail=str(surface), count=count)
        unrecorded, self._unrecorded = self._unrecorded, {}
        for surface, refusals in unrecorded.items():
            try:
                pending = self._audit.submit(
                    EntryType.CALLERS_REFUSED,
                    surface=str(surface),
                    count=refusals.reasons.total(),
                    reasons=_listed(refusals.reasons),
                    clients=_listed(refusals.clients),
                    since=format_time(int(refusals.since * 1000)),
                    until=format_time(int(refusals.until * 1000)),
                )
            except AuditError:
                self._restore(surface, refusals)
            else:
                pending.add_done_callback(partial(self._restore_if_lost, surface, refusals))

    def _restore_if_lost(
        self, surface: Surface, refusals: Refusals, pending: asyncio.Future[Receipt]
    ) -> None:
        # A commit in doubt may be in the log all the same: rather counted twice than never.
        if pending.cancelled() or pending.exception() is not None:
            self._restore(surface, refusals)

    def _restore(self, surface: Surface, refusals: Refusals) -> None:
        if surface in self._unrecorded:
            self._unrecorded[surface].add(refusals)
        else:
            self._unrecorded[surface] = refusals


def _listed(counts: Counter[str]) -> list[str]:
    return [f"{name}: {count}" for name, count in sorted(counts.items())]
