"""
What a drill found, made of what the gateway and the audit log say: values only.

Times are the gateway's Unix time, so that its events and our own steps stand on one line.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from appliance.speculation.values import Reason, SpeculationMode

FALLBACK_REASONS = frozenset({Reason.COLLAPSED, Reason.BELOW_BREAK_EVEN})


class Stage(StrEnum):
    """What has to happen in a drill, in this order."""

    WARM = "warm"
    """A worker speculates, with an acceptance length worth losing."""
    FALLBACK = "fallback"
    PROBE_FAILED = "probe_failed"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a worker's speculation, as far as a drill looks at it."""

    sequence: int
    time: float
    worker: str
    mode: str
    previous_mode: str | None
    reason: str
    table: tuple[str, ...] = ()
    acceptance_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """When we did what; None where it did not come to that."""

    began: float
    warm: float | None = None
    noise: float | None = None
    """Only noise was sent from here on."""
    back: float | None = None
    """Only the first kind of prompts was sent from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each stage was reached, and the change that shows it; None where it was not."""

    marks: Marks
    fallback: Change | None = None
    probe_failed: Change | None = None
    recovered: Change | None = None

    @property
    def worker(self) -> str | None:
        """The worker that fell back."""
        return self.fallback.worker if self.fallback is not None else None

    @property
    def missing(self) -> tuple[Stage, ...]:
        """The stages that were not reached."""
        reached = {
            Stage.WARM: self.marks.warm,
            Stage.FALLBACK: self.fallback,
            Stage.PROBE_FAILED: self.probe_failed,
            Stage.RECOVERED: self.recovered,
        }
        return tuple(stage for stage, evidence in reached.items() if evidence is None)

    @property
    def seconds_to_fallback(self) -> float | None:
        """From the first noise to the fallback."""
        if self.fallback is None or self.marks.noise is None:
            return None
        return self.fallback.time - self.marks.noise

    @property
    def seconds_to_recovery(self) -> float | None:
        """From the last noise to the recovery."""
        if self.recovered is None or self.marks.back is None:
            return None
        return self.recovered.time - self.marks.back


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the drill passed, and in one line each what was wrong."""

    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def parse_changes(rows: Iterable[Mapping[str, Any]]) -> tuple[Change, ...]:
    """Changes as the admin API tells them, oldest first."""
    return tuple(
        Change(
            sequence=row["sequence"],
            time=datetime.fromisoformat(row["time"]).timestamp(),
            worker=row["worker"],
            mode=row["mode"],
            previous_mode=row["previous_mode"],
            reason=row["reason"],
            table=tuple(row["table"]),
            acceptance_length=row["acceptance_length"],
        )
        for row in rows
    )


def timeline(changes: Sequence[Change], marks: Marks) -> Timeline:
    """
    Find the stages among the changes.

    The first worker that falls back after the noise began is the one whose probe and recovery
    count; a worker that speculates again before the noise ended has not recovered.
    """
    found = Timeline(marks=marks)
    if marks.noise is None:
        return found
    fallback = next((change for change in changes if _is_fallback(change, marks.noise)), None)
    if fallback is None:
        return found
    later = [
        change
        for change in changes
        if change.worker == fallback.worker and change.sequence > fallback.sequence
    ]
    failed = next((change for change in later if change.reason == Reason.PROBE_FAILED), None)
    recovered = None
    if failed is not None and marks.back is not None:
        recovered = next(
            (
                change
                for change in later
                if change.sequence > failed.sequence
                and change.time >= marks.back
                and change.mode == SpeculationMode.SPECULATIVE
            ),
            None,
        )
    return Timeline(marks=marks, fallback=fallback, probe_failed=failed, recovered=recovered)


def unrecorded(changes: Sequence[Change], entries: Sequence[tuple[str, str, str]]) -> tuple[Change, ...]:
    """
    The changes without an audit entry of their own, in the order of the log.

    Args:
        changes: what happened, oldest first.
        entries: worker, mode and reason of each `speculation.changed`, in the order of the log;
            there may be others in between.
    """
    lacking, position = [], 0
    for change in changes:
        wanted = (change.worker, change.mode, change.reason)
        try:
            position = entries.index(wanted, position) + 1
        except ValueError:
            lacking.append(change)
    return tuple(lacking)


def verdict(
    found: Timeline, *, failures: Sequence[str], lacking: Sequence[Change] | None, unread: str = ""
) -> Verdict:
    """
    Judge a drill.

    Args:
        found: its timeline.
        failures: what each failed request said.
        lacking: changes without their audit entry; None where the log could not be read.
        unread: why it could not.
    """
    problems = [f"the stage {stage} was not reached" for stage in found.missing[:1]]
    if failures:
        problems.append(f"{len(failures)} requests failed, the first with: {failures[0]}")
    if lacking is None:
        problems.append(f"the audit log was not checked: {unread}")
    problems.extend(
        f"the audit log lacks the change of {change.worker} to {change.mode} ({change.reason}) in its place"
        for change in lacking or ()
    )
    return Verdict(problems=tuple(problems))


def _is_fallback(change: Change, since: float) -> bool:
    return (
        change.time >= since
        and change.mode == SpeculationMode.TARGET_ONLY
        and change.previous_mode == SpeculationMode.SPECULATIVE
        and change.reason in FALLBACK_REASONS
    )
