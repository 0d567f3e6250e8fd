"""Second tries are a share of the first."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.admission.retries import RetryBudget


def test_a_quiet_gateway_may_try_again_as_often_as_its_reserve():
    """And then no more."""
    budget = RetryBudget(share=0.2, reserve=3)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


def test_requests_earn_second_tries():
    """Five for one at a fifth."""
    budget = RetryBudget(share=0.25, reserve=3)
    while budget.take():
        pass
    for _ in range(4):
        assert not budget.take()
        budget.saw_request()
    assert budget.take()


@given(st.floats(0, 1), st.floats(0, 50), st.lists(st.booleans(), max_size=300))
def test_there_are_never_more_than_the_share_and_the_reserve(share: float, reserve: float, history: list):
    """Over any stretch of requests and failures."""
    budget, requests, retries = RetryBudget(share=share, reserve=reserve), 0, 0
    for is_request in history:
        if is_request:
            budget.saw_request()
            requests += 1
        else:
            retries += budget.take()
        assert retries <= reserve + share * requests + 1e-6
        assert 0 <= budget.left <= reserve
