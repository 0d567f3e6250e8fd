"""
Probes and sweeps: a few steps outside the table, to measure what the table's own steps cannot show.

A *probe* drafts while speculation is stopped, to measure whether it would pay again.  A *sweep* tries each
number of draft tokens in turn while it is not, because costs can only be compared close together in time.

Both take their steps from requests, so there is a budget: `probe_share` of all steps; sweeps may use three
quarters of it.  One probe and the first sweeps of each batch bucket are free: one sweep, or a few on a
machine so busy that one is inconclusive.
"""

from dataclasses import replace
from types import MappingProxyType

from appliance.speculation.goodput import LEAST_STEPS, NO_COSTS, aged, update_costs
from appliance.speculation.state import Bucket, MonitorPolicy, MonitorState, Probe
from appliance.speculation.values import NO_STEPS, EngineReading, StepCounters

SWEEP_STEPS = 6
"""Steps of each number of draft tokens in either half of a sweep."""
SWEEPS_SHARE = 0.75
"""Share of the budget for sweeps, so that a probe need not wait for budget after a stop."""
PROBE_GROWTH = 3
"""Maximum unclear probes that are followed at once by one of twice the size."""
FREE_SWEEPS = 8
"""Maximum free sweeps of a batch bucket, until its costs are roughly known."""
COSTS_ROUGHLY_KNOWN = 0.1
"""Standard deviation of a cost under which sweeps wait for budget."""
COSTS_KNOWN = 0.2
"""Standard deviation of a cost under which a probe need not measure it again."""


def start_sweep_if_due(state: MonitorState, bucket: int, policy: MonitorPolicy, now: float) -> MonitorState:
    """Start to measure the cost of each number of draft tokens at the batch size in use, if it is due."""
    entry = bucket_entry(state, bucket)
    if now < entry.sweep_at or state.window.drafts < policy.min_drafts or len(state.choices) == 1:
        return state
    half = tuple((k, SWEEP_STEPS) for k in state.choices)
    # Forward and backward, so that drift during the sweep affects all alike.
    parts = (*half, *reversed(half))
    steps, is_free = sum(steps for _k, steps in parts), _is_free(state, entry, now)
    if not is_free and state.probed_steps + steps > _budget(state, SWEEPS_SHARE * policy.probe_share):
        return state
    wait = _until_next_sweep(state, entry, policy, now)
    entry = replace(entry, sweeps=entry.sweeps + 1, sweep_at=now + wait)
    if is_free:
        state = replace(state, free_steps=state.free_steps + steps)
    return _started(with_bucket_entry(state, bucket, entry), parts, recovers=False)


def _is_free(state: MonitorState, entry: Bucket, now: float) -> bool:
    """
    Whether a sweep does not count against the budget.

    A slow worker accumulates the budget of a sweep in a minute, and would draft at a loss until then if the
    first one was wrong.
    """
    is_known = aged(entry.costs, now).are_certain(state.choices, COSTS_ROUGHLY_KNOWN)
    return not entry.sweeps or (not is_known and entry.sweeps < FREE_SWEEPS)


def _until_next_sweep(state: MonitorState, entry: Bucket, policy: MonitorPolicy, now: float) -> float:
    """
    Seconds until the next sweep.

    Soon while costs are not known to within the margin: a wrong number of draft tokens costs more than
    sweeps.  Drafts shorter than the longest give no evidence of the later positions, so the interval does
    not grow then either.
    """
    if not aged(entry.costs, now).are_certain(state.choices, policy.margin):
        return policy.sweep_soonest_seconds
    if entry.draft_tokens < max(state.choices):
        return policy.sweep_seconds
    return min(policy.sweep_longest_seconds, policy.sweep_seconds * 2.0 ** min(entry.sweeps, 30))


def start_probe(state: MonitorState, bucket: int, policy: MonitorPolicy, now: float) -> MonitorState:
    """
    Start a probe, if the budget allows it; the mode does not change.

    The first has the minimum size, at the maximum of draft tokens.  After an unclear one the next is twice
    as large, if the budget allows, and tries every number: their costs may not be known well.
    """
    batch = max(1, state.last.batch if state.last is not None else 1)
    ks = [k for k in reversed(state.choices) if k] if state.unclear else state.choices[-1:]
    measures = state.unclear or not aged(state.costs(bucket), now).are_certain(ks, COSTS_KNOWN)
    budget = _budget(state, policy.probe_share) + 1 + max(LEAST_STEPS, policy.probe_drafts)
    for doublings in range(state.unclear, -1, -1):
        drafts = policy.probe_drafts * 2**doublings
        # The first step of each number still verifies what the one before drafted.
        steps = 1 + max(-(-drafts // (batch * len(ks))), LEAST_STEPS if measures else 0)
        if state.probed_steps + steps * len(ks) <= budget:
            return _started(state, tuple((k, steps) for k in ks), recovers=True)
    return state


def _budget(state: MonitorState, share: float) -> float:
    step_count = state.last.step_count if state.last is not None else 0
    return share * step_count + state.free_steps


def _started(state: MonitorState, parts: tuple[tuple[int, int], ...], *, recovers: bool) -> MonitorState:
    assert state.last is not None  # noqa: S101 - set by `decide`
    probe = Probe(parts=parts, base=state.last, recovers=recovers)
    steps = state.probed_steps + probe.step_count
    return replace(state, probe=probe, starts_probe=True, probed_steps=steps)


def with_measured_costs(
    state: MonitorState, base: EngineReading, reading: EngineReading, now: float
) -> MonitorState:
    """Update costs by all steps since a probe or sweep began."""
    spans: dict[int, dict[int, StepCounters]] = {}
    for (bucket, k), counters in reading.steps.items():
        spans.setdefault(bucket, {})[k] = counters.since(base.steps.get((bucket, k), NO_STEPS))
    for bucket, steps in spans.items():
        known = state.buckets[bucket].costs if bucket in state.buckets else NO_COSTS
        fresh = update_costs(known, steps, now)
        if fresh is not known:
            state = with_bucket_entry(state, bucket, replace(bucket_entry(state, bucket), costs=fresh))
    return state


def bucket_entry(state: MonitorState, bucket: int) -> Bucket:
    """The entry of a batch bucket; of a new one, its draft tokens in force."""
    return state.buckets.get(bucket) or Bucket(draft_tokens=state.draft_tokens(bucket))


def with_bucket_entry(state: MonitorState, bucket: int, entry: Bucket) -> MonitorState:
    return replace(state, buckets=MappingProxyType({**state.buckets, bucket: entry}))
