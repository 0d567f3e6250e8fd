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


def test_nothing_is_let_in_before_the_book_was_seen():
    """A gateway that has just started holds nothing."""
    assert Scene(Limits(requests_per_minute=5)).take() is None


def test_a_request_takes_of_every_limit_or_of_none():
    """What one limit refuses costs nothing of the others."""
    scene = Scene(Limits(requests_per_minute=5, tokens_per_minute=10))
    scene.admit(tokens=10)
    (decision,) = scene.round("a", 1).decisions
    assert (decision.verdict, decision.key) == (LimitVerdict.REFUSED, "tokens_per_minute")
    assert scene.spent("requests_per_minute") == 1


def test_a_request_counts_for_those_limits_that_are_about_it():
    """A model without limits of its own is bounded by the tenant's alone."""
    limits = Limits(requests_per_minute=5, by_model={"other": Limits(requests_per_minute=0)})
    scene = Scene(limits)
    assert scene.admit() is not None
    need = scene.share.need("other", TokenEstimate(prompt=1, completion=0))
    assert [holding.key for holding, _ in need] == ["requests_per_minute", "requests_per_minute/other"]


def test_the_usual_request_does_not_wait_for_the_book():
    """After the first one some are held for those to come."""
    scene = Scene(Limits(requests_per_minute=1000))
    scene.admit()
    scene.round()
    assert [scene.take() is not None for _ in range(4)] == [True] * 4


def test_who_asked_a_while_ago_still_finds_something_held():
    """Until a minute has passed without a request; then all of it is given back."""
    scene = Scene(Limits(requests_per_minute=1000))
    scene.admit()
    for _ in range(20):
        scene.round()
    assert scene.share.holdings["requests_per_minute"].free > 0
    for _ in range(QUIET_REPORTS):
        scene.round()
    assert scene.share.is_idle
    assert scene.ledger.leases["a"].held == {"requests_per_minute": 0}


def test_the_rest_of_a_reservation_comes_back_at_once():
    """Before it was reported it is there again without the book."""
    scene = Scene(Limits(tokens_per_minute=100))
    reservation = scene.admit(tokens=100)
    reservation.settle(30)
    assert scene.take(tokens=70) is not None
    assert scene.take(tokens=1) is None


def test_the_rest_of_a_reported_reservation_comes_back_with_the_next_report():
    """It is taken out of the slot it was entered in."""
    scene = Scene(Limits(tokens_per_minute=100))
    reservation = scene.admit(tokens=100)
    scene.round()
    assert scene.spent("tokens_per_minute") == 100
    reservation.settle(30)
    scene.round()
    assert scene.spent("tokens_per_minute") == 30
    assert scene.admit(tokens=70) is not None


def test_the_rest_of_a_reservation_whose_report_is_on_its_way_is_not_forgotten():
    """It waits for the answer, which says where it was entered."""
    scene = Scene(Limits(tokens_per_minute=100))
    reservation = scene.admit(tokens=100)
    reply = scene.send()
    reservation.settle(30)
    scene.receive(reply)
    scene.round()
    assert scene.spent("tokens_per_minute") == 30


def test_what_left_the_window_is_not_given_back_again():
    """A long answer's rest comes too late to count."""
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


def test_settling_again_changes_nothing():
    """The first word counts."""
    scene = Scene(Limits(tokens_per_minute=100, concurrent_requests=2))
    reservation = scene.admit(tokens=50)
    reservation.settle(20)
    before = [(holding.free, holding.in_use) for holding in scene.share.holdings.values()]
    for tokens in (0, 50, 90):
        reservation.settle(tokens)
    assert [(holding.free, holding.in_use) for holding in scene.share.holdings.values()] == before


def test_what_a_request_used_beyond_its_reservation_is_charged():
    """Those after it wait for it, and nobody else is let in on its account."""
    scene = Scene(Limits(tokens_per_minute=100))
    scene.admit(tokens=10).settle(150)
    scene.round()
    assert scene.spent("tokens_per_minute") == 150
    (decision,) = scene.round("a", 1).decisions
    assert decision.verdict is LimitVerdict.REFUSED
    scene.now += 61
    assert scene.admit(tokens=100) is not None


def test_what_was_used_beyond_a_reservation_of_yesterday_is_not_of_today():
    """A request counts on the day it began."""
    scene = Scene(Limits(tokens_per_day=100))
    scene.now = NOON + 43_199
    reservation = scene.admit(tokens=10)
    scene.round()
    scene.now += 2
    scene.round()
    reservation.settle(80)
    scene.round()
    assert scene.spent("tokens_per_day") == 0


def test_at_midnight_what_is_held_is_held_no_more():
    """A lease does not carry yesterday's budget into today."""
    scene = Scene(Limits(tokens_per_day=100))
    scene.now = NOON + 43_198
    scene.admit(tokens=10)
    scene.round()
    assert scene.take(tokens=10) is not None
    scene.now += 2
    assert scene.take(tokens=1) is None
    scene.round()
    assert scene.share.holdings["tokens_per_day"].remaining(scene.now) == 100


def test_a_guess_is_cut_to_what_the_limit_allows():
    """Nobody asked for a long answer; the prompt is what it is."""
    scene = Scene(Limits(tokens_per_minute=100))

    def units(prompt, completion, *, is_guess):
        estimate = TokenEstimate(prompt=prompt, completion=completion, is_guess=is_guess)
        return scene.share.need("demo", estimate)[0][1]

    assert units(10, 512, is_guess=True) == 100
    assert units(10, 512, is_guess=False) == 522
    assert units(130, 512, is_guess=True) == 130


def test_a_killed_gateway_takes_no_more_than_it_held():
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


def test_a_gateway_that_lost_its_lease_says_what_it_never_used():
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


def test_requests_under_way_on_a_gateway_that_lost_its_lease_are_counted_again():
    """They take a place, also where others took it meanwhile."""
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


def test_a_report_that_is_sent_again_is_entered_once():
    """Nobody knows of an answer that was lost whether its report came."""
    scene = Scene(Limits(tokens_per_minute=100))
    scene.admit(tokens=10)
    scene.send()
    scene.send()
    scene.round()
    assert scene.spent("tokens_per_minute") == 10


def test_what_one_gateway_does_not_need_is_handed_to_another():
    """Nobody is refused while there is something left."""
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


def test_nobody_waits_for_a_gateway_that_has_gone_silent():
    """What it holds comes back when its lease runs out, not sooner."""
    scene = Scene(Limits(requests_per_minute=12), "a", "b")
    scene.admit("a")
    scene.round("a")
    scene.now += TERMS.patience_seconds + 0.1
    verdicts = {each.verdict for each in scene.round("b", *[1] * 12).decisions}
    assert verdicts == {LimitVerdict.GRANTED, LimitVerdict.REFUSED}


def test_other_limits_take_hold_at_once():
    """What was used of those that stay is kept."""
    scene = Scene(Limits(requests_per_minute=100))
    scene.admit()
    scene.round()
    scene.share.change(Limits(requests_per_minute=2, concurrent_requests=5))
    assert scene.take() is None
    scene.round()
    assert scene.admit() is not None
    assert scene.round("a", 1).decisions[0].verdict is LimitVerdict.REFUSED


@pytest.mark.parametrize("limits", [Limits(requests_per_minute=0), Limits(tokens_per_day=0)])
def test_a_limit_of_nothing_lets_nothing_in(limits):
    """And says that waiting is of no use."""
    (decision,) = Scene(limits).round("a", 1).decisions
    assert (decision.verdict, decision.seconds) == (LimitVerdict.REFUSED, None)


@pytest.mark.parametrize("seconds", [1, 30, 3600, 86400, 40 * 86400])
def test_a_clock_that_is_set_back_brings_nothing_back(seconds):
    """Neither a minute's requests nor a budget."""
    scene = Scene(Limits(tokens_per_day=10, requests_per_minute=1), "a", "b")
    scene.admit(tokens=10)
    scene.round()
    scene.now -= seconds
    assert scene.round("b", 1).decisions[0].verdict is LimitVerdict.REFUSED


def test_a_clock_that_is_set_back_holds_nobody_up_for_longer_than_two_minutes():
    """Only budgets wait for their day."""
    scene = Scene(Limits(requests_per_minute=1))
    scene.admit()
    scene.now -= 5 * 86400
    scene.round()
    scene.now += 62
    assert scene.admit() is not None


def test_books_are_read_as_they_were_written():
    """Whatever is in them."""
    scene = Scene(Limits(tokens_per_day=10, concurrent_requests=3), "a", "b")
    scene.admit("a", 2)
    scene.round("b", 100)
    assert decode_ledger(encode_ledger(scene.ledger)) == scene.ledger


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"leases": {"a": {}}}', '{"leases": {}, "more": 1}'])
def test_a_book_that_cannot_be_read_is_an_error_of_ours(text):
    """Limits are refused for as long as it is there, and the gateway goes on."""
    with pytest.raises(LimitsUnavailableError, match="cannot be read"):
        decode_ledger(text)
