"""A pause for a worker that keeps failing, then one probe."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.breaker import CLOSED, LONGEST_DOUBLINGS, Breaker, BreakerPolicy, BreakerState

POLICY = BreakerPolicy(failures=3, seconds=5.0)


def opened(now: float = 0.0) -> Breaker:
    breaker = CLOSED
    for _ in range(POLICY.failures):
        assert breaker.allows(now)
        breaker = breaker.failed(now, POLICY)
    return breaker


def test_breaker_opens_after_consecutive_failures():
    """And allows no request for its time."""
    breaker = opened()
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.allows(4.9)


def test_success_resets_the_failure_count():
    """Requests that no worker can answer do not open it."""
    breaker = CLOSED
    for _ in range(10):
        for _ in range(POLICY.failures - 1):
            breaker = breaker.failed(0.0, POLICY)
        breaker = breaker.succeeded()
    assert breaker is CLOSED


def test_open_breaker_admits_one_probe_after_its_time():
    """Other requests wait for its result."""
    breaker = opened()
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    assert breaker.allows(5.0)
    breaker = breaker.begun(5.0, POLICY)
    assert not breaker.allows(5.1)
    assert breaker.succeeded().allows(5.1)


def test_failed_probe_doubles_the_open_time():
    """Up to a limit."""
    breaker, now, rests = opened(), 5.0, []
    for _ in range(LONGEST_DOUBLINGS + 3):
        assert breaker.allows(now)
        breaker = breaker.begun(now, POLICY).failed(now, POLICY)
        assert not breaker.allows(now)
        rests.append(breaker.until - now)
        now = breaker.until
    assert rests[:3] == [10.0, 20.0, 40.0]
    assert rests[-1] == rests[-2] == 5.0 * 2**LONGEST_DOUBLINGS


def test_probe_without_result_is_followed_by_another():
    """A probe without a result blocks the next one for a limited time."""
    breaker = opened().begun(5.0, POLICY)
    assert not breaker.allows(9.9)
    assert breaker.allows(10.0)


def test_failures_in_flight_do_not_extend_the_open_time():
    """Fifty requests that fail together are one failure of the worker."""
    breaker = opened()
    for _ in range(50):
        breaker = breaker.failed(0.1, POLICY)
    assert breaker.until == 5.0
    assert breaker.trials_failed == 0


def test_request_through_a_closed_breaker_changes_nothing():
    """The usual case creates no new value."""
    assert CLOSED.begun(1.0, POLICY) is CLOSED
    assert CLOSED.succeeded() is CLOSED


@given(st.lists(st.tuples(st.sampled_from(["begin", "fail", "answer"]), st.floats(0, 30)), max_size=80))
def test_breaker_always_admits_a_probe_eventually(history: list[tuple[str, float]]):
    """After any events a request is allowed within a bounded time."""
    breaker, now = CLOSED, 0.0
    for event, pause in history:
        now += pause
        if event == "begin":
            breaker = breaker.begun(now, POLICY)
        elif event == "fail":
            breaker = breaker.failed(now, POLICY)
        else:
            breaker = breaker.succeeded()
            assert breaker.allows(now)
        assert breaker.allows(now + POLICY.seconds * 2**LONGEST_DOUBLINGS)
        assert breaker.is_closed is (breaker.state(now) is BreakerState.CLOSED)
        assert breaker.is_closed or breaker.failures >= POLICY.failures
