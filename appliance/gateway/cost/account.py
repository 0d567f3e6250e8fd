"""
One worker's account: what it was busy with between two looks at it, and whose requests that were.

The rule: the engine time between two looks is shared by time under way.  Of requests that were with the
worker meanwhile each weighs as many seconds as it was there.  Engine time measured while none was, such as
that of a canary or of somebody who calls the worker directly, belongs to nobody; a step that was only
counted after its requests had ended belongs to those.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.gateway.cost.apportion import apportion
from appliance.gateway.cost.presence import Presence
from appliance.gateway.cost.rows import WorkerTime
from appliance.gateway.cost.saving import Steps, added, compare, since
from appliance.speculation.goodput import NO_COSTS, Costs
from appliance.speculation.values import EngineReading

MICRO, MILLI = 1_000_000, 1000
LONGEST_BLIND_SECONDS = 60.0
"""Longer than this between two looks at engines that share no counters, nobody knows what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What the settings say a machine draws, in watts; None where they do not."""

    idle: float | None = None
    busy: float | None = None
    host: float = 0.0
    """Beside its GPUs, added to what these measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a look at a worker showed."""

    at: float
    """Clock reading."""
    reading: EngineReading
    """What the plugin said, if only that there is none."""
    requests: int = 0
    """Requests in the worker, running or waiting, whoever sent them."""
    costs: Mapping[int, Costs] | None = None
    """What is known of drafting, by batch bucket; None for a gateway that does not steer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What happened between two looks."""

    time: WorkerTime
    shares: Mapping[tuple[str, str], tuple[int, int]]
    """Engine microseconds and millijoules, by tenant and model."""
    unattributed_us: int
    """Of the engine time, what was nobody's, or of other gateways."""


class WorkerAccount:
    """Takes looks at one worker; owned by one event loop."""

    def __init__(self, power: Power) -> None:
        self.presence = Presence()
        self._power = power
        self._last: Sight | None = None
        self._others = 0
        self._late: dict[tuple[str, str], float] = {}
        """Who was there in the last interval with engine time for anybody, until some came late."""
        self._uncompared: Steps = {}

    def saw(self, sight: Sight, *, alone: bool) -> Interval | None:
        """
        Take in a look.

        Args:
            sight: what it showed.
            alone: whether no other gateway uses the workers, so that all requests in them are known here.

        Returns:
            What happened since the last look; None where that cannot be told.
        """
        weights, any_seconds = self.presence.take(sight.at)
        before, self._last = self._last, sight
        others_before, self._others = self._others, self._others_now(sight, alone=alone)
        if before is None:
            return None
        seconds = sight.at - before.at
        same = _epoch(before) == _epoch(sight) and _epoch(sight) != ""
        if not same:
            self._late, self._uncompared = {}, {}
            if seconds > LONGEST_BLIND_SECONDS:
                return None
        measured = _is_measured(sight) and (same or _is_measured(before))
        busy = _busy_us(sight) - (_busy_us(before) if same else 0) if measured else round(any_seconds * MICRO)
        time = WorkerTime(
            observed_us=round(seconds * MICRO),
            busy_us=busy,
            estimated_us=0 if measured else busy,
            gpu_us=busy * (sight.reading.energy.gpus if sight.reading.energy is not None else 0),
        )
        self._add_energy(time, before, sight)
        if measured:
            self._add_saving(time, before, sight, same=same)
        shares, left = self._share(
            weights, time, others=(others_before + self._others) / 2 * seconds if measured else 0.0
        )
        return Interval(time=time, shares=shares, unattributed_us=left)

    def is_left_since(self, time: float) -> bool:
        """Whether the worker was not seen after this clock reading, or ever, and has no request."""
        return (self._last is None or self._last.at < time) and not self.presence.count

    def _others_now(self, sight: Sight, *, alone: bool) -> int:
        """Requests of others in the worker: more than this gateway ever had there during the look."""
        return 0 if alone else max(0, sight.requests - self.presence.peak)

    def _share(
        self, weights: dict[tuple[str, str], float], time: WorkerTime, *, others: float
    ) -> tuple[dict[tuple[str, str], tuple[int, int]], int]:
        if not time.busy_us:
            self._late = weights or self._late
            return {}, 0
        # A step is counted when it ends, and its requests may have ended before.
        present = weights or self._late
        self._late = weights
        if not present:
            return {}, time.busy_us
        pool = [*present.values(), others]
        engine, joules = apportion(time.busy_us, pool), apportion(time.busy_millijoules, pool)
        shares = {who: (engine[place], joules[place]) for place, who in enumerate(present)}
        return shares, engine[-1]

    def _add_energy(self, time: WorkerTime, before: Sight, sight: Sight) -> None:
        """Measured by GPUs where they do, else by the settings; busy time has its part of it."""
        seconds, busy = time.observed_us / MICRO, time.busy_us / MICRO
        drawn = _millijoules(before, sight)
        if drawn is not None:
            time.metered_us = time.observed_us
            time.millijoules = drawn + round(self._power.host * seconds * MILLI)
            part = min(1.0, busy / seconds) if seconds > 0 else 0.0
            time.busy_millijoules = round(time.millijoules * part)
        elif self._power.busy is not None and self._power.idle is not None:
            time.busy_millijoules = round(self._power.busy * busy * MILLI)
            idle = round(self._power.idle * max(0.0, seconds - busy) * MILLI)
            time.millijoules = time.busy_millijoules + idle
        else:
            time.unknown_power_us = time.observed_us

    def _add_saving(self, time: WorkerTime, before: Sight, sight: Sight, *, same: bool) -> None:
        if sight.costs is None:
            # Whoever steers records it; what it knows by now must not be counted here as well, later on.
            self._uncompared = {}
            return
        known = sight.costs
        steps = since(sight.reading.steps, before.reading.steps if same else {})
        saving, self._uncompared = compare(
            added(self._uncompared, steps), lambda bucket: known.get(bucket, NO_COSTS)
        )
        time.draft_us = round(saving.seconds * MICRO)
        time.draft_tokens = saving.tokens
        time.target_only_us = round(saving.target_only * MICRO)
        time.target_only_low_us = round(saving.low * MICRO)
        time.target_only_high_us = round(saving.high * MICRO)


def _is_measured(sight: Sight) -> bool:
    return sight.reading.controllable and sight.reading.busy_seconds is not None


def _epoch(sight: Sight) -> str:
    return sight.reading.epoch if _is_measured(sight) else ""


def _busy_us(sight: Sight) -> int:
    """All engine time of this engine: rounding the sum loses nothing from one look to the next."""
    return round((sight.reading.busy_seconds or 0.0) * MICRO)


def _millijoules(before: Sight, sight: Sight) -> int | None:
    """What GPUs took; None where none says, or where the driver was loaded anew."""
    first, last = before.reading.energy, sight.reading.energy
    if first is None or last is None or last.millijoules < first.millijoules:
        return None
    return last.millijoules - first.millijoules
