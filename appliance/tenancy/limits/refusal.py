"""
Limits as clients see them: headers with every answer, and the error for a refused request.

The headers are OpenAI's: `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`.  If several limits
apply to the same thing, the one with the least remaining is reported.
"""

import math
from collections.abc import Iterable
from zoneinfo import ZoneInfo

from appliance.errors import BudgetUsedUpError, LimitReachedError, RequestOverLimitError
from appliance.tenancy.limits.calendar import WINDOW_SECONDS, period_at
from appliance.tenancy.limits.holding import Holding
from appliance.tenancy.limits.ledger import LimitDecision
from appliance.tenancy.limits.quota import Measure, Quota

_UNITS = {
    Measure.REQUESTS: "requests per minute",
    Measure.TOKENS: "tokens per minute",
    Measure.CONCURRENT: "concurrent requests",
    Measure.DAY: "tokens per day",
    Measure.MONTH: "tokens per month",
}


def render_headers(holdings: Iterable[Holding], now: float) -> dict[str, str]:
    """The headers for a request to which these limits apply; `now` is monotonic."""
    requests: Holding | None = None
    tokens: Holding | None = None
    for holding in holdings:
        if holding.is_tokens:
            if tokens is None or holding.remaining(now) < tokens.remaining(now):
                tokens = holding
        elif not holding.is_concurrent and (
            requests is None or holding.remaining(now) < requests.remaining(now)
        ):
            requests = holding
    headers: dict[str, str] = {}
    for what, least in (("requests", requests), ("tokens", tokens)):
        if least is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(least.quota.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(least.remaining(now))
            headers[f"x-ratelimit-reset-{what}"] = spell_seconds(_seconds_until_full(least, now))
    return headers


def _seconds_until_full(holding: Holding, now: float) -> float:
    if holding.taken.units and not holding.taken.period:
        return WINDOW_SECONDS  # the ledger does not contain it yet
    return max(0.0, holding.refilled_at - now)


def spell_seconds(seconds: float) -> str:
    """A duration as OpenAI writes it, in whole seconds: `0s`, `59s`, `6m0s`, `23h59m59s`."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def refusal(
    quota: Quota, decision: LimitDecision, units: int, *, holder: str, now: float, zone: ZoneInfo
) -> LimitReachedError:
    """The error for a request that needs so many units of the holder's limit; `now` is Unix time."""
    measure, seconds = quota.measure, decision.seconds
    of = f"{quota.limit} {_UNITS[measure]}" + (f" of the model `{quota.model}`" if quota.model else "")
    if seconds is None:
        shorter = "Send less, or ask for a shorter answer with `max_tokens`."
        advice = shorter if measure.is_tokens else "Ask the operator to raise it."
        return RequestOverLimitError(
            f"This request needs {units}, and the limit of {holder} is {of}. {advice}", limit=measure
        )
    if measure.is_budget:
        period = period_at(measure, now, zone)
        return BudgetUsedUpError(
            f"The limit of {holder}, {of}, is used up for {period.name} ({zone.key}). "
            f"It resets in {spell_seconds(seconds)}.",
            limit=measure,
            retry_seconds=seconds,
        )
    return LimitReachedError(
        f"The limit of {holder}, {of}, is reached. Try again in {spell_seconds(seconds)}.",
        limit=measure,
        retry_seconds=seconds,
    )
