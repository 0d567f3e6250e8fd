"""
Decide what a worker does about speculation: memory and a reading in, memory and a `Decision` out.

`decide` is called once a tick with the answer of the worker's plugin.  `MonitorState` is what it remembers
of the worker; the `Decision` is a draft-token table, sometimes a probe, and a mode with its reason, and
`appliance.control.loop` applies it.  There is no clock, socket or registry in here.

One model decides: acceptance of the present text, cost of a step by batch bucket and K, and for each batch
bucket the K that gives most tokens per second.  Mode and reason are names of that choice, for people.

It fails static: a failed scrape changes nothing but the reason, and an engine that has restarted is measured
from the start.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from appliance.speculation.evidence import Acceptance, deepest
from appliance.speculation.exploration import start_probe
from appliance.speculation.state import MonitorPolicy, MonitorState, collapse_limit, follow, observe
from appliance.speculation.values import Decision, EngineReading, Reason, SpeculationMode

MOST_DOUBT = 0.1
"""Standard deviation of a cost that counts at most against another number of draft tokens."""
LONGEST_AVOIDANCE = 600.0
"""Maximum time until a worker that cannot be controlled is tried again."""


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
        policy: the constants of the decision.
        now: seconds of one monotonic clock.
        acting: False in a gateway that only follows what another one decides.
        override: the mode of an operator's override.
        draft_tokens: its draft tokens in speculative mode; None for the maximum.
    """
    after = observe(state, reading, policy, now)
    if reading is None:
        pass
    elif not acting:
        after = follow(after, reading)
    elif not reading.controllable:
        after = _judge_from_outside(after, state.last, policy, now)
    elif override is not None:
        after = _apply_override(after, override, draft_tokens, now)
    else:
        after = _decide_freely(after, policy, now)
    return after, after.decision


def _decide_freely(state: MonitorState, policy: MonitorPolicy, now: float) -> MonitorState:
    if state.basis is Reason.OPERATOR_OVERRIDE:
        # Before the next choice: the table that the override replaced is in force again.
        state = replace(state, override_draft_tokens=None)
        state = _with_new_mode(state, policy, now)
    choice, bucket = _best_choices(state, policy, now), state.bucket
    is_settled = bucket is not None and choice[bucket] == state.choice[bucket]
    if choice != state.choice:
        # A new table ends the probe in flight.
        state = replace(state, choice=choice, probe=())
        state = _with_new_mode(state, policy, now)
    if bucket is not None and is_settled and not state.probe:
        state = start_probe(state, bucket, policy, now)
    return _name(state, policy, now)


def _best_choices(state: MonitorState, policy: MonitorPolicy, now: float) -> Mapping[int, int]:
    """Draft tokens by batch bucket: another K where it surely gives more."""
    if state.acceptance.total.drafts < policy.min_drafts:
        return state.choice
    currents = set(state.choice.values())
    lengths = {(k, other): state.acceptance.gain(k, other) for k in state.choices for other in currents}
    choice = dict(state.choice)
    # Drafts that are nearly useless have to prove that they pay.
    sure_to_stop = 0.0 if is_collapsed(state, policy, policy.sure) else policy.sure
    for bucket, current in state.choice.items():
        # A batch size that was never measured follows the guess of its costs.
        doubt = MOST_DOUBT**2 if state.costs.is_measured(bucket) else 0.0
        most = math.log1p(policy.switch_gain)
        for k in state.choices:
            if k == current:
                continue
            cost = state.costs.ratio(bucket, k, current, now)
            gain = lengths[k, current].minus(replace(cost, variance=min(cost.variance, doubt)))
            if gain.mean > most and gain.lower(policy.sure if k else sure_to_stop) > 0.0:
                choice[bucket], most = k, gain.mean
    return MappingProxyType(choice)


def _apply_override(
    state: MonitorState, override: SpeculationMode, draft_tokens: int | None, now: float
) -> MonitorState:
    """Set the mode of an override; the choice is kept for the time after it."""
    most = max(state.choices) if draft_tokens is None else draft_tokens
    offered = [k for k in state.choices if 0 < k <= most] or [k for k in state.choices if k][:1]
    given = 0 if override is SpeculationMode.TARGET_ONLY else max(offered, default=0)
    shown = Reason.OPERATOR_OVERRIDE
    return replace(state.in_mode(override, shown, now), reason=shown, override_draft_tokens=given, probe=())


def _mode_in_use(state: MonitorState) -> SpeculationMode:
    """The mode of the batch bucket in use; before any is, whether there is one that drafts."""
    bucket = state.bucket_in_use
    drafts = any(state.choice.values()) if bucket is None else state.draft_tokens(bucket) > 0
    return SpeculationMode.SPECULATIVE if drafts else SpeculationMode.TARGET_ONLY


def _name(state: MonitorState, policy: MonitorPolicy, now: float) -> MonitorState:
    """The mode that has held long enough, and its reason as of this tick."""
    mode = _mode_in_use(state) if state.bucket_in_use is not None else state.mode
    if mode is state.mode:
        state = replace(state, differs_since=None)
    elif state.differs_since is None:
        state = replace(state, differs_since=now)
    elif now - state.differs_since >= policy.recent_seconds:
        state = state.in_mode(mode, Reason.HEALTHY, now)
    basis, reason = state.basis, Reason.HEALTHY
    if state.mode is SpeculationMode.TARGET_ONLY:
        basis = reason = _verdict(state, policy)
    elif state.acceptance.total.drafts < policy.min_drafts:
        reason = Reason.TOO_FEW_DRAFTS
    elif basis is Reason.RECOVERED and now - state.since < policy.recent_seconds:
        reason = Reason.RECOVERED
    return replace(
        state, basis=basis, reason=state.reason if state.reason is Reason.COUNTER_RESET else reason
    )


def _with_new_mode(state: MonitorState, policy: MonitorPolicy, now: float) -> MonitorState:
    """Change the mode at once, with the reason of the change."""
    mode = _mode_in_use(state)
    if mode is SpeculationMode.TARGET_ONLY:
        basis = _verdict(state, policy)
    else:
        basis = Reason.RECOVERED if state.mode is SpeculationMode.TARGET_ONLY else Reason.HEALTHY
    return state.in_mode(mode, basis, now)


def _verdict(state: MonitorState, policy: MonitorPolicy) -> Reason:
    """Why drafting does not pay: because hardly a token is accepted, or for what it costs."""
    has_collapsed = state.verdict is Reason.COLLAPSED
    if state.acceptance.total.drafts < policy.min_drafts:
        return Reason.COLLAPSED if has_collapsed else Reason.BELOW_BREAK_EVEN
    # It takes certainty to raise the alarm, but not to keep it, nor to say that a record promises more.
    promises_more = collapse_limit(state, policy, max(state.choices)) > policy.collapsed_below
    sure = 0.0 if has_collapsed or promises_more else policy.sure
    return Reason.COLLAPSED if is_collapsed(state, policy, sure) else Reason.BELOW_BREAK_EVEN


def is_collapsed(state: MonitorState, policy: MonitorPolicy, sure: float) -> bool:
    """Whether the upper bound of acceptance is under the collapse limit."""
    depth = deepest(state.acceptance.total, policy.min_drafts)
    return depth > 0 and state.acceptance.length(depth).upper(sure) < collapse_limit(state, policy, depth)


def _judge_from_outside(
    state: MonitorState, before: EngineReading | None, policy: MonitorPolicy, now: float
) -> MonitorState:
    """Avoid a worker whose draft has collapsed, because it cannot be controlled."""
    assert state.last is not None  # noqa: S101 - set by `observe`
    # It may draft, whatever it was commanded while it was controllable.
    drafts = before is not None and state.last.drafting.drafts > before.drafting.drafts
    mode, shown = SpeculationMode.SPECULATIVE if drafts else state.mode, Reason.NOT_CONTROLLABLE
    if state.verdict is Reason.COLLAPSED and state.retry_at is None:
        # It lost control while its draft was collapsed: so it stays until its next drafts are judged.
        state = replace(state, retry_at=now)
    state = replace(state.in_mode(mode, shown, now), reason=shown, probe=(), override_draft_tokens=None)
    forgotten = replace(state, acceptance=Acceptance(scores=state.acceptance.scores), judged_from=now)
    is_away = state.avoid and state.retry_at is not None and now < state.retry_at
    if state.acceptance.total.drafts < policy.min_drafts:
        # Its next drafts decide; those until now have been judged.
        return replace(forgotten, avoid=False) if state.avoid and not is_away else state
    if not is_collapsed(state, policy, policy.sure):
        return replace(state, avoid=False, retry_at=None)
    if is_away:
        return state
    # What it took to find out is to be no more than exploration's share of time.
    wait = min(LONGEST_AVOIDANCE, (now - state.judged_from) / policy.exploration_share)
    return replace(forgotten, avoid=True, retry_at=now + wait)
