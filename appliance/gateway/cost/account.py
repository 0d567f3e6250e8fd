"""
Attributes a worker's engine time and energy between two polls to tenants.

The rule: engine time is divided by request-seconds.  Each request in the worker meanwhile weighs as many
seconds as it was there.  Engine time measured without any request, such as that of a canary or a direct
caller, is unattributed; a step that was counted only after its requests had ended belongs to those requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.gateway.cost.presence import Presence
from appliance.gateway.cost.rows import WorkerTime
from appliance.gateway.cost.saving import Steps, added, compare, since
from appliance.speculation.goodput import Estimate
from appliance.speculation.values import EngineReading

MICRO, MILLI = 1_000_000, 1000
LONGEST_BLIND_SECONDS = 60.0  # between polls of different processes; beyond it, no interval is recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """From the settings, in watts; None if not set."""

    idle: float | None = None
    busy: float | None = None
    host: float = 0.0  # without its GPUs, added to what these measure


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    at: float  # monotonic time
    reading: EngineReading  # it may say that there is no plugin
    requests: int = 0  # running or waiting, of all clients
    # log S(K)/S(0) by batch bucket and K; None if another gateway controls the workers
    costs: Mapping[tuple[int, int], Estimate] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What was recorded between two polls."""

    time: WorkerTime
    shares: Mapping[tuple[str, str], tuple[int, int]]  # microseconds and millijoules, by tenant and model
    unattributed_us: int  # without a request, or of other gateways' requests


class WorkerAccount:
    """Owned by one event loop."""

    def __init__(self, power: Power) -> None:
        self.presence = Presence()
        self._power = power
        self._last: WorkerSample | None = None
        self._others = 0
        self._late: dict[tuple[str, str], float] = {}  # request-seconds of the previous interval
        self._uncompared: Steps = {}
        self._overlap = 0.0  # engine seconds beyond those of the interval that counted them

    def observe(self, sample: WorkerSample, *, alone: bool) -> Interval | None:
        """
        The interval since the last poll; None if it cannot be determined.

        `alone`: no other gateway uses the workers, so that this one knows all their requests.
        """
        weights, any_seconds = self.presence.take(sample.at)
        before, self._last = self._last, sample
        others_before, self._others = self._others, self._others_now(sample, alone=alone)
        if before is None:
            return None
        seconds = sample.at - before.at
        same = _epoch(before) == _epoch(sample) and _epoch(sample) != ""
        if not same:
            self._late, self._uncompared, self._overlap = {}, {}, 0.0
            if seconds > LONGEST_BLIND_SECONDS:
                return None
        measured = _is_measured(sample) and (same or _is_measured(before))
        busy = (
            _busy_us(sample) - (_busy_us(before) if same else 0) if measured else round(any_seconds * MICRO)
        )
        time = WorkerTime(
            observed_us=round(seconds * MICRO),
            busy_us=busy,
            estimated_us=0 if measured else busy,
            gpu_us=busy * (sample.reading.energy.gpus if sample.reading.energy is not None else 0),
        )
        self._add_energy(time, before, sample)
        if measured:
            self._add_saving(time, before, sample, same=same)
        shares, left = self._share(
            weights, time, others=(others_before + self._others) / 2 * seconds if measured else 0.0
        )
        return Interval(time=time, shares=shares, unattributed_us=left)

    def is_left_since(self, time: float) -> bool:
        return (self._last is None or self._last.at < time) and not self.presence.count

    def _others_now(self, sample: WorkerSample, *, alone: bool) -> int:
        """Those beyond this gateway's maximum during the poll."""
        return 0 if alone else max(0, sample.requests - self.presence.peak)

    def _share(
        self, weights: dict[tuple[str, str], float], time: WorkerTime, *, others: float
    ) -> tuple[dict[tuple[str, str], tuple[int, int]], int]:
        if not time.busy_us:
            self._late = weights or self._late
            return {}, 0
        # A step is counted when it ends; its requests may have ended before.
        present = weights or self._late
        self._late = weights
        if not present:
            return {}, time.busy_us
        pool = [*present.values(), others]
        engine, joules = apportion(time.busy_us, pool), apportion(time.busy_millijoules, pool)
        shares = {who: (engine[place], joules[place]) for place, who in enumerate(present)}
        return shares, engine[-1]

    def _add_energy(self, time: WorkerTime, before: WorkerSample, sample: WorkerSample) -> None:
        """Measured by GPUs if possible, else from the settings; busy time gets its part of it."""
        seconds, busy = time.observed_us / MICRO, time.busy_us / MICRO
        drawn = _millijoules(before, sample)
        if drawn is not None:
            time.metered_us = time.observed_us
            time.millijoules = drawn + round(self._power.host * seconds * MILLI)
            part = min(1.0, busy / seconds) if seconds > 0 else 0.0
            time.busy_millijoules = round(time.millijoules * part)
        elif self._power.busy is not None and self._power.idle is not None:
            time.busy_millijoules = round(self._power.busy * busy * MILLI)
            # Steps are counted when they end, so an interval may have more engine time than seconds: what was
            # idle too much before is idle too little afterwards.
            idle = seconds - busy - self._overlap
            self._overlap = max(0.0, -idle)
            time.millijoules = time.busy_millijoules + round(self._power.idle * max(0.0, idle) * MILLI)
        else:
            time.unknown_power_us = time.observed_us

    def _add_saving(
        self, time: WorkerTime, before: WorkerSample, sample: WorkerSample, *, same: bool
    ) -> None:
        if sample.costs is None:
            # The controlling gateway records it; these steps must not be counted here later.
            self._uncompared = {}
            return
        steps = since(sample.reading.steps, before.reading.steps if same else {})
        saving, self._uncompared = compare(added(self._uncompared, steps), sample.costs)
        time.draft_us = round(saving.seconds * MICRO)
        time.draft_tokens = saving.tokens
        time.target_only_us = round(saving.target_only * MICRO)
        time.target_only_low_us = round(saving.low * MICRO)
        time.target_only_high_us = round(saving.high * MICRO)


def _is_measured(sample: WorkerSample) -> bool:
    return sample.reading.controllable and sample.reading.busy_seconds is not None


def _epoch(sample: WorkerSample) -> str:
    return sample.reading.epoch if _is_measured(sample) else ""


def _busy_us(sample: WorkerSample) -> int:
    """Total engine time: rounding the sum loses nothing between polls."""
    return round((sample.reading.busy_seconds or 0.0) * MICRO)


def _millijoules(before: WorkerSample, sample: WorkerSample) -> int | None:
    """Measured by GPUs; None if not measured, or if the driver was reloaded."""
    first, last = before.reading.energy, sample.reading.energy
    if first is None or last is None or last.millijoules < first.millijoules:
        return None
    return last.millijoules - first.millijoules


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """
    Divide `total`, 0 or more, in proportion to finite weights of at least 0, of which one is positive.

    The parts add up to it exactly; each is less than one unit from its exact share, and weight 0 gets
    nothing.
    """
    whole = math.fsum(weights)
    last = max(place for place, weight in enumerate(weights) if weight > 0)
    parts, given, weight_so_far = [], 0, 0.0
    for place, weight in enumerate(weights):
        weight_so_far += weight
        if weight > 0:
            edge = total if place == last else max(given, min(total, int(total * (weight_so_far / whole))))
        else:
            edge = given
        parts.append(edge - given)
        given = edge
    return parts
