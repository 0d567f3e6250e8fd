"""
Rank endpoints by the tokens per second that one more request would get (pure).

    readings ─► learn: speeds by (batch bucket, draft tokens) ─► expected speed at load + 1 ─► rank

The plugin measures each kind of step in place, so the break-even needs no estimate: past it, the table in
force gives fewer draft tokens or none, and the speed measured with them counts.  A worker in fallback is as
slow as it was measured without drafts; where nothing tells two apart, one that drafts comes first.

An endpoint without measurements takes those of the others, or it would never be used and never measured.
Without any measurement the least loaded comes first.  Fails open: if no endpoint is ready, all that are
listed take turns.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from appliance.serving.router import TARGET_ONLY_PENALTY, score
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import (
    NO_STEPS,
    EngineReading,
    SpeculationMode,
    draft_tokens_at,
)

LEAST_STEPS = 4
"""Minimum steps of a first measurement."""
HALF_LIFE_STEPS = 200
"""Steps after which an earlier measurement weighs half: some seconds of decoding."""
FRESH_SECONDS = 600.0
"""A speed that was last measured longer ago is unknown: texts, contexts and machine change."""
ALIKE = math.log(1.05)
"""Speeds within 5 % count as equal; load decides between them."""
CROWDING = 0.25
"""Guess beyond the largest batch measured: with twice the requests each gets 2^-0.25 of the speed."""
FULL_CACHE = 0.95
"""Share of the KV cache from which a worker takes no further request into its batch."""

Cell = tuple[int, int]
"""Batch bucket and draft tokens, as in `EngineReading.steps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    tokens_per_second: float
    """Of each request in the batch."""
    measured_at: float
    """Monotonic seconds."""


Speeds = Mapping[Cell, Speed]
NO_SPEEDS: Speeds = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    snapshot: WorkerSnapshot
    picked: int = 0
    """Requests sent to it that its metrics page does not count yet."""
    last_picked: int = 0
    """Number of the latest request sent to it; 0 before the first."""
    speeds: Speeds = field(default_factory=lambda: NO_SPEEDS)

    @property
    def worker_id(self) -> WorkerId:
        return self.snapshot.worker.worker_id

    @property
    def load(self) -> int:
        metrics = self.snapshot.metrics
        return self.picked + (metrics.running + metrics.waiting if metrics is not None else 0)

    @property
    def batch(self) -> int:
        """The batch that one more request would be decoded in."""
        metrics, reading = self.snapshot.metrics, self.snapshot.reading
        capacity = reading.largest_batch if reading is not None and reading.table else self.load + 1
        if metrics is not None and (metrics.waiting or metrics.kv_cache_usage >= FULL_CACHE):
            capacity = max(1, metrics.running)
        return min(self.load + 1, capacity)

    @property
    def draft_tokens(self) -> int | None:
        """What the table in force gives that batch; None without a table."""
        reading = self.snapshot.reading
        return draft_tokens_at(reading.table, self.batch) if reading is not None and reading.table else None

    @property
    def is_in_fallback(self) -> bool:
        """Whether one more request would be decoded without drafts."""
        reading = self.snapshot.reading
        mode = reading.mode if reading is not None else None
        if mode not in {None, SpeculationMode.SPECULATIVE} or not self.snapshot.speculates:
            return True
        return self.draft_tokens == 0


def learn(speeds: Speeds, before: EngineReading | None, after: EngineReading | None, now: float) -> Speeds:
    """The speeds after another reading of the same worker; those of an engine that ended are forgotten."""
    if after is None or not after.epoch:
        return speeds
    same = before is not None and before.epoch == after.epoch
    known = dict(speeds) if same else {}
    for cell, counters in after.steps.items():
        taken = counters.since(before.steps.get(cell, NO_STEPS)) if same and before is not None else counters
        if min(taken.steps, taken.seconds, taken.requests, taken.tokens) <= 0:
            continue
        speed = taken.tokens / taken.requests * taken.steps / taken.seconds
        if (former := known.get(cell)) is not None:
            weight = 1.0 - 0.5 ** (taken.steps / HALF_LIFE_STEPS)
            speed = former.tokens_per_second + weight * (speed - former.tokens_per_second)
        elif taken.steps < LEAST_STEPS:
            continue
        known[cell] = Speed(tokens_per_second=speed, measured_at=now)
    return MappingProxyType(known)


def rank(endpoints: Iterable[Endpoint], now: float, *, model: str = "") -> tuple[Endpoint, ...]:
    """
    The endpoints that a request may go to, best first; empty only if there is none.

    `model` is the name that the request asks for, if it is known.
    """
    listed = list(endpoints)
    ready = [each for each in listed if each.snapshot.takes_requests]
    if not ready:
        return tuple(sorted(listed, key=lambda each: (each.last_picked, each.worker_id)))
    able = [each for each in ready if each.snapshot.serves(model)] or ready
    expected = expected_speeds(able, now)
    return tuple(sorted(able, key=lambda each: _order(each, expected.get(each.worker_id))))


def expected_speeds(endpoints: Iterable[Endpoint], now: float) -> dict[WorkerId, float]:
    """Tokens per second that one more request would get; empty if nothing was measured anywhere."""
    able = list(endpoints)
    fresh = {each.worker_id: _fresh(each.speeds, now) for each in able}
    everywhere = _mean(fresh.values())
    found = {}
    for each in able:
        own, batch, k = fresh[each.worker_id], each.batch, each.draft_tokens
        # Without drafts it is slower than what was measured with them: as if it had more requests.
        crowd = batch + round(TARGET_ONLY_PENALTY) if each.is_in_fallback else batch
        speed = _at(batch, _with(k, own)) or _at(batch, _with(k, everywhere)) or _at(crowd, everywhere)
        if speed is not None:
            # What does not fit into the batch waits, so that all together get what the batch gives.
            found[each.worker_id] = speed * batch / (each.load + 1)
    return found


def _order(endpoint: Endpoint, speed: float | None) -> tuple[float, bool, float, str]:
    load, worker_id = score(endpoint.snapshot, {endpoint.worker_id: endpoint.load})
    if endpoint.is_in_fallback and endpoint.snapshot.speculates:
        load += TARGET_ONLY_PENALTY
    if speed is None:  # and so that of every other endpoint
        return 0.0, False, load, worker_id
    return -math.floor(math.log(speed) / ALIKE), endpoint.is_in_fallback, load, worker_id


def _fresh(speeds: Speeds, now: float) -> dict[Cell, float]:
    return {
        cell: speed.tokens_per_second
        for cell, speed in speeds.items()
        if now - speed.measured_at <= FRESH_SECONDS
    }


def _mean(each: Iterable[Mapping[Cell, float]]) -> dict[Cell, float]:
    found: defaultdict[Cell, list[float]] = defaultdict(list)
    for speeds in each:
        for cell, speed in speeds.items():
            found[cell].append(speed)
    return {cell: sum(speeds) / len(speeds) for cell, speeds in found.items()}


def _with(draft_tokens: int | None, speeds: Mapping[Cell, float]) -> dict[Cell, float]:
    return {cell: speed for cell, speed in speeds.items() if cell[1] == draft_tokens}


def _at(batch: int, speeds: Mapping[Cell, float]) -> float | None:
    """
    The speed at a batch size, between the batch buckets measured; None without any.

    Where a bucket was measured with several numbers of draft tokens, the lowest counts.
    """
    points: dict[int, float] = {}
    for (bucket, _draft_tokens), speed in speeds.items():
        points[bucket] = min(speed, points.get(bucket, speed))
    below = max((bucket for bucket in points if bucket <= batch), default=None)
    above = min((bucket for bucket in points if bucket >= batch), default=None)
    if below is None:
        return points[above] if above is not None else None
    if above is None:
        return points[below] * math.pow(below / batch, CROWDING)
    if above == below:
        return points[below]
    share = math.log(batch / below) / math.log(above / below)
    return points[below] + share * (points[above] - points[below])
