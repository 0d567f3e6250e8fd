"""
A worker whose engine is arithmetic: the monitor's readings of hours of traffic, in milliseconds.

Steps are drawn a block at a time: the sum of a block has the right mean and spread.  Neighbours correlate,
in time and in acceptance, as in a real engine.  The rules of the plugin
(`appliance.serving.vllm.scheduler_control`) hold: a probe ends after its number of steps, only whole decode
steps are measured, and long stalls are not.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import cycle, islice
from statistics import fmean
from types import MappingProxyType
from typing import Any

from appliance.monitor import decide
from appliance.speculation.state import MonitorPolicy, MonitorState
from appliance.speculation.values import (
    SETTLE_SECONDS,
    Decision,
    DraftTokenTable,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    StepCounters,
    bucket_of,
    draft_tokens_at,
)

ALIKE = 2
"""Neighbouring steps or drafts that are worth one independent one."""
STRIDE = 7
"""From the answer that one seat begins with to that of the next."""
STALL = 10.0
"""The plugin does not measure steps longer than this many times the mean."""

Acceptance = tuple[float, ...]
"""For each position, the chance of a draft token whose predecessors were accepted."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Accepted tokens of each draft of real answers, a digit each (`benchmarks.speculation.record`)."""

    answers: tuple[str, ...]

    def drafts(self, seat: int) -> Iterator[int]:
        """Without an end; the request in each seat begins with another answer."""
        first = seat * STRIDE % len(self.answers)
        return map(int, cycle("".join(self.answers[first:] + self.answers[:first])))


Text = Acceptance | Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    seconds: Callable[[int, int], float]
    """Mean seconds of a step, by batch size and draft tokens."""
    choices: tuple[int, ...] = (0, 1, 2, 3)
    largest_batch: int = 64
    noise: float = 0.05
    """Standard deviation of a step's seconds, relative to their mean."""
    stalls: tuple[tuple[float, float], ...] = ()
    """Share of steps that take longer, and how many times as long."""
    prompts: float = 0.0
    """Share of steps that also process a prompt, which are not measured."""
    catch_up: float = 0.0
    """Seconds that the first step with drafts takes longer after a second without, and in proportion."""
    wander: float = 0.0
    """Amplitude of the machine's speed over minutes."""
    busy: tuple[tuple[float, float, float], ...] = ()
    """When other work slows the machine down: from, until, and how many times."""

    def mean_seconds(self, batch: int, k: int, now: float) -> float:
        """Mean seconds of a step, stalls included."""
        stalls = sum(share * (times - 1.0) for share, times in self.stalls)
        return self.seconds(batch, k) * self.speed(now) * (1.0 + stalls)

    def speed(self, now: float) -> float:
        """Factor on all seconds at this time."""
        slower = math.prod(times for start, end, times in self.busy if start <= now < end)
        return slower * (1.0 + self.wander * (math.sin(now / 7.0) + math.sin(now / 41.0)) / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The engine's load by time."""

    acceptance: Callable[[float], Text]
    batch: Callable[[float], int] = lambda _now: 1
    grain: float = 0.5
    """Seconds over which it is constant."""
    outages: tuple[tuple[float, float], ...] = ()
    """When the worker is down, from and until; it comes back as another engine."""

    def is_away(self, now: float) -> bool:
        return any(start <= now < end for start, end in self.outages)


@lru_cache(maxsize=2**12)
def length_of(text: Text, k: int) -> float:
    """Mean tokens of a step with K draft tokens; fewer than were recorded are accepted as far as those."""
    if isinstance(text, Recorded):
        return 1.0 + fmean(min(k, int(accepted)) for answer in text.answers for accepted in answer)
    length, chance = 1.0, 1.0
    for rate in text[:k]:
        chance *= rate
        length += chance
    return length


def fixed_tokens(engine: Engine, traffic: Traffic, k: int, until: float) -> float:
    """Tokens that the same K throughout would give, on average."""
    total, now, step = 0.0, 0.0, traffic.grain
    while now < until:
        batch = 0 if traffic.is_away(now) else traffic.batch(now)
        if batch:
            length = length_of(traffic.acceptance(now), k)
            total += step * batch * length / engine.mean_seconds(batch, k, now)
        now += step
    return total


@dataclass(slots=True)
class _Cell:
    steps: int = 0
    seconds: float = 0.0
    seconds_squared: float = 0.0
    requests: int = 0
    tokens: int = 0


class SimulatedWorker:
    """An engine with its plugin, under traffic."""

    def __init__(self, engine: Engine, traffic: Traffic, *, seed: int = 1) -> None:
        self.engine = engine
        self.traffic = traffic
        self.now = 0.0
        self.tokens = 0
        self.drafts_made = 0
        """Since the first start, over all restarts."""
        self._random = random.Random(seed)
        self._seats: dict[tuple[Recorded, int], Iterator[int]] = {}
        self._starts = 0
        self.restart()

    def restart(self) -> None:
        positions = max(self.engine.choices)
        self._starts += 1
        self._table: DraftTokenTable = ((1, self.engine.largest_batch, positions),)
        self._mode: SpeculationMode | None = None
        self._reason: Reason | None = None
        self._probe: list[list[int]] = []
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._steps = self._batch = self._drafts = self._draft_tokens = 0
        self._drafted_at, self._accepted_at = [0] * positions, [0] * positions
        self._verifies = 0
        self._changed_at = self._drafted_until = -1.0
        self._busy = self._caught_up = 0.0

    def steer(
        self,
        table: DraftTokenTable,
        mode: SpeculationMode,
        reason: Reason,
        probe: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Take a command, as the plugin does."""
        self._table, self._mode, self._reason = table, mode, reason
        self._probe = [list(part) for part in probe]

    def apply(self, decision: Decision, reading: EngineReading) -> None:
        """Send the decision unless the worker follows it, as `ControlLoop` does."""
        is_followed = (reading.table, reading.mode) == (decision.table, decision.mode)
        if decision.starts_probe or (not is_followed and not decision.probe):
            self.steer(decision.table, decision.mode, decision.basis, decision.probe)

    def run_until(self, until: float) -> None:
        """Let the engine work; a step in flight is finished."""
        while self.now < until:
            if self.traffic.is_away(self.now):
                back = max(end for start, end in self.traffic.outages if start <= self.now < end)
                if back > until:
                    return
                self.now = back
                self.restart()
                continue
            batch = self.traffic.batch(self.now)
            if not batch:
                self._batch, self.now = 0, min(until, self.now + self.traffic.grain)
                continue
            self._work(batch, min(until, self.now + self.traffic.grain) - self.now)

    def _work(self, batch: int, seconds: float) -> None:
        k = self._probe[0][0] if self._probe else draft_tokens_at(self._table, batch)
        expected = self.engine.mean_seconds(batch, k, self.now)
        is_whole = self._verifies == k
        steps = max(1, math.ceil(seconds / expected)) if is_whole else 1
        unsettled = math.ceil((self._changed_at + SETTLE_SECONDS - self.now) / expected) - 1
        if is_whole and unsettled > 0:
            steps = min(steps, unsettled)
        if self._probe:
            steps = min(steps, self._probe[0][1])
        prompts = self._binomial(steps, self.engine.prompts) if is_whole and unsettled <= 0 else steps
        if k and not self._verifies:
            seconds = self.engine.catch_up * min(1.0, self.now - self._drafted_until)
            self._caught_up += seconds + expected - self.engine.mean_seconds(batch, 0, self.now)
            self._busy += seconds
            self.now += seconds
        for count, measured in ((steps - prompts, True), (prompts, False)):
            if count:
                self._block(batch, k, count, measured=measured)
        self._steps += steps
        self._changed_at = self._changed_at if is_whole else self.now
        self._batch, self._verifies = batch, k
        self._drafted_until = self.now if k else self._drafted_until
        if self._probe:
            self._probe[0][1] -= steps
            if self._probe[0][1] <= 0:
                self._probe.pop(0)

    def _block(self, batch: int, k: int, steps: int, *, measured: bool) -> None:
        engine, draw = self.engine, self._random
        mean = engine.seconds(batch, k) * engine.speed(self.now)
        wobble = engine.noise * draw.gauss(0, 1) * math.sqrt(ALIKE / steps)
        seconds = mean * steps * max(0.2, 1.0 + wobble)
        squared = seconds**2 / steps + steps * (mean * engine.noise) ** 2
        counted, counted_steps = seconds, steps
        for share, times in engine.stalls:
            stalled = self._binomial(steps, share)
            seconds += stalled * (times - 1.0) * mean
            if times < STALL:
                counted += stalled * (times - 1.0) * mean
                squared += stalled * (times * times - 1.0) * mean**2
            else:
                counted -= stalled * mean
                counted_steps -= stalled
        tokens = steps * batch + self._draft(batch, steps, self._verifies)
        self.now += seconds
        self._busy += seconds
        self.tokens += tokens
        if measured and counted_steps > 0:
            cell = self._cells.setdefault((bucket_of(batch), k), _Cell())
            cell.steps += counted_steps
            cell.seconds += counted
            cell.seconds_squared += squared
            cell.requests += counted_steps * batch
            cell.tokens += tokens * counted_steps // steps

    def _draft(self, batch: int, steps: int, k: int) -> int:
        """Verify and count the drafts of these steps; returns the accepted tokens."""
        if not k:
            return 0
        drafts, text = batch * steps, self.traffic.acceptance(self.now)
        self.drafts_made += drafts
        self._drafts += drafts
        self._draft_tokens += drafts * k
        reached = (
            self._replayed(text, batch, steps) if isinstance(text, Recorded) else self._drawn(text, drafts)
        )
        accepted = list(islice(reached, k))
        for position, tokens in enumerate(accepted):
            self._drafted_at[position] += drafts
            self._accepted_at[position] += tokens
        return sum(accepted)

    def _drawn(self, text: Acceptance, drafts: int) -> Iterator[int]:
        """Drafts of which each position was accepted."""
        for rate in text:
            pairs, odd = divmod(drafts, ALIKE)
            drafts = ALIKE * self._binomial(pairs, rate) + self._binomial(odd, rate)
            yield drafts

    def _replayed(self, text: Recorded, batch: int, steps: int) -> Iterator[int]:
        for seat in range(batch):
            if (text, seat) not in self._seats:
                self._seats[text, seat] = text.drafts(seat)
        drafts = [accepted for seat in range(batch) for accepted in islice(self._seats[text, seat], steps)]
        positions = range(1, len(self._accepted_at) + 1)
        return (sum(accepted >= position for accepted in drafts) for position in positions)

    def _binomial(self, trials: int, chance: float) -> int:
        if chance <= 0.0 or not trials:
            return 0
        if chance >= 1.0:
            return trials
        spread = trials * chance * (1.0 - chance)
        if spread > 16.0:
            drawn = self._random.gauss(trials * chance, math.sqrt(spread))
            return min(trials, max(0, round(drawn)))
        if chance > 0.5:
            return trials - self._binomial(trials, 1.0 - chance)
        # Failures between two successes are geometric: one draw for each success.
        successes, at, scale = 0, 0, math.log1p(-chance)
        while True:
            at += 1 + int(math.log(1.0 - self._random.random()) / scale)
            if at > trials:
                return successes
            successes += 1

    def reading(self) -> EngineReading | None:
        """The answer to a poll; None while the worker is down."""
        if self.traffic.is_away(self.now):
            return None
        steps = {
            kind: StepCounters(
                steps=cell.steps,
                seconds=cell.seconds,
                seconds_squared=cell.seconds_squared,
                requests=cell.requests,
                tokens=cell.tokens,
            )
            for kind, cell in self._cells.items()
        }
        return EngineReading(
            controllable=True,
            epoch=f"start {self._starts}",
            largest_batch=self.engine.largest_batch,
            choices=self.engine.choices,
            table=self._table,
            mode=self._mode,
            reason=self._reason,
            is_probing=bool(self._probe),
            batch=self._batch,
            step_count=self._steps,
            steps=MappingProxyType(steps),
            busy_seconds=self._busy,
            catch_up_seconds=self._caught_up,
            drafting=SpecDecodeCounters(
                drafts=self._drafts,
                draft_tokens=self._draft_tokens,
                accepted_tokens=sum(self._accepted_at),
                accepted_per_position=tuple(self._accepted_at),
                drafted_per_position=tuple(self._drafted_at),
            ),
        )

    def answer(self) -> dict[str, Any]:
        """The same as the plugin's JSON."""
        reading = self.reading()
        assert reading is not None
        drafting = reading.drafting
        return {
            "controllable": True,
            "problems": [],
            "missing_capabilities": {},
            "engine": "simulated",
            "epoch": reading.epoch,
            "largest_batch": reading.largest_batch,
            "choices": list(reading.choices),
            "table": [list(span) for span in reading.table],
            "mode": reading.mode,
            "reason": reading.reason,
            "is_probing": reading.is_probing,
            "batch": reading.batch,
            "step_count": reading.step_count,
            "busy_seconds": reading.busy_seconds,
            "catch_up_seconds": reading.catch_up_seconds,
            "steps": [
                {"batch": bucket, "draft_tokens": k, **asdict(cell)}
                for (bucket, k), cell in reading.steps.items()
            ],
            "drafting": {
                "drafts": drafting.drafts,
                "draft_tokens": drafting.draft_tokens,
                "accepted_tokens": drafting.accepted_tokens,
                "drafted_per_position": list(drafting.drafted_per_position),
                "accepted_per_position": list(drafting.accepted_per_position),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """One tick of a controlled run."""

    at: float
    state: MonitorState
    tokens: int
    drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    polls: tuple[Poll, ...] = field(repr=False)
    tokens: int
    steps: int
    state: MonitorState

    @property
    def changes(self) -> list[Poll]:
        """The polls at which mode or table changed, without the first."""
        return [
            poll
            for before, poll in zip(self.polls, self.polls[1:], strict=False)
            if (before.state.mode, before.state.table) != (poll.state.mode, poll.state.table)
        ]

    @property
    def flips(self) -> int:
        """How often drafting stopped or started at any batch size."""
        return sum(
            _drafts_at(before.state) != _drafts_at(poll.state)
            for before, poll in zip(self.polls, self.polls[1:], strict=False)
        )

    def first(self, condition: Callable[[MonitorState], bool], *, after: float = 0.0) -> Poll | None:
        """The first poll after a time whose state satisfies the condition."""
        return next((poll for poll in self.polls if poll.at > after and condition(poll.state)), None)


def _drafts_at(state: MonitorState) -> tuple[bool, ...]:
    return tuple(state.draft_tokens(bucket) > 0 for bucket in (1, 2, 4, 8, 16, 32, 64))


def polls(
    worker: SimulatedWorker, policy: MonitorPolicy, until: float, *, tick: float = 1.0
) -> Iterator[Poll]:
    """Control a worker as `appliance.control.loop` does, and yield every poll."""
    state, count = MonitorState(mode=SpeculationMode.SPECULATIVE), 0
    while (count := count + 1) * tick <= until:
        worker.run_until(count * tick)
        reading = worker.reading()
        state, decision = decide(state, reading, policy, count * tick)
        if reading is not None:
            worker.apply(decision, reading)
        yield Poll(at=count * tick, state=state, tokens=worker.tokens, drafts=worker.drafts_made)


def controlled(
    engine: Engine,
    traffic: Traffic,
    policy: MonitorPolicy,
    until: float,
    *,
    tick: float = 1.0,
    seed: int = 1,
) -> Run:
    worker = SimulatedWorker(engine, traffic, seed=seed)
    shown = tuple(polls(worker, policy, until, tick=tick))
    reading = worker.reading()
    return Run(
        polls=shown,
        tokens=worker.tokens,
        steps=reading.step_count if reading is not None else 0,
        state=shown[-1].state,
    )
