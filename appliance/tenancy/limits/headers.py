"""
What clients are told about their limits with every answer.

The headers are OpenAI's: `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`.  Of several limits
on the same thing, the one that leaves least is told.
"""

import math
from collections.abc import Iterable

from appliance.tenancy.limits.holding import Holding
from appliance.tenancy.limits.window import SECONDS


def render_headers(holdings: Iterable[Holding], now: float) -> dict[str, str]:
    """
    The headers for a request that falls under these limits.

    Args:
        holdings: of all limits it falls under.
        now: monotonic time.
    """
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
    if requests is not None:
        headers["x-ratelimit-limit-requests"] = str(requests.quota.limit)
        headers["x-ratelimit-remaining-requests"] = str(requests.remaining(now))
        headers["x-ratelimit-reset-requests"] = spell_seconds(_seconds_until_full(requests, now))
    if tokens is not None:
        headers["x-ratelimit-limit-tokens"] = str(tokens.quota.limit)
        headers["x-ratelimit-remaining-tokens"] = str(tokens.remaining(now))
        headers["x-ratelimit-reset-tokens"] = spell_seconds(_seconds_until_full(tokens, now))
    return headers


def _seconds_until_full(holding: Holding, now: float) -> float:
    if holding.batch.units and not holding.batch.period:
        return SECONDS  # the book has not seen it yet
    return max(0.0, holding.refilled_at - now)


def spell_seconds(seconds: float) -> str:
    """A duration as OpenAI spells it, in whole seconds: `0s`, `59s`, `6m0s`, `23h59m59s`."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
