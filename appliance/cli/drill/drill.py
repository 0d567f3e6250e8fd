"""
The drill: warm up, send noise until speculation stops and a probe fails, then wait for recovery.

It only sends requests and reads the admin API.  It is bounded in time and concurrency and stops by itself; an
interrupted drill leaves nothing to undo.  Times are the gateway's Unix time.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from appliance.cli.common.admin_client import AdminApi
from appliance.cli.drill.traffic import Traffic
from appliance.errors import ConfigurationError
from appliance.speculation.values import Reason, SpeculationMode

WARM_LENGTH = 1.5
"""Acceptance length above which a worker counts as warm."""
MAX_CONCURRENCY = 8
MIN_COLLAPSE_SECONDS, MAX_COLLAPSE_SECONDS = 10, 180
FALLBACK_REASONS = frozenset({Reason.COLLAPSED, Reason.BELOW_BREAK_EVEN})


class DrillStage(StrEnum):
    """What must happen in a drill, in this order."""

    WARM = "warm"
    FALLBACK = "fallback"
    PROBE_FAILED = "probe_failed"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """Limits, in seconds."""

    warm_seconds: float = 60.0
    collapse_seconds: float = 60.0
    total_seconds: float = 300.0
    poll_seconds: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillStart:
    """The state before the drill."""

    model: str
    sequence: int
    """Of the last change."""
    audit_size: int
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    """One change of a worker's speculation mode."""

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
    """Times of the drill's own steps; None for a step that was not reached."""

    began: float
    warm: float | None = None
    noise: float | None = None
    """Only noise was sent from here on."""
    back: float | None = None
    """Only in-domain prompts were sent from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The change that shows each stage; None for a stage that was not reached."""

    marks: Marks
    fallback: ModeChange | None = None
    probe_failed: ModeChange | None = None
    recovered: ModeChange | None = None

    @property
    def worker(self) -> str | None:
        """The worker that fell back."""
        return self.fallback.worker if self.fallback is not None else None

    @property
    def missing(self) -> tuple[DrillStage, ...]:
        shown = (self.marks.warm, self.fallback, self.probe_failed, self.recovered)
        return tuple(stage for stage, evidence in zip(DrillStage, shown, strict=True) if evidence is None)

    @property
    def seconds_to_fallback(self) -> float | None:
        """From the first noise to the fallback."""
        return _between(self.marks.noise, self.fallback)

    @property
    def seconds_to_recovery(self) -> float | None:
        """From the last noise to the recovery."""
        return _between(self.marks.back, self.recovered)


async def prepare(gateway: AdminApi, model: str | None) -> DrillStart:
    """
    Choose the model and check that a worker can fall back and recover.

    Raises:
        ConfigurationError: none can, and why.
    """
    workers = (await gateway.get("speculation"))["workers"]
    if model is None:
        model = next((name for worker in workers if worker["speculates"] for name in worker["models"]), None)
    serving = [worker for worker in workers if model in worker["models"] and worker["healthy"]]
    if model is None or not serving:
        wanted = model or "a model with a draft"
        raise ConfigurationError(f"no healthy worker serves {wanted}: choose another with --model")
    if not any(worker["controllable"] for worker in serving):
        problems = "; ".join(problem for worker in serving for problem in worker["problems"]) or "no draft"
        raise ConfigurationError(f"speculation of {model} cannot be controlled: {problems}")
    if any(worker["override"] for worker in serving):
        raise ConfigurationError(
            f"{model} has an override: remove it with `appliance speculation auto` first"
        )
    audit_size = (await gateway.get("status"))["audit"]["size"]
    reply = await gateway.get("speculation/events")
    sequence = reply["events"][-1]["sequence"] if reply["events"] else 0
    return DrillStart(model=model, sequence=sequence, audit_size=audit_size, now=reply["now"])


@dataclass(slots=True, kw_only=True)
class Drill:
    """One drill; call `run` once, directly after `prepare`."""

    gateway: AdminApi
    traffic: Traffic
    """Its prompts are in-domain at first."""
    noise: Callable[[], str]
    start: DrillStart
    plan: DrillPlan
    on_stage: Callable[[DrillStage, Timeline], None]
    clock: Callable[[], float] = time.monotonic
    timeline: Timeline = field(init=False)
    changes: tuple[ModeChange, ...] = field(default=(), init=False)
    """Changes of all workers during the drill, oldest first."""
    warm_length: float | None = field(default=None, init=False)
    """Acceptance length of the worker that counted as warm."""
    drafts_to_fallback: int | None = field(default=None, init=False)
    """In answers between the first noise and the fallback."""
    _began: float = field(default=0.0, init=False)
    _drafts_before: int = field(default=0, init=False)
    _missing: tuple[DrillStage, ...] = field(default=tuple(DrillStage), init=False)
    """Stages not reported yet."""

    async def run(self) -> None:
        """
        Go through the stages until one is not reached in time.

        Raises:
            ConfigurationError: the gateway does not answer.
        """
        self._began, self.timeline = self.clock(), Timeline(marks=Marks(began=self.start.now))
        in_domain = self.traffic.prompt
        async with self.traffic.running() as tally:
            if await self._reached(DrillStage.WARM, self.plan.warm_seconds):
                self._drafts_before, self.traffic.prompt = tally.drafts, self.noise
                self._mark(noise=self._now())
                failed = await self._reached(DrillStage.PROBE_FAILED, self.plan.collapse_seconds)
                self.traffic.prompt = in_domain
                self._mark(back=self._now())
                if failed:
                    await self._reached(DrillStage.RECOVERED, self.plan.total_seconds)
        await self._poll()

    async def _reached(self, stage: DrillStage, seconds: float) -> bool:
        """Poll until a stage is reached; False after `seconds` or the time for the whole drill."""
        until = min(self._began + self.plan.total_seconds, self.clock() + seconds)
        while True:
            await self._poll()
            if stage is DrillStage.WARM and await self._is_warm():
                self._mark(warm=self._now())
                return True
            if stage not in self.timeline.missing:
                return True
            if self.clock() >= until:
                return False
            await asyncio.sleep(self.plan.poll_seconds)

    async def _poll(self) -> None:
        after = self.changes[-1].sequence if self.changes else self.start.sequence
        reply = await self.gateway.get(f"speculation/events?after={after}")
        self.changes += parse_changes(reply["events"])
        self.timeline = find_stages(self.changes, self.timeline.marks)
        if self.timeline.fallback is not None and self.drafts_to_fallback is None:
            self.drafts_to_fallback = self.traffic.tally.drafts - self._drafts_before
        for stage in self._missing:
            if stage not in self.timeline.missing:
                self.on_stage(stage, self.timeline)
        self._missing = self.timeline.missing

    async def _is_warm(self) -> bool:
        if not self.traffic.tally.requests:
            return False
        for worker in (await self.gateway.get("speculation"))["workers"]:
            length = worker["acceptance_length"]
            is_drafting = worker["mode"] == SpeculationMode.SPECULATIVE and worker["controllable"]
            if self.start.model in worker["models"] and is_drafting and (length or 0.0) > WARM_LENGTH:
                self.warm_length = length
                return True
        return False

    def _mark(self, **marks: float) -> None:
        self.timeline = replace(self.timeline, marks=replace(self.timeline.marks, **marks))

    def _now(self) -> float:
        """The gateway's time, by the local clock since `prepare`."""
        return self.start.now + self.clock() - self._began


def parse_changes(rows: Iterable[Mapping[str, Any]]) -> tuple[ModeChange, ...]:
    """Parse the admin API's changes, oldest first."""
    names = ("sequence", "worker", "mode", "previous_mode", "reason", "acceptance_length")
    return tuple(
        ModeChange(
            time=datetime.fromisoformat(row["time"]).timestamp(),
            table=tuple(row["table"]),
            **{name: row[name] for name in names},
        )
        for row in rows
    )


def find_stages(changes: Sequence[ModeChange], marks: Marks) -> Timeline:
    """
    Find the stages among the changes, which are ordered by sequence.

    The first worker that falls back after the noise began is the one whose probe and recovery count; a worker
    that speculates again before the noise ended has not recovered.
    """
    fallback = failed = recovered = None
    for change in changes:
        if fallback is None:
            if marks.noise is not None and change.time >= marks.noise and _is_fallback(change):
                fallback = change
        elif change.worker != fallback.worker:
            continue
        elif failed is None:
            failed = change if change.reason == Reason.PROBE_FAILED else None
        elif recovered is None and marks.back is not None and change.time >= marks.back:
            recovered = change if change.mode == SpeculationMode.SPECULATIVE else None
    return Timeline(marks=marks, fallback=fallback, probe_failed=failed, recovered=recovered)


def unrecorded(
    changes: Sequence[ModeChange], entries: Sequence[tuple[str, str, str]]
) -> tuple[ModeChange, ...]:
    """
    The changes without an audit entry of their own, in the order of the log.

    `entries` has worker, mode and reason of each `speculation.changed`; others may lie in between.
    """
    missing, position = [], 0
    for change in changes:
        try:
            position = entries.index((change.worker, change.mode, change.reason), position) + 1
        except ValueError:
            missing.append(change)
    return tuple(missing)


def _between(start: float | None, change: ModeChange | None) -> float | None:
    return None if start is None or change is None else change.time - start


def _is_fallback(change: ModeChange) -> bool:
    return (
        change.mode == SpeculationMode.TARGET_ONLY
        and change.previous_mode == SpeculationMode.SPECULATIVE
        and change.reason in FALLBACK_REASONS
    )
