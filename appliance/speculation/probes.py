"""
Probes and sweeps: a few steps apart from the table, to learn what the table's own steps cannot tell.

A *probe* drafts while speculation is stopped, to see whether it would pay again.  A *sweep* tries
each number of draft tokens in turn while it is not, because costs can only be compared side by side.

Both take their steps from requests, so there is a budget: `probe_share` of all steps, of which
sweeps leave a quarter alone.  On top of it come one probe and the first sweeps of each batch bucket:
one, or a few where the machine is so busy that one told little.
"""

from dataclasses import replace
from types import MappingProxyType

from appliance.speculation.goodput import LEAST_STEPS, NO_COSTS, aged, learn
from appliance.speculation.state import Bucket, MonitorPolicy, Probe, Watch
from appliance.speculation.values import NO_STEPS, EngineReading, StepCounters

SWEEP_STEPS = 6
"""Steps of each number of draft tokens in either half of a sweep."""
SWEEPS_SHARE = 0.75
"""Of the budget, what sweeps may use: whoever stops should not have to save up for a probe first."""
PROBE_GROWTH = 3
"""How often an unclear probe is followed at once by one of twice its size."""
FREE_SWEEPS = 8
"""Sweeps of a batch bucket that do not count against the budget, as long as costs are hardly known."""
COSTS_LEARNT = 0.1
"""Spread of a cost from which on sweeps have to wait for the budget."""
COSTS_KNOWN = 0.2
"""Spread of a cost under which a probe need not measure it again."""


def sweep_when_due(watch: Watch, bucket: int, policy: MonitorPolicy, now: float) -> Watch:
    """Start to measure what each number of draft tokens costs at the batch size in use, if it is time."""
    entry = entry_of(watch, bucket)
    if now < entry.sweep_at or watch.window.drafts < policy.min_drafts or len(watch.choices) == 1:
        return watch
    half = tuple((k, SWEEP_STEPS) for k in watch.choices)
    # There and back, so that what drifts meanwhile falls on all alike.
    parts = (*half, *reversed(half))
    steps, is_free = sum(steps for _k, steps in parts), _is_free(watch, entry, now)
    if not is_free and watch.probed_steps + steps > _budget(watch, SWEEPS_SHARE * policy.probe_share):
        return watch
    wait = _until_next_sweep(watch, entry, policy, now)
    entry = replace(entry, sweeps=entry.sweeps + 1, sweep_at=now + wait)
    if is_free:
        watch = replace(watch, free_steps=watch.free_steps + steps)
    return _started(with_entry(watch, bucket, entry), parts, recovers=False)


def _is_free(watch: Watch, entry: Bucket, now: float) -> bool:
    """
    Whether a sweep is worth more than the budget allows.

    A slow worker saves up for a sweep for a minute, and would draft at a loss all that time if the first one
    was wrong.
    """
    is_learnt = aged(entry.costs, now).are_certain(watch.choices, COSTS_LEARNT)
    return not entry.sweeps or (not is_learnt and entry.sweeps < FREE_SWEEPS)


def _until_next_sweep(watch: Watch, entry: Bucket, policy: MonitorPolicy, now: float) -> float:
    """
    Seconds until costs are worth another sweep.

    Soon while they are not known to within the margin: a wrong number of draft tokens costs more
    than sweeps do.  Drafts shorter than the longest say nothing of the positions after them, so
    then the rhythm does not slow down either.
    """
    if not aged(entry.costs, now).are_certain(watch.choices, policy.margin):
        return policy.sweep_soonest_seconds
    if entry.draft_tokens < max(watch.choices):
        return policy.sweep_seconds
    return min(policy.sweep_longest_seconds, policy.sweep_seconds * 2.0 ** min(entry.sweeps, 30))


def probe_of(watch: Watch, bucket: int, policy: MonitorPolicy, now: float) -> Watch:
    """
    Start a probe, if the budget has room for it; the mode is left alone.

    The first is as small as can be, at the most draft tokens; after an unclear one the next is twice
    as large, if it may be, and tries every number: it may be their costs that are not known well.
    """
    batch = max(1, watch.last.batch if watch.last is not None else 1)
    ks = [k for k in reversed(watch.choices) if k] if watch.unclear else watch.choices[-1:]
    measures = watch.unclear or not aged(watch.costs(bucket), now).are_certain(ks, COSTS_KNOWN)
    budget = _budget(watch, policy.probe_share) + 1 + max(LEAST_STEPS, policy.probe_drafts)
    for doublings in range(watch.unclear, -1, -1):
        drafts = policy.probe_drafts * 2**doublings
        # The first step of each number still verifies what the one before drafted.
        steps = 1 + max(-(-drafts // (batch * len(ks))), LEAST_STEPS if measures else 0)
        if watch.probed_steps + steps * len(ks) <= budget:
            return _started(watch, tuple((k, steps) for k in ks), recovers=True)
    return watch


def _budget(watch: Watch, share: float) -> float:
    step_count = watch.last.step_count if watch.last is not None else 0
    return share * step_count + watch.free_steps


def _started(watch: Watch, parts: tuple[tuple[int, int], ...], *, recovers: bool) -> Watch:
    assert watch.last is not None  # noqa: S101 - set by `decide`
    probe = Probe(parts=parts, base=watch.last, recovers=recovers)
    steps = watch.probed_steps + probe.step_count
    return replace(watch, probe=probe, starts_probe=True, probed_steps=steps)


def learnt(watch: Watch, base: EngineReading, reading: EngineReading, now: float) -> Watch:
    """Take costs from all steps since a probe or sweep began."""
    spans: dict[int, dict[int, StepCounters]] = {}
    for (bucket, k), counters in reading.steps.items():
        spans.setdefault(bucket, {})[k] = counters.since(base.steps.get((bucket, k), NO_STEPS))
    for bucket, steps in spans.items():
        known = watch.buckets[bucket].costs if bucket in watch.buckets else NO_COSTS
        fresh = learn(known, steps, now)
        if fresh is not known:
            watch = with_entry(watch, bucket, replace(entry_of(watch, bucket), costs=fresh))
    return watch


def entry_of(watch: Watch, bucket: int) -> Bucket:
    """What is known of a batch bucket; of a new one, what it does as long as nothing is."""
    return watch.buckets.get(bucket) or Bucket(draft_tokens=watch.draft_tokens(bucket))


def with_entry(watch: Watch, bucket: int, entry: Bucket) -> Watch:
    """The watch with this known of a batch bucket."""
    return replace(watch, buckets=MappingProxyType({**watch.buckets, bucket: entry}))
