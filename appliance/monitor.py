"""
Watch acceptance and goodput, and decide what a worker does: a reading in, a `Watch` out.

`decide` is called once a tick with what the worker's plugin says.  The `Watch` it returns holds all
that is remembered of the worker, and what the worker should do now: a mode with its reason, a
draft-token table, and sometimes a probe.  `appliance.control.loop` makes it so.  There is no clock, socket
or registry in here.

Two verdicts are kept apart.  *Collapsed*: hardly a draft token is accepted, compared with what is
usual here; something is wrong with draft or traffic, and it is an alarm.  *Below break-even*:
drafts work, but at this load a step with them costs more than it gives; that is normal.

It fails by holding still: a scrape that failed changes nothing but the reason, and counters of an
engine that has restarted start the window anew.
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
from appliance.speculation.probes import PROBE_GROWTH, entry_of, learnt, probe_of, sweep_when_due, with_entry
from appliance.speculation.state import (
    MonitorPolicy,
    Probe,
    Watch,
    collapse_limit,
    joined,
    observe,
    span,
    tail,
)
from appliance.speculation.values import NO_STEPS, EngineReading, Reason, SpeculationMode, bucket_of

PATIENCE = 2
"""Ticks in a row that must say the same before speculation stops for not paying."""
POOLED_WINDOWS = 4
"""How many windows of drafts are kept of probes that have come to nothing yet."""
USUAL_SHARE = 0.02
"""Of what is usual, how much a tick that pays changes."""


def decide(
    watch: Watch,
    reading: EngineReading | None,
    policy: MonitorPolicy,
    now: float,
    *,
    override: SpeculationMode | None = None,
    draft_tokens: int | None = None,
) -> Watch:
    """
    Take one reading, and decide what the worker does from now on.

    Args:
        watch: what was known and decided before.
        reading: what the worker says, or None when it could not be asked.
        policy: window sizes, thresholds and times.
        now: seconds, of one monotonic clock.
        override: the mode an operator insists on.
        draft_tokens: how many they insist on while drafting; None for the most there are.
    """
    seen = observe(watch, reading, policy)
    if reading is None:
        return seen
    # A mode that was found, not decided, counts like one that was: cool-down and back-off go on from it.
    found, seen = seen.mode, replace(seen, mode=watch.mode, last=reading)
    seen = _enter(seen, found, now)
    if not reading.controllable:
        return _judge_from_outside(seen, watch.last, policy, now)
    if override is not None:
        return _obey(seen, override, draft_tokens, now)
    return _decide_freely(seen, watch.last, reading, policy, now)


def _decide_freely(
    watch: Watch, before: EngineReading | None, reading: EngineReading, policy: MonitorPolicy, now: float
) -> Watch:
    if watch.basis is Reason.OPERATOR_OVERRIDE:
        watch = _relent(watch, now)
    probe, bucket = watch.probe, _bucket_in_use(before, reading)
    if probe is not None and not reading.is_probing:
        watch = replace(learnt(watch, probe.base, reading, now), probe=None)
        if probe.recovers:
            return _conclude(watch, probe, reading, policy, now)
    if bucket is None or (watch.probe is not None and watch.probe.recovers):
        return watch
    if watch.draft_tokens(bucket) == 0:
        return _probe_when_due(watch, bucket, policy, now)
    watch = _judge(watch, bucket, policy, now)
    if watch.probe is None and watch.draft_tokens(bucket):
        watch = sweep_when_due(watch, bucket, policy, now)
    return watch


def _obey(watch: Watch, override: SpeculationMode, draft_tokens: int | None, now: float) -> Watch:
    """Do what an operator insists on; what was decided before is kept for the time after."""
    kept = watch.kept if watch.basis is Reason.OPERATOR_OVERRIDE else replace(watch, kept=None)
    most = max(watch.choices) if draft_tokens is None else draft_tokens
    offered = [k for k in watch.choices if 0 < k <= most] or [k for k in watch.choices if k][:1]
    watch = replace(
        watch,
        kept=kept,
        ordered=0 if override is SpeculationMode.TARGET_ONLY else max(offered, default=0),
        probe=None,
        verdict=None,
        basis=Reason.OPERATOR_OVERRIDE,
        reason=Reason.OPERATOR_OVERRIDE,
    )
    return _turn(watch, override, now)


def _relent(watch: Watch, now: float) -> Watch:
    """Go on where the operator broke in."""
    kept, latest = watch.kept, watch.samples[-1:]
    freed = replace(watch, kept=None, ordered=None, samples=latest, history=latest, probed=())
    if kept is None:
        return _resume(_turn(freed, SpeculationMode.SPECULATIVE, now), Reason.TOO_FEW_DRAFTS, now)
    # A probe that was under way then is over.
    basis = (kept.verdict or Reason.COLLAPSED) if kept.mode is SpeculationMode.PROBING else kept.basis
    freed = replace(freed, verdict=kept.verdict, basis=basis, reason=basis)
    drafted = kept.mode is SpeculationMode.SPECULATIVE
    return _turn(freed, kept.mode if drafted else SpeculationMode.TARGET_ONLY, now)


def _resume(watch: Watch, reason: Reason, now: float) -> Watch:
    """Draft again, at every batch size."""
    latest = watch.samples[-1:]
    resumed = replace(
        _with_most_drafts(watch),
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
    return _enter(resumed, SpeculationMode.SPECULATIVE, now)


def _with_most_drafts(watch: Watch) -> Watch:
    buckets = {
        name: replace(entry, draft_tokens=max(watch.choices), doubts=0)
        for name, entry in watch.buckets.items()
    }
    return replace(watch, buckets=MappingProxyType(buckets))


def _stop(watch: Watch, verdict: Reason, policy: MonitorPolicy, now: float) -> Watch:
    """Serve the target alone from now on, and look again later."""
    waiting = _wait_for_probe(watch, policy, now, verdict)
    stopped = replace(waiting, verdict=verdict, basis=verdict, reason=verdict)
    return _enter(stopped, SpeculationMode.TARGET_ONLY, now)


def _stop_bucket(watch: Watch, policy: MonitorPolicy, now: float) -> Watch:
    """After one bucket stopped: stop altogether if that leaves none that drafts."""
    if any(k for _first, _last, k in watch.table):
        watch = replace(watch, basis=Reason.BELOW_BREAK_EVEN, reason=Reason.BELOW_BREAK_EVEN)
        return _flip(_wait_for_probe(watch, policy, now, Reason.BELOW_BREAK_EVEN), now)
    return _stop(watch, Reason.BELOW_BREAK_EVEN, policy, now)


def _wait_for_probe(watch: Watch, policy: MonitorPolicy, now: float, verdict: Reason) -> Watch:
    """
    Set the time of the first probe after speculation stopped.

    Stopping again and again is the sign of a borderline: look less and less often.  Not where one kind
    of traffic takes turns with another.
    """
    takes_turns = verdict is Reason.COLLAPSED and not watch.dips
    longest = policy.probe_longest_seconds if takes_turns else policy.hold_longest_seconds
    hold = min(longest, policy.probe_seconds * 2.0 ** len(watch.flips_lately(now)))
    return replace(
        watch,
        probe=None,
        stopped_for=recent_text(watch, policy, now) or watch.window,
        probed=(),
        probes_failed=0,
        unclear=0,
        hold_seconds=hold,
        next_probe_at=now + hold,
    )


def _enter(watch: Watch, mode: SpeculationMode, now: float) -> Watch:
    flips = mode is not watch.mode and SpeculationMode.SPECULATIVE in {mode, watch.mode}
    entered = _turn(watch, mode, now)
    return _flip(entered, now) if flips else entered


def _turn(watch: Watch, mode: SpeculationMode, now: float) -> Watch:
    """Change the mode for a person: that tells nothing of the traffic, so it is not held against it."""
    return watch if mode is watch.mode else replace(watch, mode=mode, since=now)


def _flip(watch: Watch, now: float) -> Watch:
    """Note that drafting stopped or started."""
    return replace(watch, flips=(*watch.flips_lately(now), now))


def _may_flip(watch: Watch, policy: MonitorPolicy, now: float) -> bool:
    return not watch.flips or now - watch.flips[-1] >= policy.cooldown_seconds


def _judge(watch: Watch, bucket: int, policy: MonitorPolicy, now: float) -> Watch:
    """Stop, or choose the number of draft tokens for the batch bucket in use."""
    costs = aged(watch.costs(bucket), now)
    if is_useless(watch, costs, policy, now):
        return _stop(watch, Reason.COLLAPSED, policy, now) if _may_flip(watch, policy, now) else watch
    if not costs.is_known() or watch.window.drafts < policy.min_drafts:
        return watch
    entry = entry_of(watch, bucket)
    # Whether the best choice loses is asked before it is made: more accepted tokens must never be
    # what stops a worker.
    doubts = entry.doubts + 1 if is_losing(watch, costs, policy, now) else 0
    if doubts >= PATIENCE and _may_flip(watch, policy, now):
        if has_collapsed(watch, policy):
            return _stop(watch, Reason.COLLAPSED, policy, now)
        return _stop_bucket(with_entry(watch, bucket, replace(entry, draft_tokens=0, doubts=0)), policy, now)
    watch = _saw_it(watch, payoff(watch.window, costs, entry.draft_tokens), policy)
    better = better_choice(watch, costs, entry.draft_tokens, policy)
    most = max(watch.choices)
    if better is None and now >= entry.try_at and entry.draft_tokens < most and is_worth_a_try(watch, policy):
        wait = min(policy.sweep_longest_seconds, policy.sweep_seconds * 2.0 ** min(entry.tries, 30))
        better, entry = most, replace(entry, tries=entry.tries + 1, try_at=now + wait)
    if better is not None:
        watch = replace(watch, basis=Reason.HEALTHY, reason=Reason.HEALTHY)
    chosen = entry.draft_tokens if better is None else better
    return with_entry(watch, bucket, replace(entry, draft_tokens=chosen, doubts=doubts))


def _saw_it(watch: Watch, found: Estimate | None, policy: MonitorPolicy) -> Watch:
    """Remember the acceptance length that pays."""
    if found is None or found.mean <= policy.margin or watch.window.drafts < policy.window_drafts:
        return watch
    length = watch.window.acceptance_length
    # What was seen to pay takes the place of what the draft's record promised.
    usual = watch.usual_length if watch.has_paid and watch.usual_length is not None else length
    return replace(watch, has_paid=True, usual_length=usual + USUAL_SHARE * (length - usual))


def _probe_when_due(watch: Watch, bucket: int, policy: MonitorPolicy, now: float) -> Watch:
    """Draft for a few steps, to see whether it would pay."""
    if watch.mode is SpeculationMode.SPECULATIVE:
        watch = replace(watch, reason=Reason.BELOW_BREAK_EVEN)
    if now < watch.next_probe_at or not _may_flip(watch, policy, now):
        return watch
    started = probe_of(watch, bucket, policy, now)
    if started.probe is None or watch.mode is not SpeculationMode.TARGET_ONLY:
        return started
    return _enter(replace(started, basis=Reason.PROBING, reason=Reason.PROBING), SpeculationMode.PROBING, now)


def _conclude(watch: Watch, probe: Probe, reading: EngineReading, policy: MonitorPolicy, now: float) -> Watch:
    """Act on what a probe found."""
    drafts = reading.drafting.since(probe.base.drafting)
    bucket = _bucket_in_use(probe.base, reading)
    if drafts is None or not drafts.drafts or bucket is None:
        # It was never made: nothing was learnt.
        return _back_to_waiting(watch, now + policy.probe_seconds, now, watch.basis)
    watch = replace(watch, probed=(*watch.probed, drafts))
    while joined(watch.probed[1:]).drafts >= POOLED_WINDOWS * policy.window_drafts:
        watch = replace(watch, probed=watch.probed[1:])
    answer = would_pay(watch, bucket, policy, now)
    if answer is None and watch.unclear < PROBE_GROWTH:
        watch = replace(watch, unclear=watch.unclear + 1)
        larger = probe_of(watch, bucket, policy, now)
        return larger if larger.probe is not None else _back_to_waiting(watch, now, now, watch.basis)
    if answer:
        return _recover(watch, bucket, now)
    stops_everywhere = watch.mode is SpeculationMode.SPECULATIVE and _may_flip(watch, policy, now)
    if stops_everywhere and has_collapsed(watch, policy):
        return _stop(watch, Reason.COLLAPSED, policy, now)
    failed = watch.probes_failed + 1
    hopeless = not watch.has_paid and watch.verdict is Reason.COLLAPSED
    longest = policy.probe_hopeless_seconds if hopeless else policy.probe_longest_seconds
    wait = max(watch.hold_seconds, min(longest, policy.probe_seconds * 2.0 ** min(failed, 30)))
    watch = replace(watch, probes_failed=failed, unclear=0)
    return _back_to_waiting(watch, now + wait, now, Reason.PROBE_FAILED)


def _back_to_waiting(watch: Watch, probe_at: float, now: float, reason: Reason) -> Watch:
    watch = replace(watch, next_probe_at=probe_at)
    if watch.mode is not SpeculationMode.PROBING:
        return watch
    basis = (watch.verdict or Reason.COLLAPSED) if reason is Reason.PROBING else reason
    return _enter(replace(watch, basis=basis, reason=basis), SpeculationMode.TARGET_ONLY, now)


def _recover(watch: Watch, bucket: int, now: float) -> Watch:
    """Draft again, at each batch size as much as pays there by what the probes saw."""
    was_in_part = watch.mode is SpeculationMode.SPECULATIVE
    drafts, _is_new = evidence_of(watch)
    watch = _resume(watch, Reason.RECOVERED, now)
    watch = _flip(watch, now) if was_in_part else watch
    buckets = {**watch.buckets, bucket: entry_of(watch, bucket)}
    for name, entry in buckets.items():
        best = best_choice(drafts, aged(watch.costs(name), now), watch.choices)
        if best is not None:
            pays = name == bucket or best[1].upper(LIKELY) > 0
            buckets[name] = replace(entry, draft_tokens=best[0] if pays else 0)
    return replace(watch, buckets=MappingProxyType(buckets))


def _judge_from_outside(
    watch: Watch, before: EngineReading | None, policy: MonitorPolicy, now: float
) -> Watch:
    """A worker that cannot be told to stop can only be avoided."""
    if before is not None and watch.samples[-1].drafts > before.drafting.drafts:
        # Whatever it was told when it still could be: it drafts.
        watch = _enter(watch, SpeculationMode.SPECULATIVE, now)
    shown = replace(watch, basis=Reason.NOT_CONTROLLABLE, reason=Reason.NOT_CONTROLLABLE, probe=None)
    latest = watch.samples[-1:]
    if watch.avoid:
        recent = span(tail(watch.samples, policy.probe_drafts))
        depth = deepest(recent, policy.probe_drafts)
        length = acceptance_length(recent, depth)
        if length is not None and length.lower(LIKELY) > collapse_limit(watch, policy, depth):
            return replace(shown, avoid=False, verdict=None, probes_failed=0)
        if now < watch.next_probe_at:
            return shown
        # Its next drafts decide; what was seen until now has been judged.
        return replace(shown, avoid=False, samples=latest, history=latest)
    if not is_useless(watch, NO_COSTS, policy, now):
        cleared = watch.verdict is not None and watch.window.drafts >= 4 * policy.min_drafts
        return replace(shown, verdict=None, probes_failed=0) if cleared else shown
    failed = watch.probes_failed + (watch.verdict is not None)
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
    """The batch bucket most steps fell into since a reading; None if there were none."""
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
