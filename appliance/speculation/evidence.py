"""
What the evidence says of a worker's drafts: useless, losing, paying, better or worse than they were.

Pure predicates on a `MonitorState`; `appliance.monitor` acts on them.

The confidence required depends on the cost of a mistake.  One number of draft tokens replaces another on
weak evidence, since both draft.  Speculation stops and resumes only on strong evidence.  Requests of several
kinds at once are judged by their average: the more one window differs from the next, and the more often
speculation stopped and resumed recently, the more drafts that takes.
"""

import math
from itertools import takewhile

from appliance.speculation.goodput import (
    Costs,
    acceptance_length,
    aged,
    best_choice,
    between_window_variance,
    deepest,
    gain,
    payoffs,
    rise,
)
from appliance.speculation.state import (
    SHORT_WINDOW,
    WINDOWS_KEPT,
    MonitorPolicy,
    MonitorState,
    collapse_limit,
    minimum_promised_length,
    total_of,
)
from appliance.speculation.values import Reason, SpecDecodeCounters

HUNCH, LIKELY, SURE, CERTAIN = 1.0, 1.64, 2.33, 3.0
"""Standard deviations: one chance in six, twenty, a hundred and a thousand of being wrong."""
STRIKE = 2
"""Factor on the drafts it takes to stop, for each recent resumption."""
LONGER_THAN_A_DIP = 3
"""Minimum length of a collapse, in multiples of the longest dip."""


def is_useless(state: MonitorState, costs: Costs, policy: MonitorPolicy, now: float) -> bool:
    """Whether the draft has collapsed, and is not so cheap that it still pays."""
    counters = recent_text(state, policy, now)
    if counters is None:
        return False
    depth = deepest(counters, policy.min_drafts)
    length = acceptance_length(counters, depth)
    if length is None or length.upper(SURE) >= collapse_limit(state, policy, depth):
        return False
    # A sure change for the worse is enough; a text that always was so needs more evidence.
    sure = 0.0 if counters.drafts < state.long_window.drafts else HUNCH
    found = payoffs(counters, costs.exactly(), state.choices)
    if all(estimate.upper(sure) < policy.margin for estimate in found.values()):
        return True
    # It must be known to still pay.  A sweep on a busy machine may be wrong by half, and the next may be a
    # minute away; after a stop, a probe comes within seconds.
    return all(estimate.mean < LIKELY * math.sqrt(costs.ratios[k].variance) for k, estimate in found.items())


def recent_text(state: MonitorState, policy: MonitorPolicy, now: float) -> SpecDecodeCounters | None:
    """The newest drafts if they are surely worse than the rest of the long window; else all of it."""
    recent, longer = state.newest(_drafts_of_a_collapse(state, policy, now)), state.long_window
    if recent is None:
        return None
    change = rise(recent, longer, min(deepest(recent, policy.min_drafts), deepest(longer, policy.min_drafts)))
    return recent if change is not None and change < -CERTAIN else longer


def _drafts_of_a_collapse(state: MonitorState, policy: MonitorPolicy, now: float) -> int:
    if state.overdispersion == 1.0:
        # Traffic of one kind that collapses again after a resumption is not a borderline.
        stopping = SHORT_WINDOW * policy.min_drafts
    else:
        stopping = (_drafts_to_lose if state.dips else _drafts_to_stop)(state, policy, now)
    longest = LONGER_THAN_A_DIP * max(state.dips, default=0)
    return min(max(stopping, longest), _memory(policy))


def _drafts_to_lose(state: MonitorState, policy: MonitorPolicy, now: float) -> int:
    several_kinds: float = state.overdispersion**1.5
    return min(round(_drafts_to_stop(state, policy, now) * several_kinds), _memory(policy))


def _drafts_to_stop(state: MonitorState, policy: MonitorPolicy, now: float) -> int:
    strikes = len(state.recent_flips(now)) // 2
    return int(SHORT_WINDOW * policy.min_drafts * STRIKE**strikes)


def _memory(policy: MonitorPolicy) -> int:
    return WINDOWS_KEPT * policy.window_drafts


def is_losing(state: MonitorState, costs: Costs, policy: MonitorPolicy, now: float) -> bool:
    """Whether even the best number of draft tokens is slower than none: by much recently, or for long."""
    least, is_sure = _drafts_to_lose(state, policy, now), False
    for counters, spans in ((state.window, ()), (state.long_window, state.windows)):
        best = best_choice(counters, costs.exactly(), state.choices, least_drafts=policy.min_drafts)
        if best is None:
            continue
        k, found = best
        if found.mean > 0:
            return False
        # Waiting for more drafts improves the estimate of the text, but not of the costs.
        text = SURE * math.sqrt(found.variance + between_window_variance(spans, k))
        cost = HUNCH * math.sqrt(costs.ratios[k].variance)
        if counters.drafts >= least and found.mean + math.hypot(text, cost) < -policy.margin:
            is_sure = True
    return is_sure


def has_collapsed(state: MonitorState, policy: MonitorPolicy) -> bool:
    """
    Whether a draft that loses at the batch size in use has collapsed, so that it should stop at every one.

    The newest drafts decide, however often speculation stopped before, and whatever the draft once paid.
    A length under the record's promise only changes the reason, so the mean is enough for it.
    """
    newest, longer = state.newest(policy.min_drafts), state.long_window
    if newest is not None:
        depth = deepest(newest, policy.min_drafts)
        length = acceptance_length(newest, depth)
        if length is not None and length.upper(SURE) < collapse_limit(state, policy, depth):
            return True
    depth = deepest(longer, policy.min_drafts)
    length = acceptance_length(longer, depth)
    return length is not None and length.mean < minimum_promised_length(state, depth)


def better_choice(state: MonitorState, costs: Costs, current: int, policy: MonitorPolicy) -> int | None:
    """A number of draft tokens that gives more than the current one, if there is one."""
    for counters, other, sure in (
        (state.window, state.long_window, LIKELY),
        (state.long_window, state.window, HUNCH),
    ):
        best = best_choice(counters, costs, state.choices)
        better = gain(counters, costs, best[0], current) if best is not None else None
        if best is None or better is None or better.lower(sure) <= policy.switch_margin:
            continue
        # The long window may describe a text that is gone.
        confirmed = gain(other, costs, best[0], current)
        if sure == LIKELY or confirmed is None or confirmed.mean > 0:
            return best[0]
    return None


def is_worth_a_try(state: MonitorState, policy: MonitorPolicy) -> bool:
    """Whether the text got so much better that more draft tokens than were tried recently may pay."""
    recent = state.newest(2 * policy.min_drafts)
    return recent is not None and _is_better_text(recent, state.long_window, policy.min_drafts)


def would_pay(state: MonitorState, bucket: int, policy: MonitorPolicy, now: float) -> bool | None:
    """Whether the probes' drafts would pay now; None while that is unclear."""
    drafts, is_new = evidence_of(state)
    costs = aged(state.costs(bucket), now)
    found = payoffs(drafts, costs, state.choices).values()
    if not found:
        depth = deepest(drafts, 1)
        length, limit = acceptance_length(drafts, depth), collapse_limit(state, policy, depth)
        if length is None or length.lower(LIKELY) < limit < length.upper(LIKELY):
            return None
        return length.mean > limit
    has_collapsed = state.verdict is Reason.COLLAPSED
    if is_new and drafts.drafts < _drafts_to_resume(state, policy):
        return None
    sure, margin = (LIKELY if has_collapsed else SURE, 0.0) if is_new else (CERTAIN, policy.margin)
    if any(estimate.lower(sure) > margin for estimate in found):
        return True
    latest = payoffs(state.probed[-1], costs, state.choices).values()
    is_hopeful = any(estimate.mean > policy.margin for estimate in latest)
    return None if is_hopeful or any(estimate.upper(HUNCH) > policy.margin for estimate in found) else False


def _drafts_to_resume(state: MonitorState, policy: MonitorPolicy) -> float:
    """Drafts of a better text that it takes to resume: a few requests of many kinds may be luck."""
    # A collapsed draft that is better has recovered; one below break-even may not have changed.
    is_clear = state.verdict is Reason.COLLAPSED and not state.dips
    return 1 if is_clear else policy.min_drafts * state.overdispersion


def evidence_of(state: MonitorState) -> tuple[SpecDecodeCounters, bool]:
    """
    The probes' drafts to judge by, and whether they surely met a better text than the one it stopped for.

    If the latest did, they are judged alone.  If not, nothing has changed, and one of many probes would
    look good by chance: then all of them count together.
    """
    changed = tuple(takewhile(lambda drafts: _is_better_text(drafts, state.stopped_for), state.probed[::-1]))
    return total_of(changed or state.probed), bool(changed)


def _is_better_text(drafts: SpecDecodeCounters, earlier: SpecDecodeCounters, least: int = 1) -> bool:
    change = rise(drafts, earlier, min(deepest(drafts, least), deepest(earlier, least)))
    return change is not None and change > CERTAIN
