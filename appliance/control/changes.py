"""
Changes of what a worker does about speculation, reported everywhere with the same reason.

Audit log, metrics, operator log and the admin API's list of events are written here only, so that they
cannot disagree.  A change that the audit log cannot take is still made and still logged: it alters how fast
tokens come, never which.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from appliance.audit.entry_types import EntryType
from appliance.audit.sink import AuditSink, submit_best_effort
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.values import DraftTokenTable, Reason, SpeculationMode

KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationChange:
    sequence: int  # from 1 since this process started
    time: str
    worker: str
    model: str
    mode: SpeculationMode
    previous_mode: SpeculationMode
    reason: Reason
    table: tuple[str, ...]  # draft tokens by batch size, such as `1-8: 3`
    avoided: bool
    acceptance_length: float | None
    drafts: int


class ChangeLog:
    """Keeps the latest `KEPT` changes."""

    def __init__(
        self, *, audit: AuditSink, metrics: Metrics, logger: Logger, clock: Callable[[], float]
    ) -> None:
        self._audit = audit
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._changes: deque[SpeculationChange] = deque(maxlen=KEPT)
        self._sequence = 0

    def since(self, sequence: int) -> tuple[SpeculationChange, ...]:
        """Oldest first."""
        return tuple(change for change in self._changes if change.sequence > sequence)

    def record(self, before: WorkerSnapshot, after: WorkerSnapshot) -> None:
        """Report the change between two polls of a worker, if there is one."""
        old, new = before.decision, after.decision
        if (old.mode, old.avoid) == (new.mode, new.avoid) and _same_table(old.table, new.table):
            return
        self._sequence += 1
        judged = after.figures.window if after.figures.window.drafts else before.figures.window
        change = SpeculationChange(
            sequence=self._sequence,
            time=datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds"),
            worker=after.worker.worker_id,
            model=", ".join(served.name for served in after.models) or "unknown",
            mode=new.mode,
            previous_mode=old.mode,
            reason=new.basis,
            table=show_table(new.table),
            avoided=new.avoid,
            acceptance_length=round(judged.acceptance_length, 3) if judged.drafts else None,
            drafts=judged.drafts,
        )
        self._changes.append(change)
        self._metrics.speculation_changes.labels(change.worker, change.mode, change.reason).inc()
        self._logger.info(
            "speculation_changed",
            worker=change.worker,
            mode=change.mode,
            reason=change.reason,
            acceptance_length=change.acceptance_length,
            detail=", ".join(change.table),
        )
        submit_best_effort(self._audit, self._logger, EntryType.SPECULATION_CHANGED, **_fields(change))


def show_table(table: DraftTokenTable) -> tuple[str, ...]:
    return tuple(
        f"{first}-{last}: {draft_tokens}" if first != last else f"{first}: {draft_tokens}"
        for first, last, draft_tokens in table
    )


def _same_table(old: DraftTokenTable, new: DraftTokenTable) -> bool:
    """Also if there was no table: the first table of an engine was not decided."""
    return not old or not new or old == new


def _fields(change: SpeculationChange) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "worker": change.worker,
        "model": change.model,
        "mode": str(change.mode),
        "previous_mode": str(change.previous_mode),
        "reason": str(change.reason),
        "table": list(change.table),
        "avoided": change.avoided,
        "drafts": change.drafts,
    }
    if change.acceptance_length is not None:
        fields["acceptance_length"] = f"{change.acceptance_length:.3f}"
    return fields
