"""What gateways hold of one tenant's limits, report by report."""

from zoneinfo import ZoneInfo

import pytest

from appliance.errors import LimitsUnavailableError
from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.estimate import TokenEstimate
from appliance.tenancy.limits.holding import QUIET_REPORTS
from appliance.tenancy.limits.ledger import (
    LeaseTerms,
    LimitVerdict,
    TenantLedger,
    decode_ledger,
    encode_ledger,
    exchange,
)
from appliance.tenancy.limits.share import TenantShare

NOON = 20_410.0 * 86400 + 43_200
TERMS = LeaseTerms(lease_seconds=10.0, renew_seconds=0.5, zone=ZoneInfo("UTC"))


class Scene:
    """Some gateways with one book and one clock."""

    def __init__(self, limits: Limits, *names: str) -> None:
        self.now, self.ledger = NOON, TenantLedger()
        self.shares = {name: TenantShare(limits) for name in names or ("a",)}

    @property
    def share(self) -> TenantShare:
        return self.shares["a"]

    def send(self, name="a", *waiting, **options):
        """Send a report and return the answer, which has not been heard yet."""
        share = self.shares[name]
        report = share.report(tuple(self.need(name, tokens) for tokens in waiting), **options)
        return exchange(self.ledger, share.quotas, name, report, now=self.now, terms=TERMS)

    def receive(self, reply, name="a"):
        self.shares[name].apply_reply(reply, asked=self.now, now=self.now)
        return reply

    def round(self, name="a", *waiting, **options):
        return self.receive(self.send(name, *waiting, **options), name)

    def need(self, name, tokens):
        return self.shares[name].need("demo", TokenEstimate(prompt=tokens, completion=0))

    def take(self, name="a", tokens=1):
        return self.shares[name].take(self.need(name, tokens), self.now)

    def admit(self, name="a", tokens=1):
        """Wait for the book, as a request does that finds nothing."""
        assert self.round(name, tokens).decisions[0].verdict is LimitVerdict.GRANTED
        return self.take(name, tokens)

    def spent(self, key):
        return sum(self.ledger.spent.get(key, {}).values())


def test_nothing_is_admitted_before_the_first_exchange():
    assert Scene(Limits(requests_per_minute=5)).take() is None


def test_request_takes_units_of_every_limit_or_of_none():
    scene = Scene(Limits(requests_per_minute=5, tokens_per_minute=10))
    scene.admit(tokens=10)
    (decision,) = scene.round("a", 1).decisions
    assert (decision.verdict, decision.key) == (LimitVerdict.REFUSED, "tokens_per_minute")
    assert scene.spent("requests_per_minute") == 1


def test_request_takes_a_concurrency_unit_per_sequence():
    """One of more sequences than the limit needs all units, and so runs alone."""
    scene = Scene(Limits(concurrent_requests=4))
    several, many = (TokenEstimate(prompt=1, completion=1, sequences=count) for count in (3, 100))
    scene.admit()
    assert scene.share.take(scene.share.need("demo", many), scene.now) is None
    ((_, units),) = scene.share.need("demo", several)
    assert units == 3
    ((_, units),) = scene.share.need("demo", many)
    assert units == 4
    ((_, units),) = Scene(Limits(concurrent_requests=0)).share.need("demo", many)
    assert units == 1


def test_request_counts_against_limits_of_its_model():
    """A model without limits of its own is bounded by the tenant's alone."""
    limits = Limits(requests_per_minute=5, by_model={"other": Limits(requests_per_minute=0)})
    scene = Scene(limits)
    assert scene.admit() is not None
    need = scene.share.need("other", TokenEstimate(prompt=1, completion=0))
    assert [holding.key for holding, _ in need] == ["requests_per_minute", "requests_per_minute/other"]


def test_usual_request_needs_no_exchange():
    scene = Scene(Limits(requests_per_minute=1000))
    scene.admit()
    scene.round()
    assert [scene.take() is not None for _ in range(4)] == [True] * 4


def test_units_stay_held_for_a_while_after_the_last_request():
    """Until a minute has passed without a request; then all of it is released."""
    scene = Scene(Limits(requests_per_minute=1000))
    scene.admit()
    for _ in range(20):
        scene.round()
    assert scene.share.holdings["requests_per_minute"].free > 0
    for _ in range(QUIET_REPORTS):
        scene.round()
    assert scene.share.is_idle
    assert scene.ledger.leases["a"].held == {"requests_per_minute": 0}


def test_unused_tokens_are_released_at_once():
    scene = Scene(Limits(tokens_per_minute=100))
    reservation = scene.admit(tokens=100)
    reservation.settle(30)
    assert scene.take(tokens=70) is not None
    assert scene.take(tokens=1) is None


def test_unused_tokens_of_a_reported_reservation_are_refunded():
    scene = Scene(Limits(tokens_per_minute=100))
    reservation = scene.admit(tokens=100)
    scene.round()
    assert scene.spent("tokens_per_minute") == 100
    reservation.settle(30)
    scene.round()
    assert scene.spent("tokens_per_minute") == 30
    assert scene.admit(tokens=70) is not None


def test_unused_tokens_are_refunded_if_the_report_is_in_flight():
    scene = Scene(Limits(tokens_per_minute=100))
    reservation = scene.admit(tokens=100)
    reply = scene.send()
    reservation.settle(30)
    scene.receive(reply)
    scene.round()
    assert scene.spent("tokens_per_minute") == 30


def test_usage_outside_the_window_is_not_refunded():
    scene = Scene(Limits(tokens_per_minute=100))
    reservation = scene.admit(tokens=60)
    scene.round()
    for _ in range(8):
        scene.now += 9
        scene.round()
    reservation.settle(0)
    scene.round()
    assert scene.spent("tokens_per_minute") == 0
    assert scene.share.holdings["tokens_per_minute"].remaining(scene.now) == 100


def test_settle_is_idempotent():
    scene = Scene(Limits(tokens_per_minute=100, concurrent_requests=2))
    reservation = scene.admit(tokens=50)
    reservation.settle(20)
    before = [(holding.free, holding.in_use) for holding in scene.share.holdings.values()]
    for tokens in (0, 50, 90):
        reservation.settle(tokens)
    assert [(holding.free, holding.in_use) for holding in scene.share.holdings.values()] == before


def test_usage_beyond_a_reservation_is_charged():
    """Requests after it wait for it, and no other request takes the units it needs."""
    scene = Scene(Limits(tokens_per_minute=100))
    scene.admit(tokens=10).settle(150)
    scene.round()
    assert scene.spent("tokens_per_minute") == 150
    (decision,) = scene.round("a", 1).decisions
    assert decision.verdict is LimitVerdict.REFUSED
    scene.now += 61
    assert scene.admit(tokens=100) is not None


def test_usage_beyond_yesterdays_reservation_is_not_charged_today():
    scene = Scene(Limits(tokens_per_day=100))
    scene.now = NOON + 43_199
    reservation = scene.admit(tokens=10)
    scene.round()
    scene.now += 2
    scene.round()
    reservation.settle(80)
    scene.round()
    assert scene.spent("tokens_per_day") == 0


def test_held_budget_ends_at_midnight():
    scene = Scene(Limits(tokens_per_day=100))
    scene.now = NOON + 43_198
    scene.admit(tokens=10)
    scene.round()
    assert scene.take(tokens=10) is not None
    scene.now += 2
    assert scene.take(tokens=1) is None
    scene.round()
    assert scene.share.holdings["tokens_per_day"].remaining(scene.now) == 100


def test_guessed_tokens_are_capped_by_the_limit():
    scene = Scene(Limits(tokens_per_minute=100))

    def units(prompt, completion, *, is_guess):
        estimate = TokenEstimate(prompt=prompt, completion=completion, is_guess=is_guess)
        return scene.share.need("demo", estimate)[0][1]

    assert units(10, 512, is_guess=True) == 100
    assert units(10, 512, is_guess=False) == 522
    assert units(130, 512, is_guess=True) == 130


def test_killed_gateway_costs_no_more_than_it_held():
    """It counts as spent when its lease runs out, and is back a minute later."""
    scene = Scene(Limits(requests_per_minute=100, concurrent_requests=10), "a", "b")
    scene.admit("a")
    scene.round("a")
    held = scene.ledger.leases["a"].held
    assert 0 < held["requests_per_minute"] < 50
    scene.now += TERMS.lease_seconds + 0.1
    scene.round("b")
    assert scene.spent("requests_per_minute") == 1 + held["requests_per_minute"]
    assert scene.shares["b"].holdings["concurrent_requests"].remaining(scene.now) == 10
    scene.now += 61
    scene.round("b")
    assert scene.shares["b"].holdings["requests_per_minute"].remaining(scene.now) == 100


def test_unused_units_are_refunded_after_a_lost_lease():
    """The book takes that back: an outage of the database costs the tenant nothing."""
    scene = Scene(Limits(tokens_per_day=1000, requests_per_minute=1000))
    scene.admit(tokens=5)
    scene.round()
    scene.now += TERMS.lease_seconds + 0.1
    assert scene.take() is None
    scene.round()
    scene.round()
    assert scene.spent("tokens_per_day") == 5
    assert scene.spent("requests_per_minute") == 1


def test_running_requests_count_again_after_a_lost_lease():
    scene = Scene(Limits(concurrent_requests=2), "a", "b")
    running = [scene.admit("a"), scene.admit("a")]
    scene.now += TERMS.lease_seconds + 0.1
    scene.admit("b")
    scene.round("a")
    assert scene.round("b", 1).decisions[0].verdict is LimitVerdict.REFUSED
    for reservation in running:
        reservation.settle(0)
    scene.round("a", leaves=True)
    assert scene.admit("b") is not None


def test_resent_report_is_applied_once():
    """If an answer is lost, it is unknown whether its report arrived."""
    scene = Scene(Limits(tokens_per_minute=100))
    scene.admit(tokens=10)
    scene.send()
    scene.send()
    scene.round()
    assert scene.spent("tokens_per_minute") == 10


def test_units_one_gateway_does_not_need_go_to_another():
    scene = Scene(Limits(requests_per_minute=12), "a", "b")
    scene.admit("a")
    scene.round("a")
    kept = scene.shares["a"].holdings["requests_per_minute"].free
    assert kept > 0
    verdicts = [each.verdict for each in scene.round("b", *[1] * 11).decisions]
    assert verdicts == [LimitVerdict.GRANTED] * (11 - kept) + [LimitVerdict.WAITS] * kept
    assert all(scene.take("b") for _ in range(11 - kept))
    assert scene.round("a").is_pressed
    scene.round("a")
    assert [each.verdict for each in scene.round("b", *[1] * kept).decisions] == [LimitVerdict.GRANTED] * kept
    assert all(scene.take("b") for _ in range(kept))
    assert scene.round("b", 1).decisions[0].verdict is LimitVerdict.REFUSED


def test_requests_do_not_wait_for_a_silent_gateway():
    """What it holds comes back when its lease runs out, not sooner."""
    scene = Scene(Limits(requests_per_minute=12), "a", "b")
    scene.admit("a")
    scene.round("a")
    scene.now += TERMS.patience_seconds + 0.1
    verdicts = {each.verdict for each in scene.round("b", *[1] * 12).decisions}
    assert verdicts == {LimitVerdict.GRANTED, LimitVerdict.REFUSED}


def test_changed_limits_apply_at_once():
    scene = Scene(Limits(requests_per_minute=100))
    scene.admit()
    scene.round()
    scene.share.change(Limits(requests_per_minute=2, concurrent_requests=5))
    assert scene.take() is None
    scene.round()
    assert scene.admit() is not None
    assert scene.round("a", 1).decisions[0].verdict is LimitVerdict.REFUSED


@pytest.mark.parametrize("limits", [Limits(requests_per_minute=0), Limits(tokens_per_day=0)])
def test_limit_of_zero_refuses_every_request(limits):
    (decision,) = Scene(limits).round("a", 1).decisions
    assert (decision.verdict, decision.seconds) == (LimitVerdict.REFUSED, None)


@pytest.mark.parametrize("seconds", [1, 30, 3600, 86400, 40 * 86400])
def test_clock_set_back_restores_no_units(seconds):
    scene = Scene(Limits(tokens_per_day=10, requests_per_minute=1), "a", "b")
    scene.admit(tokens=10)
    scene.round()
    scene.now -= seconds
    assert scene.round("b", 1).decisions[0].verdict is LimitVerdict.REFUSED


def test_clock_set_back_delays_requests_at_most_two_minutes():
    scene = Scene(Limits(requests_per_minute=1))
    scene.admit()
    scene.now -= 5 * 86400
    scene.round()
    scene.now += 62
    assert scene.admit() is not None


def test_ledger_is_read_back_as_written():
    scene = Scene(Limits(tokens_per_day=10, concurrent_requests=3), "a", "b")
    scene.admit("a", 2)
    scene.round("b", 100)
    assert decode_ledger(encode_ledger(scene.ledger)) == scene.ledger


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"leases": {"a": {}}}', '{"leases": {}, "more": 1}'])
def test_unreadable_ledger_raises_limits_unavailable(text):
    """Requests of its tenant are refused as long as it is stored; the gateway keeps running."""
    with pytest.raises(LimitsUnavailableError, match="cannot be read"):
        decode_ledger(text)
