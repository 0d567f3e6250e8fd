"""
The egress check of a running gateway: at start, periodically and on request.

Each check is an `egress.attested` entry, metrics and a line in the operator log.  Gateways that share a log
each attest for themselves, since each has a network of its own.  A crash loses at most the check in progress,
and the next start makes one.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Receipt
from appliance.audit.sink import AuditSink
from appliance.errors import AuditError, ControlRefusedError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import EgressSettings
from appliance.sovereignty.egress.egress_status import EgressReport, EgressStatus, Trigger
from appliance.sovereignty.egress.judge import EgressVerdict
from appliance.sovereignty.egress.plan import digest_of
from appliance.sovereignty.egress.probe import Observation
from appliance.sovereignty.egress.probing import is_walled


class EgressWatch:
    def __init__(
        self,
        *,
        settings: EgressSettings,
        observe: Callable[[], Observation] | None,
        audit: AuditSink,
        gateway: str,
        host: str,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        """
        `observe` makes all attempts and waits for them, in a thread; None if `egress.mode` is `off`.

        `gateway` is its name in the log, `host` the machine's; `clock` gives Unix time.
        """
        self._settings, self._observe = settings, observe
        self._audit, self._gateway, self._host = audit, gateway, host
        self._metrics, self._logger = metrics, logger
        self._clock, self._monotonic = clock, monotonic
        self._one_at_a_time = asyncio.Lock()
        self.status = EgressStatus(mode=settings.mode)
        for verdict in EgressVerdict:  # a verdict that never came is 0, not missing
            metrics.egress_verdict.labels(verdict).set(0)
            metrics.egress_checks.labels(verdict)

    async def run(self) -> None:
        if self._observe is None:
            return
        trigger = Trigger.START
        while True:
            report = await self._check(trigger, self._observe)
            try:
                await self._record(report)
            except AuditError as error:
                # The log's own health reports this too, and refuses requests if it has to.
                self._logger.warning(
                    "audit_entry_refused", reason=str(EntryType.EGRESS_ATTESTED), error=str(error)
                )
            trigger = Trigger.SCHEDULE
            soon = min(self._settings.retry_seconds, self._settings.interval_seconds)
            is_closed = report.verdict is EgressVerdict.CLOSED
            await asyncio.sleep(self._settings.interval_seconds if is_closed else soon)

    async def check(self, actor: str) -> tuple[EgressReport, Receipt]:
        """Raises AuditError if the report is in force but not recorded; ControlRefusedError if off."""
        if self._observe is None:
            message = "egress.mode is off: set warn or strict and restart, or run `appliance egress check`"
            raise ControlRefusedError(message)
        report = await self._check(Trigger.REQUEST, self._observe)
        return report, await self._record(report, actor=actor)

    async def _check(self, trigger: Trigger, observe: Callable[[], Observation]) -> EgressReport:
        async with self._one_at_a_time:
            began = self._monotonic()
            observation = await asyncio.to_thread(observe)
            now = self._clock()
            report = EgressReport(
                observation=observation,
                time=datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                host=self._host,
                trigger=trigger,
                settings=digest_of(self._settings),
                walled=is_walled(),
                seconds=self._monotonic() - began,
            )
            self.status = self.status.after(report)
        for verdict in EgressVerdict:
            self._metrics.egress_verdict.labels(verdict).set(verdict is report.verdict)
        self._metrics.egress_checks.labels(report.verdict).inc()
        self._metrics.egress_time.set(now)
        say = {
            EgressVerdict.CLOSED: self._logger.info,
            EgressVerdict.OPEN: self._logger.error,
            EgressVerdict.INCONCLUSIVE: self._logger.warning,
        }[report.verdict]
        say(
            "egress_checked",
            state=str(report.verdict),
            detail=report.why,
            reason=str(trigger),
            seconds=round(report.seconds, 3),
        )
        return report

    async def _record(self, report: EgressReport, *, actor: str | None = None) -> Receipt:
        fields = report.to_entry() | {"gateway": self._gateway} | ({"actor": actor} if actor else {})
        return await self._audit.confirm(self._audit.submit(EntryType.EGRESS_ATTESTED, **fields))
