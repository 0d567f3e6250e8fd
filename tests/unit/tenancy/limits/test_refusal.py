"""What clients are told."""

from zoneinfo import ZoneInfo

import pytest

from appliance.errors import BudgetUsedUpError, LimitReachedError, RequestOverLimitError
from appliance.tenancy.limits.holding import Holding
from appliance.tenancy.limits.ledger import LimitDecision, LimitVerdict
from appliance.tenancy.limits.quota import Measure, Quota
from appliance.tenancy.limits.refusal import refusal, render_headers, spell_seconds

UTC = ZoneInfo("UTC")
NOON = 1_763_726_400.0  # 2025-11-21


@pytest.mark.parametrize(
    ("seconds", "spelt"),
    [(0, "0s"), (0.2, "1s"), (59, "59s"), (59.5, "1m0s"), (360, "6m0s"), (86399, "23h59m59s")],
)
def test_durations_are_formatted_like_openai(seconds, spelt):
    assert spell_seconds(seconds) == spelt


def holding(measure, limit, free, *, refilled_at=0.0):
    made = Holding(Quota(measure=measure, limit=limit))
    made.pool, made.refilled_at = free, refilled_at
    return made


def test_headers_show_the_limit_with_least_remaining():
    """Of tokens by the minute and of the day; places are told in no header."""
    headers = render_headers(
        [
            holding(Measure.REQUESTS, 60, 59, refilled_at=130.0),
            holding(Measure.TOKENS, 1000, 900),
            holding(Measure.DAY, 50_000, 20, refilled_at=3700.0),
            holding(Measure.CONCURRENT, 1, 0),
        ],
        now=100.0,
    )
    assert headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "50000",
        "x-ratelimit-remaining-tokens": "20",
        "x-ratelimit-reset-tokens": "1h0m0s",
    }


def test_new_usage_resets_in_a_minute():
    requests = holding(Measure.REQUESTS, 60, 58)
    requests.free = 2
    requests.take(1)
    headers = render_headers([requests], now=100.0)
    assert headers["x-ratelimit-remaining-requests"] == "59"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"


def refused(measure, seconds, *, model=None, holder="your tenant"):
    quota = Quota(measure=measure, limit=60, model=model)
    decision = LimitDecision(LimitVerdict.REFUSED, quota.key, seconds)
    return refusal(quota, decision, 70, holder=holder, now=NOON, zone=UTC)


def test_refusal_names_the_limit_and_the_retry_time():
    error = refused(Measure.REQUESTS, 22.5)
    assert type(error) is LimitReachedError
    assert str(error) == "The limit of your tenant, 60 requests per minute, is reached. Try again in 23s."
    assert error.retry_seconds == 22.5


def test_refusal_by_a_model_limit_names_the_model():
    assert "60 concurrent requests of the model `demo`" in str(refused(Measure.CONCURRENT, 1.0, model="demo"))


def test_used_up_budget_names_its_period():
    error = refused(Measure.DAY, 3600.0)
    assert type(error) is BudgetUsedUpError
    assert str(error) == (
        "The limit of your tenant, 60 tokens per day, is used up for 2025-11-21 (UTC). It resets in 1h0m0s."
    )


@pytest.mark.parametrize(
    ("measure", "seconds"), [(Measure.REQUESTS, 1.0), (Measure.DAY, 1.0), (Measure.TOKENS, None)]
)
def test_refusal_by_a_limit_of_the_key_names_the_key(measure, seconds):
    assert "he limit of this key" in str(refused(measure, seconds, holder="this key"))


def test_request_over_the_limit_names_what_it_needs():
    error = refused(Measure.TOKENS, None)
    assert type(error) is RequestOverLimitError
    assert error.retry_seconds is None
    assert "needs 70" in str(error)
    assert "max_tokens" in str(error)
    assert "max_tokens" not in str(refused(Measure.CONCURRENT, None))
