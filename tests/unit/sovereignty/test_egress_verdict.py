"""Never `closed` without proof, nor when open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.sovereignty.egress.probe import Kind, Outcome, Probe, Result
from appliance.sovereignty.egress.verdict import Verdict, judge

WAYS_OUT = [kind for kind in Kind if kind is not Kind.CONTROL]
HOSTS = ["1.1.1.1", "8.8.8.8", "192.0.2.1", "2606:4700:4700::1111", "2001:db8::1", "proxy.bank"]
BLOCKED = {Outcome.UNREACHABLE, Outcome.PROHIBITED, Outcome.TIMED_OUT, Outcome.UNRESOLVED}


def ended(outcome: Outcome, host: str = "1.1.1.1", kind: Kind = Kind.TCP, detail: str = "") -> Result:
    return Result(probe=Probe(kind=kind, host=host, port=443), outcome=outcome, detail=detail)


CONTROL = ended(Outcome.CONNECTED, "127.0.0.1", Kind.CONTROL)

results = st.lists(
    st.builds(ended, st.sampled_from(Outcome), st.sampled_from(HOSTS), st.sampled_from(WAYS_OUT)), max_size=12
)
failed_controls = st.none() | st.builds(
    ended,
    st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.CONNECTED]),
    st.just("10.0.0.5"),
    st.just(Kind.CONTROL),
)


@given(failed_controls, results)
def test_nothing_is_closed_without_a_control_that_connected(control, tried):
    """Whatever the attempts say, and however they are combined."""
    assert judge(control, tried).verdict is not Verdict.CLOSED


@given(st.just(CONTROL) | failed_controls, results)
def test_one_way_out_is_enough(control, tried):
    """The verdict is `open` exactly when something was reached, whatever the control did."""
    reached = any(result.outcome is Outcome.CONNECTED for result in tried)
    assert (judge(control, tried).verdict is Verdict.OPEN) == reached


@given(st.just(CONTROL) | failed_controls, results)
def test_only_what_is_closed_has_no_reasons(control, tried):
    """Somebody who reads another verdict is told why."""
    judgement = judge(control, tried)
    assert bool(judgement.reasons) == (judgement.verdict is not Verdict.CLOSED)


@given(results)
def test_closed_means_that_every_attempt_was_made_and_blocked(tried):
    """With a good control: at least one attempt, none behind the wall, none that could not be tried."""
    if judge(CONTROL, tried).verdict is Verdict.CLOSED:
        assert tried
        assert {result.outcome for result in tried} <= BLOCKED | {Outcome.REFUSED}


@pytest.mark.parametrize("outcome", sorted(BLOCKED))
def test_an_attempt_that_got_nowhere_is_closed(outcome):
    """No route, this machine's rules, silence, and a name nobody knows."""
    assert judge(CONTROL, [ended(outcome)]).verdict is Verdict.CLOSED


@pytest.mark.parametrize("outcome", [Outcome.REFUSED_BY_WALL, Outcome.FAILED])
def test_an_attempt_that_says_nothing_of_the_network_is_inconclusive(outcome):
    """Even beside others that got nowhere."""
    judgement = judge(CONTROL, [ended(Outcome.TIMED_OUT), ended(outcome, "8.8.8.8", detail="EMFILE")])
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "8.8.8.8" in judgement.reasons[0]


def test_a_refusal_alone_may_have_come_from_outside():
    """A host without a listener answers with a reset, as a firewall does."""
    judgement = judge(CONTROL, [ended(Outcome.REFUSED), ended(Outcome.TIMED_OUT, "192.0.2.1")])
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "1.1.1.1:443 refused" in judgement.reasons[0]


def test_a_refusal_is_a_firewalls_where_an_address_that_nobody_has_refuses_too():
    """Who answers for 192.0.2.1 is on the way."""
    tried = [ended(Outcome.REFUSED), ended(Outcome.REFUSED, "192.0.2.1")]
    assert judge(CONTROL, tried).verdict is Verdict.CLOSED


@pytest.mark.parametrize(
    ("host", "kind"), [("2001:db8::1", Kind.TCP), ("192.0.2.1", Kind.UDP)], ids=["family", "protocol"]
)
def test_a_firewall_is_only_believed_for_what_it_refused(host, kind):
    """One that rejects IPv6, or UDP, may let IPv4, or TCP, pass."""
    tried = [ended(Outcome.REFUSED), ended(Outcome.REFUSED, host, kind)]
    assert judge(CONTROL, tried).verdict is Verdict.INCONCLUSIVE


def test_a_refusal_of_a_metadata_service_or_a_proxy_needs_no_witness():
    """Both are next door: a reset from there means that there is no such service."""
    tried = [
        ended(Outcome.REFUSED, "169.254.169.254", Kind.METADATA),
        ended(Outcome.REFUSED, "p", Kind.PROXY),
    ]
    assert judge(CONTROL, tried).verdict is Verdict.CLOSED


def test_the_reason_for_open_says_what_was_reached():
    """With what it answered."""
    judgement = judge(None, [ended(Outcome.CONNECTED, "8.8.8.8", Kind.UDP, "a query was answered")])
    assert judgement.reasons == ("udp 8.8.8.8:443 connected (a query was answered)",)
