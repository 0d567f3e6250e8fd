"""
Decide what a worker does about speculation: memory and a reading in, memory and a `Decision` out.

`decide` is called once a tick with the answer of the worker's plugin.  `MonitorState` is what it remembers
of the worker; the `Decision` is a mode with its reason, a draft-token table, and sometimes a probe, and
`appliance.control.loop` applies it.  There is no clock, socket or registry in here.

Two verdicts are kept apart.  *Collapsed*: hardly a draft token is accepted, compared with the baseline;
something is wrong with draft or traffic, and it is an alarm.  *Below break-even*: drafts work, but at this
load a step with them costs more than it gives; that is normal.

It fails static: a failed scrape changes nothing but the reason, and the counters of an engine that has
restarted start a new window.
"""

from dataclasses import replace
from types import MappingProxyType

from appliance.speculation.evidence import (
    LIKELY,
    better_choice,
    evidence_of,
    has_collapsed,
    is_losing,
    is_useless,
    is_worth_a_try,
    recent_text,
    would_pay,
)
from appliance.speculation.goodput import (
    NO_COSTS,
    Estimate,
    acceptance_length,
    aged,
    best_choice,
    deepest,
    payoff,
)
from appliance.speculation.probes import (
    PROBE_GROWTH,
    bucket_entry,
    start_probe,
    start_sweep_if_due,
    with_bucket_entry,
    with_measured_costs,
)
from appliance.speculation.state import (
    MonitorPolicy,
    MonitorState,
    Probe,
    collapse_limit,
    follow,
    observe,
    span,
    tail,
    total_of,
)
from appliance.speculation.values import (
    NO_STEPS,
    Decision,
    EngineReading,
    Reason,
    SpeculationMode,
    bucket_of,
)

PATIENCE = 2
"""Consecutive ticks that must find a loss before speculation stops for not paying."""
POOLED_WINDOWS = 4
"""Maximum drafts kept of inconclusive probes, in windows."""
WINDOWS_OF_A_COLLAPSE = 3
"""Short windows in which a collapse is detected; one of them holds the change."""
BASELINE_EWMA_ALPHA = 0.02
"""Weight of one paying tick in the baseline acceptance length."""


def decide(
    state: MonitorState,
    reading: EngineReading | None,
    policy: MonitorPolicy,
    now: float,
    *,
    acting: bool = True,
    override: SpeculationMode | None = None,
    draft_tokens: int | None = None,
) -> tuple[MonitorState, Decision]:
    """
    Observe one reading, and decide what the worker does next.

    Args:
        state: the memory of this worker, as the last call returned it.
        reading: the worker's answer, or None if it did not answer.
        policy: window sizes, thresholds and times.
        now: seconds of one monotonic clock.
        acting: False in a gateway that only follows what another one decides.
        override: the mode of an operator's override.
        draft_tokens: its draft tokens in speculative mode; None for the maximum.
    """
    after = observe(state, reading, policy)
    if reading is not None and not acting:
        after = follow(after, reading)
    elif reading is not None:
        # A mode that was found, not decided, counts like one that was: cool-down and back-off continue.
        after = _change_mode(replace(after, mode=state.mode, last=reading), after.mode, now)
        if not reading.controllable:
            after = _judge_from_outside(after, state.last, policy, now)
        elif override is not None:
            after = _apply_override(after, override, draft_tokens, now)
        else:
            after = _decide_freely(after, state.last, reading, policy, now)
    return after, after.decision


def _decide_freely(
    state: MonitorState,
    before: EngineReading | None,
    reading: EngineReading,
    policy: MonitorPolicy,
    now: float,
) -> MonitorState:
    if state.basis is Reason.OPERATOR_OVERRIDE:
        state = _clear_override(state, now)
    probe, bucket = state.probe, _bucket_in_use(before, reading)
    if probe is not None and not reading.is_probing:
        state = replace(with_measured_costs(state, probe.base, reading, now), probe=None)
        if probe.recovers:
            return _finish_probe(state, probe, reading, policy, now)
    if bucket is None or (state.probe is not None and state.probe.recovers):
        return state
    if state.draft_tokens(bucket) == 0:
        return _start_probe_if_due(state, bucket, policy, now)
    state = _judge(state, bucket, policy, now)
    if state.probe is None and state.draft_tokens(bucket):
        state = start_sweep_if_due(state, bucket, policy, now)
    return state


def _apply_override(
    state: MonitorState, override: SpeculationMode, draft_tokens: int | None, now: float
) -> MonitorState:
    """Set the mode of an override; the state before it is kept for the time after it."""
    is_overridden = state.basis is Reason.OPERATOR_OVERRIDE
    before = state.before_override if is_overridden else replace(state, before_override=None)
    most = max(state.choices) if draft_tokens is None else draft_tokens
    offered = [k for k in state.choices if 0 < k <= most] or [k for k in state.choices if k][:1]
    state = replace(
        state,
        before_override=before,
        override_draft_tokens=0 if override is SpeculationMode.TARGET_ONLY else max(offered, default=0),
        probe=None,
        verdict=None,
        basis=Reason.OPERATOR_OVERRIDE,
        reason=Reason.OPERATOR_OVERRIDE,
    )
    return _set_mode(state, override, now)


def _clear_override(state: MonitorState, now: float) -> MonitorState:
    """Resume from the state before the override."""
    before, latest = state.before_override, state.samples[-1:]
    state = replace(
        state, before_override=None, override_draft_tokens=None, samples=latest, history=latest, probed=()
    )
    if before is None:
        return _resume(_set_mode(state, SpeculationMode.SPECULATIVE, now), Reason.TOO_FEW_DRAFTS, now)
    # A probe that was in flight then has ended.
    basis = (before.verdict or Reason.COLLAPSED) if before.mode is SpeculationMode.PROBING else before.basis
    state = replace(state, verdict=before.verdict, basis=basis, reason=basis)
    drafted = before.mode is SpeculationMode.SPECULATIVE
    return _set_mode(state, before.mode if drafted else SpeculationMode.TARGET_ONLY, now)


def _resume(state: MonitorState, reason: Reason, now: float) -> MonitorState:
    """Resume speculation at every batch size."""
    latest = state.samples[-1:]
    resumed = replace(
        _with_most_drafts(state),
        probe=None,
        verdict=None,
        basis=reason,
        reason=reason,
        probes_failed=0,
        unclear=0,
        samples=latest,
        history=latest,
        probed=(),
    )
    return _change_mode(resumed, SpeculationMode.SPECULATIVE, now)


def _with_most_drafts(state: MonitorState) -> MonitorState:
    buckets = {
        name: replace(entry, draft_tokens=max(state.choices), doubts=0)
        for name, entry in state.buckets.items()
    }
    return replace(state, buckets=MappingProxyType(buckets))


def _stop(state: MonitorState, verdict: Reason, policy: MonitorPolicy, now: float) -> MonitorState:
    """Stop speculation, and schedule a probe."""
    waiting = _wait_for_probe(state, policy, now, verdict)
    if verdict is Reason.COLLAPSED:
        waiting = replace(waiting, squared_z_scores=_without_fall(waiting.squared_z_scores))
    stopped = replace(waiting, verdict=verdict, basis=verdict, reason=verdict)
    return _change_mode(stopped, SpeculationMode.TARGET_ONLY, now)


def _without_fall(scores: tuple[float, ...]) -> tuple[float, ...]:
    """Drop the largest of the newest scores: the collapse itself is no sign of mixed traffic."""
    before, during = scores[:-WINDOWS_OF_A_COLLAPSE], list(scores[-WINDOWS_OF_A_COLLAPSE:])
    if during:
        during.remove(max(during))
    return (*before, *during)


def _stop_bucket(state: MonitorState, policy: MonitorPolicy, now: float) -> MonitorState:
    """After one bucket stopped: stop speculation if no other bucket drafts."""
    if any(k for _first, _last, k in state.table):
        state = replace(state, basis=Reason.BELOW_BREAK_EVEN, reason=Reason.BELOW_BREAK_EVEN)
        return _record_flip(_wait_for_probe(state, policy, now, Reason.BELOW_BREAK_EVEN), now)
    return _stop(state, Reason.BELOW_BREAK_EVEN, policy, now)


def _wait_for_probe(state: MonitorState, policy: MonitorPolicy, now: float, verdict: Reason) -> MonitorState:
    """
    Set the time of the first probe after speculation stopped.

    Repeated stops are the sign of a borderline, so each waits longer; not if one kind of traffic
    alternates with another.
    """
    takes_turns = verdict is Reason.COLLAPSED and (not state.dips or state.overdispersion == 1.0)
    longest = policy.probe_longest_seconds if takes_turns else policy.hold_longest_seconds
    hold = min(longest, policy.probe_seconds * 2.0 ** len(state.recent_flips(now)))
    return replace(
        state,
        probe=None,
        stopped_for=recent_text(state, policy, now) or state.window,
        probed=(),
        probes_failed=0,
        unclear=0,
        hold_seconds=hold,
        next_probe_at=now + hold,
    )


def _change_mode(state: MonitorState, mode: SpeculationMode, now: float) -> MonitorState:
    flips = mode is not state.mode and SpeculationMode.SPECULATIVE in {mode, state.mode}
    entered = _set_mode(state, mode, now)
    return _record_flip(entered, now) if flips else entered


def _set_mode(state: MonitorState, mode: SpeculationMode, now: float) -> MonitorState:
    """Change the mode without a flip: an operator's change is no evidence about the traffic."""
    return state if mode is state.mode else replace(state, mode=mode, since=now)


def _record_flip(state: MonitorState, now: float) -> MonitorState:
    return replace(state, flips=(*state.recent_flips(now), now))


def _may_flip(state: MonitorState, policy: MonitorPolicy, now: float) -> bool:
    return not state.flips or now - state.flips[-1] >= policy.cooldown_seconds


def _judge(state: MonitorState, bucket: int, policy: MonitorPolicy, now: float) -> MonitorState:
    """Stop, or choose the number of draft tokens for the batch bucket in use."""
    costs = aged(state.costs(bucket), now)
    if is_useless(state, costs, policy, now):
        return _stop(state, Reason.COLLAPSED, policy, now) if _may_flip(state, policy, now) else state
    if not costs.is_known() or state.window.drafts < policy.min_drafts:
        return state
    entry = bucket_entry(state, bucket)
    # Check for a loss before the best choice is applied: more accepted tokens must never stop a worker.
    doubts = entry.doubts + 1 if is_losing(state, costs, policy, now) else 0
    if doubts >= PATIENCE and _may_flip(state, policy, now):
        if has_collapsed(state, policy):
            return _stop(state, Reason.COLLAPSED, policy, now)
        return _stop_bucket(
            with_bucket_entry(state, bucket, replace(entry, draft_tokens=0, doubts=0)), policy, now
        )
    state = _update_baseline(state, payoff(state.window, costs, entry.draft_tokens), policy)
    better = better_choice(state, costs, entry.draft_tokens, policy)
    most = max(state.choices)
    if better is None and now >= entry.try_at and entry.draft_tokens < most and is_worth_a_try(state, policy):
        wait = min(policy.sweep_longest_seconds, policy.sweep_seconds * 2.0 ** min(entry.tries, 30))
        better, entry = most, replace(entry, tries=entry.tries + 1, try_at=now + wait)
    if better is not None:
        state = replace(state, basis=Reason.HEALTHY, reason=Reason.HEALTHY)
    chosen = entry.draft_tokens if better is None else better
    return with_bucket_entry(state, bucket, replace(entry, draft_tokens=chosen, doubts=doubts))


def _update_baseline(state: MonitorState, found: Estimate | None, policy: MonitorPolicy) -> MonitorState:
    """Update the acceptance length that pays."""
    if found is None or found.mean <= policy.margin or state.window.drafts < policy.window_drafts:
        return state
    length = state.window.acceptance_length
    # The first length that pays replaces the one that the draft's record promised.
    before = state.baseline_length if state.has_paid and state.baseline_length is not None else length
    return replace(state, has_paid=True, baseline_length=before + BASELINE_EWMA_ALPHA * (length - before))


def _start_probe_if_due(state: MonitorState, bucket: int, policy: MonitorPolicy, now: float) -> MonitorState:
    """Draft for a few steps, to measure whether it would pay."""
    if state.mode is SpeculationMode.SPECULATIVE:
        state = replace(state, reason=Reason.BELOW_BREAK_EVEN)
    if now < state.next_probe_at or not _may_flip(state, policy, now):
        return state
    started = start_probe(state, bucket, policy, now)
    if started.probe is None or state.mode is not SpeculationMode.TARGET_ONLY:
        return started
    return _change_mode(
        replace(started, basis=Reason.PROBING, reason=Reason.PROBING), SpeculationMode.PROBING, now
    )


def _finish_probe(
    state: MonitorState, probe: Probe, reading: EngineReading, policy: MonitorPolicy, now: float
) -> MonitorState:
    """Resume, probe again, or wait, by the result of a probe."""
    drafts = reading.drafting.since(probe.base.drafting)
    bucket = _bucket_in_use(probe.base, reading)
    if drafts is None or not drafts.drafts or bucket is None:
        # The worker never ran it.
        return _back_to_waiting(state, now + policy.probe_seconds, now, state.basis)
    state = replace(state, probed=(*state.probed, drafts))
    while total_of(state.probed[1:]).drafts >= POOLED_WINDOWS * policy.window_drafts:
        state = replace(state, probed=state.probed[1:])
    pays = would_pay(state, bucket, policy, now)
    if pays is None and state.unclear < PROBE_GROWTH:
        state = replace(state, unclear=state.unclear + 1)
        larger = start_probe(state, bucket, policy, now)
        return larger if larger.probe is not None else _back_to_waiting(state, now, now, state.basis)
    if pays:
        return _recover(state, bucket, now)
    stops_everywhere = state.mode is SpeculationMode.SPECULATIVE and _may_flip(state, policy, now)
    if stops_everywhere and has_collapsed(state, policy):
        return _stop(state, Reason.COLLAPSED, policy, now)
    failed = state.probes_failed + 1
    hopeless = not state.has_paid and state.verdict is Reason.COLLAPSED
    longest = policy.probe_hopeless_seconds if hopeless else policy.probe_longest_seconds
    wait = max(state.hold_seconds, min(longest, policy.probe_seconds * 2.0 ** min(failed, 30)))
    state = replace(state, probes_failed=failed, unclear=0)
    return _back_to_waiting(state, now + wait, now, Reason.PROBE_FAILED)


def _back_to_waiting(state: MonitorState, probe_at: float, now: float, reason: Reason) -> MonitorState:
    state = replace(state, next_probe_at=probe_at)
    if state.mode is not SpeculationMode.PROBING:
        return state
    basis = (state.verdict or Reason.COLLAPSED) if reason is Reason.PROBING else reason
    return _change_mode(replace(state, basis=basis, reason=basis), SpeculationMode.TARGET_ONLY, now)


def _recover(state: MonitorState, bucket: int, now: float) -> MonitorState:
    """Resume speculation, with the draft tokens that pay at each batch size by the probes' evidence."""
    was_in_part = state.mode is SpeculationMode.SPECULATIVE
    drafts, _is_new = evidence_of(state)
    state = _resume(state, Reason.RECOVERED, now)
    state = _record_flip(state, now) if was_in_part else state
    buckets = {**state.buckets, bucket: bucket_entry(state, bucket)}
    for name, entry in buckets.items():
        best = best_choice(drafts, aged(state.costs(name), now), state.choices)
        if best is not None:
            pays = name == bucket or best[1].upper(LIKELY) > 0
            buckets[name] = replace(entry, draft_tokens=best[0] if pays else 0)
    return replace(state, buckets=MappingProxyType(buckets))


def _judge_from_outside(
    state: MonitorState, before: EngineReading | None, policy: MonitorPolicy, now: float
) -> MonitorState:
    """Avoid a worker whose draft has collapsed, because it cannot be controlled."""
    if before is not None and state.samples[-1].drafts > before.drafting.drafts:
        # It drafts, whatever it was commanded while it was controllable.
        state = _change_mode(state, SpeculationMode.SPECULATIVE, now)
    shown = replace(state, basis=Reason.NOT_CONTROLLABLE, reason=Reason.NOT_CONTROLLABLE, probe=None)
    latest = state.samples[-1:]
    if state.avoid:
        recent = span(tail(state.samples, policy.probe_drafts))
        depth = deepest(recent, policy.probe_drafts)
        length = acceptance_length(recent, depth)
        if length is not None and length.lower(LIKELY) > collapse_limit(state, policy, depth):
            return replace(shown, avoid=False, verdict=None, probes_failed=0)
        if now < state.next_probe_at:
            return shown
        # Its next drafts decide; those until now have been judged.
        return replace(shown, avoid=False, samples=latest, history=latest)
    if not is_useless(state, NO_COSTS, policy, now):
        cleared = state.verdict is not None and state.window.drafts >= 4 * policy.min_drafts
        return replace(shown, verdict=None, probes_failed=0) if cleared else shown
    failed = state.probes_failed + (state.verdict is not None)
    wait = min(policy.probe_hopeless_seconds, policy.probe_seconds * 2.0 ** min(failed, 30))
    return replace(
        shown,
        avoid=True,
        verdict=Reason.COLLAPSED,
        probes_failed=failed,
        next_probe_at=now + wait,
        samples=latest,
        history=latest,
    )


def _bucket_in_use(before: EngineReading | None, reading: EngineReading) -> int | None:
    """The batch bucket of most steps since a reading; None without steps."""
    if before is None or before.epoch != reading.epoch or before.step_count == reading.step_count:
        return None
    steps: dict[int, int] = {}
    for (bucket, k), counters in reading.steps.items():
        fresh = counters.since(before.steps.get((bucket, k), NO_STEPS)).steps
        steps[bucket] = steps.get(bucket, 0) + fresh
    busiest = max(steps, key=lambda bucket: steps[bucket], default=None)
    if busiest is not None and steps[busiest]:
        return busiest
    return bucket_of(reading.batch) if reading.batch else None
