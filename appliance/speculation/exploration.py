"""
Exploration: a few steps with another number of draft tokens, to measure what the table's own cannot show.

It is always on and never backs off.  Its price is the tokens it loses by expectation, in engine seconds: a
bank earns a fixed share of engine time and pays for each probe.  Steps that are expected to give as much as
the table's cost nothing.  For some seconds after a change of traffic is suspected the bank may lend.  What a
draft takes to catch up is known afterwards, so it is owed; the more is owed, the more of it is saved first.
"""

import math
from dataclasses import replace

from appliance.speculation.costs import NO_TIME
from appliance.speculation.goodput import LEAST_STEPS
from appliance.speculation.state import BUDGET_SECONDS, LOAN_SECONDS, MonitorPolicy, MonitorState
from appliance.speculation.values import SETTLE_SECONDS

MOST_STEPS = 12
"""Maximum measured steps of one probe: the next tick decides whether more are worth it."""
PROMISING_SECONDS, LONGEST_SECONDS = 0.5, 2.0
"""A probe that is expected to pay may take more steps for so long; on a slow engine any takes fewer."""
PARTS = 2
"""A probe takes its steps in so many parts as long as their cost is in doubt."""
DOUBT = 0.1
"""Standard deviation of a cost, a logarithm, above which it is."""
BESIDE_SECONDS = 0.08
"""Time before each part in which the table's own steps are measured."""
TURN = 4
"""Every so many probes try the next K in turn instead of the most promising one."""


def start_probe(state: MonitorState, bucket: int, policy: MonitorPolicy, now: float) -> MonitorState:
    """
    Start a probe if the bank can pay for it.

    It tries the most promising K, and every few times the next one in turn: for that the bank saves, unless
    the promising one may pay.
    """
    current = state.draft_tokens(bucket)
    gains = {k: state.promised_gain(bucket, k, current, now) for k in state.choices if k != current}
    if not gains:
        return state
    most_lent, most_owed = (policy.exploration_share * each for each in (LOAN_SECONDS, BUDGET_SECONDS))
    best = max(gains, key=lambda k: gains[k].upper(policy.sure))
    may_pay = gains[best].upper(policy.sure) > policy.switch_gain
    candidates = [(best, may_pay and now - state.suspected_at < policy.recent_seconds)]
    if state.probes % TURN == TURN - 1:
        turn = list(gains)[state.probes // TURN % len(gains)]
        candidates = [(turn, False), *(candidates if may_pay else ())]
    for k, is_lending in candidates:
        cost = state.costs.ratio(bucket, k, current, now)
        seconds = state.step_seconds * math.exp(cost.mean)
        loss = -seconds * min(0.0, math.expm1(gains[k].mean))
        loan = max(0.0, most_lent - state.debt) if is_lending else 0.0
        # After steps without drafts the draft has to catch up: on credit, but the less so the more is owed.
        is_on_credit = min(current, k) > 0 or (is_lending and state.debt < most_owed)
        saved = 0.0 if is_on_credit else min(1.0, max(0.0, state.debt - most_lent) / most_owed)
        budget = state.bank + loan - saved * state.catch_up
        affordable = budget / loss if loss else math.inf if budget >= 0.0 else 0.0
        rate = 1.0 / max(seconds, NO_TIME)
        most = MOST_STEPS if loss else max(MOST_STEPS, int(PROMISING_SECONDS * rate))
        most = max(LEAST_STEPS, min(most, int(LONGEST_SECONDS * rate)))
        # The first step of a part still verifies what the step before it drafted.
        unmeasured = 1 + int(SETTLE_SECONDS * rate)
        is_known = cost.variance <= DOUBT**2
        parts = 1 if is_known or min(most, affordable - PARTS * unmeasured) < PARTS * LEAST_STEPS else PARTS
        measured = int(min(most, affordable - parts * unmeasured))
        if measured >= LEAST_STEPS:
            beside = max(LEAST_STEPS // parts + unmeasured, int(BESIDE_SECONDS * rate))
            steps = measured // parts + unmeasured
            return replace(
                state,
                # In turn with the table's own steps, so that what slows the engine for a moment slows both.
                probe=((current, beside), (k, steps)) * parts,
                starts_probe=True,
                probes=state.probes + 1,
                probed_steps=state.probed_steps + parts * steps,
            )
    return state
