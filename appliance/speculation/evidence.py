"""
What the evidence says of a worker's drafts: useless, losing, paying, better or worse than they were.

Questions to a `Watch`, answered without changing it; `appliance.monitor` acts on the answers.

How sure an answer has to be depends on what a mistake costs.  One number of draft tokens is taken
for another on a hunch, since both draft.  Speculation stops, and comes back, only on proof.  Requests
of several kinds at once are judged by their average: the more one window differs from the next, and
the more often speculation has come and gone lately, the more drafts that takes.
"""

import math
from itertools import takewhile

from appliance.speculation.goodput import (
    Costs,
    acceptance_length,
    aged,
    best_choice,
    deepest,
    gain,
    payoffs,
    rise,
    unevenness,
)
from appliance.speculation.state import (
    SHORT_WINDOW,
    WINDOWS_REMEMBERED,
    MonitorPolicy,
    Watch,
    collapse_limit,
    joined,
    least_promised,
)
from appliance.speculation.values import Reason, SpecDecodeCounters

HUNCH, LIKELY, SURE, CERTAIN = 1.0, 1.64, 2.33, 3.0
"""Standard deviations: one chance in six, twenty, a hundred and a thousand of being wrong."""
STRIKE = 2
"""So many times more drafts must speak against speculation for each time it came back lately."""
LONGER_THAN_A_DIP = 3
"""So many times longer than any dip that ended by itself a collapse has to last."""


def is_useless(watch: Watch, costs: Costs, policy: MonitorPolicy, now: float) -> bool:
    """Whether the draft has collapsed, and is not so cheap that it pays even so."""
    counters = recent_text(watch, policy, now)
    if counters is None:
        return False
    depth = deepest(counters, policy.min_drafts)
    length = acceptance_length(counters, depth)
    if length is None or length.upper(SURE) >= collapse_limit(watch, policy, depth):
        return False
    # That it surely changed for the worse is proof enough; what always was so has to be looked at longer.
    sure = 0.0 if counters.drafts < watch.long_window.drafts else HUNCH
    found = payoffs(counters, costs.exactly(), watch.choices)
    if all(estimate.upper(sure) < policy.margin for estimate in found.values()):
        return True
    # That it pays even so has to be known.  A sweep on a busy machine may be wrong by half, and the next be a
    # minute away; whoever stops looks again in seconds.
    return all(estimate.mean < LIKELY * math.sqrt(costs.ratios[k].variance) for k, estimate in found.items())


def recent_text(watch: Watch, policy: MonitorPolicy, now: float) -> SpecDecodeCounters | None:
    """The newest drafts; all of the long window as long as they are surely no worse than the rest of it."""
    recent, longer = watch.newest(_drafts_of_a_collapse(watch, policy, now)), watch.long_window
    if recent is None:
        return None
    change = rise(recent, longer, min(deepest(recent, policy.min_drafts), deepest(longer, policy.min_drafts)))
    return recent if change is not None and change < -CERTAIN else longer


def _drafts_of_a_collapse(watch: Watch, policy: MonitorPolicy, now: float) -> int:
    if not watch.dips:
        # Traffic of one kind that collapses again after it came back is no borderline.
        is_one_kind = watch.unlikeness == 1.0
        stopping = SHORT_WINDOW * policy.min_drafts if is_one_kind else _drafts_to_stop(watch, policy, now)
        return min(stopping, _memory(policy))
    longest = LONGER_THAN_A_DIP * max(watch.dips)
    return min(max(_drafts_to_lose(watch, policy, now), longest), _memory(policy))


def _drafts_to_lose(watch: Watch, policy: MonitorPolicy, now: float) -> int:
    several_kinds: float = watch.unlikeness**1.5
    return min(round(_drafts_to_stop(watch, policy, now) * several_kinds), _memory(policy))


def _drafts_to_stop(watch: Watch, policy: MonitorPolicy, now: float) -> int:
    strikes = len(watch.flips_lately(now)) // 2
    return int(SHORT_WINDOW * policy.min_drafts * STRIKE**strikes)


def _memory(policy: MonitorPolicy) -> int:
    return WINDOWS_REMEMBERED * policy.window_drafts


def is_losing(watch: Watch, costs: Costs, policy: MonitorPolicy, now: float) -> bool:
    """Whether even the best number of draft tokens is slower than none: by much of late, or for long."""
    least, is_sure = _drafts_to_lose(watch, policy, now), False
    for counters, spans in ((watch.window, ()), (watch.long_window, watch.windows)):
        best = best_choice(counters, costs.exactly(), watch.choices, least_drafts=policy.min_drafts)
        if best is None:
            continue
        k, found = best
        if found.mean > 0:
            return False
        # More drafts would tell more about the text, and may be waited for.  Costs are not known
        # better for waiting.
        text = SURE * math.sqrt(found.variance + unevenness(spans, k))
        cost = HUNCH * math.sqrt(costs.ratios[k].variance)
        if counters.drafts >= least and found.mean + math.hypot(text, cost) < -policy.margin:
            is_sure = True
    return is_sure


def has_collapsed(watch: Watch, policy: MonitorPolicy) -> bool:
    """
    Whether a draft that loses at the batch size in use has collapsed, so that it should stop at every one.

    The newest drafts tell, however often speculation stopped before, and whatever a draft once paid.  That
    it falls short of its record only changes the reason, so there the likelier of the two is enough.
    """
    newest, longer = watch.newest(policy.min_drafts), watch.long_window
    if newest is not None:
        depth = deepest(newest, policy.min_drafts)
        length = acceptance_length(newest, depth)
        if length is not None and length.upper(SURE) < collapse_limit(watch, policy, depth):
            return True
    depth = deepest(longer, policy.min_drafts)
    length = acceptance_length(longer, depth)
    return length is not None and length.mean < least_promised(watch, depth)


def better_choice(watch: Watch, costs: Costs, current: int, policy: MonitorPolicy) -> int | None:
    """A number of draft tokens that gives more than the one in use, if there is one."""
    for counters, other, sure in (
        (watch.window, watch.long_window, LIKELY),
        (watch.long_window, watch.window, HUNCH),
    ):
        best = best_choice(counters, costs, watch.choices)
        better = gain(counters, costs, best[0], current) if best is not None else None
        if best is None or better is None or better.lower(sure) <= policy.switch_margin:
            continue
        # What was so over a long time may be over.
        confirmed = gain(other, costs, best[0], current)
        if sure == LIKELY or confirmed is None or confirmed.mean > 0:
            return best[0]
    return None


def is_worth_a_try(watch: Watch, policy: MonitorPolicy) -> bool:
    """Whether the text got so much better that more draft tokens than were tried lately may pay."""
    recent = watch.newest(2 * policy.min_drafts)
    return recent is not None and _is_better_text(recent, watch.long_window, policy.min_drafts)


def would_pay(watch: Watch, bucket: int, policy: MonitorPolicy, now: float) -> bool | None:
    """Whether what probes drafted would pay now; None where that is not clear yet."""
    drafts, is_new = evidence_of(watch)
    costs = aged(watch.costs(bucket), now)
    found = payoffs(drafts, costs, watch.choices).values()
    if not found:
        depth = deepest(drafts, 1)
        length, limit = acceptance_length(drafts, depth), collapse_limit(watch, policy, depth)
        if length is None or length.lower(LIKELY) < limit < length.upper(LIKELY):
            return None
        return length.mean > limit
    has_collapsed = watch.verdict is Reason.COLLAPSED
    if is_new and drafts.drafts < _drafts_to_return(watch, policy):
        return None
    sure, margin = (LIKELY if has_collapsed else SURE, 0.0) if is_new else (CERTAIN, policy.margin)
    if any(estimate.lower(sure) > margin for estimate in found):
        return True
    latest = payoffs(watch.probed[-1], costs, watch.choices).values()
    is_hopeful = any(estimate.mean > policy.margin for estimate in latest)
    return None if is_hopeful or any(estimate.upper(HUNCH) > policy.margin for estimate in found) else False


def _drafts_to_return(watch: Watch, policy: MonitorPolicy) -> float:
    """Drafts of a better text it takes: a few requests of many kinds may only be luck."""
    # What had collapsed and is better is back; what did not quite pay may not have changed.
    is_clear = watch.verdict is Reason.COLLAPSED and not watch.dips
    return 1 if is_clear else policy.min_drafts * watch.unlikeness


def evidence_of(watch: Watch) -> tuple[SpecDecodeCounters, bool]:
    """
    The probes' drafts to judge by, and whether they surely met a better text than the one it stopped for.

    If the latest did, they are judged by themselves.  If not, nothing has changed, and who looks often
    enough sees what he hopes for: then all of them count, and have to prove it.
    """
    changed = tuple(takewhile(lambda drafts: _is_better_text(drafts, watch.stopped_for), watch.probed[::-1]))
    return joined(changed or watch.probed), bool(changed)


def _is_better_text(drafts: SpecDecodeCounters, earlier: SpecDecodeCounters, least: int = 1) -> bool:
    change = rise(drafts, earlier, min(deepest(drafts, least), deepest(earlier, least)))
    return change is not None and change > CERTAIN
