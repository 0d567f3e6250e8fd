"""Retries are a share of the requests."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.admission.admission import RetryBudget


def test_a_quiet_gateway_may_retry_up_to_its_reserve():
    budget = RetryBudget(share=0.2, reserve=3)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_requests_refill_the_budget():
    """Four for one at a quarter."""
    budget = RetryBudget(share=0.25, reserve=3)
    while budget.take():
        pass
    for _ in range(4):
        assert not budget.take()
        budget.record_request()
    assert budget.take()


@given(st.floats(0, 1), st.floats(0, 50), st.lists(st.booleans(), max_size=300))
def test_retries_never_exceed_share_and_reserve(share: float, reserve: float, history: list):
    """Over any history of requests and failures."""
    budget, requests, retries = RetryBudget(share=share, reserve=reserve), 0, 0
    for is_request in history:
        if is_request:
            budget.record_request()
            requests += 1
        else:
            retries += budget.take()
        assert retries <= reserve + share * requests + 1e-6
        assert 0 <= budget.left <= reserve
