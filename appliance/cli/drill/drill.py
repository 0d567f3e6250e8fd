"""
The drill: warm up, send noise until speculation stops, then wait for recovery.

It only sends requests and reads the admin API.  It is bounded in time and concurrency and stops by itself; an
interrupted drill leaves nothing to undo.  Times are the gateway's Unix time.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from http import HTTPStatus
from math import inf
from typing import Any

import aiohttp

from appliance.cli.common.admin_client import AdminApi
from appliance.errors import ConfigurationError
from appliance.speculation.values import Reason, SpeculationMode

WARM_LENGTH = 1.5
"""Acceptance length above which a worker counts as warm."""
TIMEOUT = aiohttp.ClientTimeout(total=60.0)
REFUSED = (f"{HTTPStatus.UNAUTHORIZED:d} ", f"{HTTPStatus.FORBIDDEN:d} ")
PAUSE_SECONDS = 0.5
"""After a failed request, to spare a gateway in trouble."""
FINISH_SECONDS = 10.0
"""Time for running requests to end when the traffic stops; then they are cancelled."""
FALLBACK_MODES = (SpeculationMode.SPECULATIVE, SpeculationMode.TARGET_ONLY)
FALLBACK_REASONS = frozenset({Reason.COLLAPSED, Reason.BELOW_BREAK_EVEN})


class DrillStage(StrEnum):
    """In the order in which they must happen; also the names of a timeline's members."""

    WARM = "warm"
    FALLBACK = "fallback"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillStart:
    model: str
    last_change: int
    audit_size: int
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange:
    sequence: int
    time: float
    worker: str
    mode: str
    previous_mode: str | None
    reason: str
    table: tuple[str, ...] = ()
    acceptance_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of the drill's own steps and the change that shows each stage; None for what was not reached."""

    began: float
    warm: float | None = None
    noise: float | None = None
    """Only noise was sent from here on."""
    back: float | None = None
    """Only in-domain prompts were sent from here on."""
    fallback: ModeChange | None = None
    recovered: ModeChange | None = None

    @property
    def missing(self) -> tuple[DrillStage, ...]:
        return tuple(stage for stage in DrillStage if getattr(self, stage) is None)

    @property
    def seconds_to_fallback(self) -> float | None:
        """From the first noise on."""
        return None if self.noise is None or self.fallback is None else self.fallback.time - self.noise

    @property
    def seconds_to_recovery(self) -> float | None:
        """From the last noise on."""
        return None if self.back is None or self.recovered is None else self.recovered.time - self.back


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Greedy completions of one tenant at one gateway."""

    session: aiohttp.ClientSession
    base: str
    key: str
    model: str
    concurrency: int
    prompt: Callable[[], str]
    """May be replaced while the traffic runs; running requests keep theirs."""
    requests: int = field(default=0, init=False)
    """Answered or failed."""
    drafts: int = field(default=0, init=False)
    failures: list[str] = field(default_factory=list, init=False)
    _stopping: bool = field(default=False, init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests within the context; at its end running ones may finish."""
        tasks = [asyncio.create_task(self._send_all()) for _ in range(self.concurrency)]
        try:
            yield
            self._stopping = True
            await asyncio.wait(tasks, timeout=FINISH_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self) -> None:
        while not self._stopping:
            failure = await self._send()
            self.requests += 1
            if failure is not None:
                self.failures.append(failure)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _send(self) -> str | None:
        """Send one request; returns what failed, if anything."""
        url, prompt = f"{self.base}/v1/completions", self.prompt()
        body = {"model": self.model, "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        # The gateway returns the worker's draft counts only on request.
        headers = {"Authorization": f"Bearer {self.key}", "X-Appliance-Metrics": "on"}
        try:
            async with self.session.post(url, json=body, headers=headers, timeout=TIMEOUT) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return f"no answer ({type(error).__name__})"
        try:
            content = json.loads(text)
            if status != HTTPStatus.OK:
                return f"{status} {content['error']['code']}"
            counts = (content.get("metrics") or {}).get("speculative_decoding") or {}
            self.drafts += int(counts.get("num_spec_steps", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{status} with a malformed answer"
        return None


async def prepare(gateway: AdminApi, model: str | None) -> DrillStart:
    """Choose the model; raises ConfigurationError if no worker can fall back and recover."""
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
        message = f"{model} has an override: remove it with `appliance speculation auto` first"
        raise ConfigurationError(message)
    audit_size = (await gateway.get("status"))["audit"]["size"]
    reply = await gateway.get("speculation/events")
    last_change = reply["events"][-1]["sequence"] if reply["events"] else 0
    return DrillStart(model=model, last_change=last_change, audit_size=audit_size, now=reply["now"])


@dataclass(slots=True, kw_only=True)
class Drill:
    """One drill; call `run` once, directly after `prepare`."""

    gateway: AdminApi
    traffic: Traffic
    """Its prompts are in-domain at first."""
    noise: Callable[[], str]
    start: DrillStart
    on_stage: Callable[[DrillStage, Timeline], None]
    warm_seconds: float = 60.0
    collapse_seconds: float = 60.0
    total_seconds: float = 300.0
    poll_seconds: float = 0.25
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
        """Go through the stages until one is not reached in time."""
        self._began, self.timeline = time.monotonic(), Timeline(began=self.start.now)
        in_domain = self.traffic.prompt
        async with self.traffic.running():
            if await self._reached(DrillStage.WARM, self.warm_seconds):
                self._drafts_before, self.traffic.prompt = self.traffic.drafts, self.noise
                self.timeline = replace(self.timeline, noise=self._now())
                fell_back = await self._reached(DrillStage.FALLBACK, self.collapse_seconds)
                self.traffic.prompt = in_domain
                self.timeline = replace(self.timeline, back=self._now())
                if fell_back:
                    await self._reached(DrillStage.RECOVERED, self.total_seconds)
        await self._poll()

    async def _reached(self, stage: DrillStage, seconds: float) -> bool:
        """Poll until a stage is reached; False after `seconds` or the time for the whole drill."""
        until = min(self._began + self.total_seconds, time.monotonic() + seconds)
        while True:
            await self._poll()
            if stage is DrillStage.WARM and await self._is_warm():
                self.timeline = replace(self.timeline, warm=self._now())
                return True
            if stage not in self.timeline.missing:
                return True
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(self.poll_seconds)

    async def _poll(self) -> None:
        after = self.changes[-1].sequence if self.changes else self.start.last_change
        reply = await self.gateway.get(f"speculation/events?after={after}")
        self.changes += parse_changes(reply["events"])
        self.timeline = find_stages(self.changes, self.timeline)
        if self.timeline.fallback is not None and self.drafts_to_fallback is None:
            self.drafts_to_fallback = self.traffic.drafts - self._drafts_before
        for stage in self._missing:
            if stage not in self.timeline.missing:
                self.on_stage(stage, self.timeline)
        self._missing = self.timeline.missing

    async def _is_warm(self) -> bool:
        if not self.traffic.requests:
            return False
        if self.traffic.failures and self.traffic.failures[0].startswith(REFUSED):
            message = f"the gateway refuses the drill's requests ({self.traffic.failures[0]})"
            raise ConfigurationError(f"{message}: give a tenant's key with --key-file")
        for worker in (await self.gateway.get("speculation"))["workers"]:
            length = worker["acceptance_length"]
            is_drafting = worker["mode"] == SpeculationMode.SPECULATIVE and worker["controllable"]
            if self.start.model in worker["models"] and is_drafting and (length or 0.0) > WARM_LENGTH:
                self.warm_length = length
                return True
        return False

    def _now(self) -> float:
        """The gateway's time, by the local clock since `prepare`."""
        return self.start.now + time.monotonic() - self._began


def parse_changes(rows: Iterable[Mapping[str, Any]]) -> tuple[ModeChange, ...]:
    names = ("sequence", "worker", "mode", "previous_mode", "reason", "acceptance_length")
    return tuple(
        ModeChange(
            time=datetime.fromisoformat(row["time"]).timestamp(),
            table=tuple(row["table"]),
            **{name: row[name] for name in names},
        )
        for row in rows
    )


def find_stages(changes: Sequence[ModeChange], times: Timeline) -> Timeline:
    """
    Find the stages among the changes, which are ordered by sequence.

    The first worker that falls back after the noise began is the one whose recovery counts; a worker
    that speculates again before the noise ended has not recovered.
    """
    noise, back = (inf if at is None else at for at in (times.noise, times.back))
    rest = iter(changes)
    stops = (each for each in rest if (each.previous_mode, each.mode) == FALLBACK_MODES)
    fallback = next((each for each in stops if each.time >= noise and each.reason in FALLBACK_REASONS), None)
    own = (each for each in rest if fallback is not None and each.worker == fallback.worker)
    starts = (each for each in own if each.mode == SpeculationMode.SPECULATIVE)
    recovered = next((each for each in starts if each.time >= back), None)
    return replace(times, fallback=fallback, recovered=recovered)
