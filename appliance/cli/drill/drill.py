"""
The drill itself: warm up, send noise until speculation stops and a probe fails, and let it recover.

It only sends requests and asks the admin API.  It is bounded in time and concurrency, and stops on
its own; nothing has to be undone after it, whenever it is broken off.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from appliance.cli.common.admin import AdminApi
from appliance.cli.drill.timeline import Change, Marks, Stage, Timeline, parse_changes, timeline
from appliance.cli.drill.traffic import Tally, Traffic
from appliance.errors import ConfigurationError
from appliance.speculation.values import SpeculationMode

WARM_LENGTH = 1.5
LARGEST_CONCURRENCY = 8
SHORTEST_COLLAPSE_SECONDS, LONGEST_COLLAPSE_SECONDS = 10, 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Limits, in seconds."""

    warm_seconds: float = 60.0
    collapse_seconds: float = 60.0
    total_seconds: float = 300.0
    poll_seconds: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How things stood before the drill."""

    model: str
    sequence: int
    """Of the last change before it."""
    audit_size: int
    now: float
    """The gateway's Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What happened."""

    timeline: Timeline
    changes: tuple[Change, ...]
    """Every change of any worker meanwhile, oldest first."""
    drafts_to_fallback: int | None
    """In the answers that came between the first noise and the fallback."""
    warm_length: float | None
    """Acceptance length of the worker that counted as warm."""
    tally: Tally


async def look(gateway: AdminApi, model: str | None) -> Start:
    """
    Choose the model, and see that a drill can mean something.

    Raises:
        ConfigurationError: no worker could fall back and recover, and why.
    """
    workers = (await gateway.get("speculation"))["workers"]
    if model is None:
        model = next((name for worker in workers if worker["speculates"] for name in worker["models"]), None)
    serving = [worker for worker in workers if model in worker["models"] and worker["healthy"]]
    if model is None or not serving:
        message = f"no healthy worker serves {model or 'a model with a draft'}: choose another with --model"
        raise ConfigurationError(message)
    if not any(worker["controllable"] for worker in serving):
        problems = "; ".join(problem for worker in serving for problem in worker["problems"]) or "no draft"
        message = f"no worker of {model} can be told to stop drafting: {problems}"
        raise ConfigurationError(message)
    if any(worker["override"] for worker in serving):
        message = f"an override decides for {model}: end it with `appliance speculation auto` first"
        raise ConfigurationError(message)
    audit_size = (await gateway.get("status"))["audit"]["size"]
    told = await gateway.get("speculation/events")
    sequence = told["events"][-1]["sequence"] if told["events"] else 0
    return Start(model=model, sequence=sequence, audit_size=audit_size, now=told["now"])


class Drill:
    """
    One drill; `run` it once.

    Args:
        gateway: its admin API.
        traffic: what to send with, set to the prompts the draft is good at.
        noise: gives prompts no draft is good at.
        start: from `look`, just before.
        plan: limits.
        tell: told of each stage when it is reached.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        gateway: AdminApi,
        traffic: Traffic,
        noise: Callable[[], str],
        start: Start,
        plan: Plan,
        tell: Callable[[Stage, Timeline], None],
        clock: Callable[[], float],
    ) -> None:
        self._gateway = gateway
        self._traffic = traffic
        self._noise = noise
        self._start = start
        self._plan = plan
        self._tell = tell
        self._clock = clock
        self._ahead = start.now - clock()
        self._deadline = clock() + plan.total_seconds
        self._told: set[Stage] = set()
        self._changes: tuple[Change, ...] = ()
        self._found = Timeline(marks=Marks(began=start.now))
        self._warm_length: float | None = None
        self._drafts_before = 0
        self._drafts_to_fallback: int | None = None

    async def run(self) -> Findings:
        """
        Go through the stages, or as many as are reached in time.

        Raises:
            ConfigurationError: the gateway does not answer any more.
        """
        in_domain = self._traffic.prompt
        async with self._traffic.running() as tally:
            if await self._wait(self._is_warm, self._plan.warm_seconds):
                self._mark(warm=self._now())
                self._drafts_before = tally.drafts
                self._traffic.prompt = self._noise
                self._mark(noise=self._now())
                await self._wait(self._has_probed_in_vain, self._plan.collapse_seconds)
                self._traffic.prompt = in_domain
                self._mark(back=self._now())
                if self._found.probe_failed is not None:
                    await self._wait(self._has_recovered, self._plan.total_seconds)
        await self._observe()
        return Findings(
            timeline=self._found,
            changes=self._changes,
            drafts_to_fallback=self._drafts_to_fallback,
            warm_length=self._warm_length,
            tally=tally,
        )

    async def _wait(self, reached: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        """Look until something is reached; False when the time for it, or for all, is over."""
        until = min(self._deadline, self._clock() + seconds)
        while True:
            await self._observe()
            if await reached():
                return True
            if self._clock() >= until:
                return False
            await asyncio.sleep(self._plan.poll_seconds)

    async def _observe(self) -> None:
        after = self._changes[-1].sequence if self._changes else self._start.sequence
        told = await self._gateway.get(f"speculation/events?after={after}")
        self._changes += parse_changes(told["events"])
        self._found = timeline(self._changes, self._found.marks)
        if self._found.fallback is not None and self._drafts_to_fallback is None:
            self._drafts_to_fallback = self._traffic.tally.drafts - self._drafts_before
        for stage in Stage:
            if stage not in self._told and stage not in self._found.missing:
                self._told.add(stage)
                self._tell(stage, self._found)

    async def _is_warm(self) -> bool:
        if not self._traffic.tally.requests:
            return False
        for worker in (await self._gateway.get("speculation"))["workers"]:
            length = worker["acceptance_length"]
            is_drafting = worker["mode"] == SpeculationMode.SPECULATIVE and worker["controllable"]
            if self._start.model in worker["models"] and is_drafting and (length or 0.0) > WARM_LENGTH:
                self._warm_length = length
                return True
        return False

    async def _has_probed_in_vain(self) -> bool:
        return self._found.probe_failed is not None

    async def _has_recovered(self) -> bool:
        return self._found.recovered is not None

    def _mark(self, **marks: float) -> None:
        self._found = replace(self._found, marks=replace(self._found.marks, **marks))

    def _now(self) -> float:
        """The gateway's Unix time, by our clock since we last asked."""
        return self._clock() + self._ahead
