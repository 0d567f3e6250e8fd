"""
What a request that a limit refuses is told: which limit it was, and when to come back.
"""

from zoneinfo import ZoneInfo

from appliance.errors import BudgetUsedUpError, LimitReachedError, RequestOverLimitError
from appliance.tenancy.limits.book import Decision
from appliance.tenancy.limits.calendar import period_at
from appliance.tenancy.limits.headers import spell_seconds
from appliance.tenancy.limits.quota import Measure, Quota

_UNITS = {
    Measure.REQUESTS: "requests per minute",
    Measure.TOKENS: "tokens per minute",
    Measure.CONCURRENT: "requests at once",
    Measure.DAY: "tokens per day",
    Measure.MONTH: "tokens per month",
}


def refusal(quota: Quota, decision: Decision, units: int, *, now: float, zone: ZoneInfo) -> LimitReachedError:
    """
    The error for a request that a limit refuses.

    Args:
        quota: the limit.
        decision: what the book said.
        units: what the request needs of the limit.
        now: Unix time.
        zone: where days and months begin.
    """
    measure, seconds = quota.measure, decision.seconds
    of = f"{quota.limit} {_UNITS[measure]}" + (f" of the model `{quota.model}`" if quota.model else "")
    if seconds is None:
        shorter = "Send less, or ask for a shorter answer with `max_tokens`."
        advice = shorter if measure.is_tokens else "Ask the operator for more."
        return RequestOverLimitError(
            f"This request needs {units}, and your limit is {of}. {advice}", limit=measure
        )
    if measure.is_budget:
        period = period_at(measure, now, zone)
        return BudgetUsedUpError(
            f"Your limit of {of} is used up for {period.name} ({zone.key}). "
            f"It begins anew in {spell_seconds(seconds)}.",
            limit=measure,
            retry_seconds=seconds,
        )
    return LimitReachedError(
        f"Your limit of {of} is reached. Try again in {spell_seconds(seconds)}.",
        limit=measure,
        retry_seconds=seconds,
    )
