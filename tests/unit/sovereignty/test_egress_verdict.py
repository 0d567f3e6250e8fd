"""Never `closed` without proof, nor when open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.sovereignty.egress.judge import EgressVerdict, judge
from appliance.sovereignty.egress.probe import EgressProbe, ProbeKind, ProbeOutcome, ProbeResult

WAYS_OUT = [kind for kind in ProbeKind if kind is not ProbeKind.CONTROL]
HOSTS = ["1.1.1.1", "8.8.8.8", "192.0.2.1", "2606:4700:4700::1111", "2001:db8::1", "proxy.bank"]
BLOCKED = {ProbeOutcome.UNREACHABLE, ProbeOutcome.PROHIBITED, ProbeOutcome.TIMED_OUT, ProbeOutcome.UNRESOLVED}


def ended(
    outcome: ProbeOutcome, host: str = "1.1.1.1", kind: ProbeKind = ProbeKind.TCP, detail: str = ""
) -> ProbeResult:
    return ProbeResult(probe=EgressProbe(kind=kind, host=host, port=443), outcome=outcome, detail=detail)


CONTROL = ended(ProbeOutcome.CONNECTED, "127.0.0.1", ProbeKind.CONTROL)

results = st.lists(
    st.builds(ended, st.sampled_from(ProbeOutcome), st.sampled_from(HOSTS), st.sampled_from(WAYS_OUT)),
    max_size=12,
)
failed_controls = st.none() | st.builds(
    ended,
    st.sampled_from([outcome for outcome in ProbeOutcome if outcome is not ProbeOutcome.CONNECTED]),
    st.just("10.0.0.5"),
    st.just(ProbeKind.CONTROL),
)


@given(failed_controls, results)
def test_closed_needs_a_connected_control(control, tried):
    """For all outcomes and combinations."""
    assert judge(control, tried).verdict is not EgressVerdict.CLOSED


@given(st.just(CONTROL) | failed_controls, results)
def test_one_successful_attempt_means_open(control, tried):
    """The verdict is `open` exactly if a target was reached, with any outcome of the control."""
    reached = any(result.outcome is ProbeOutcome.CONNECTED for result in tried)
    assert (judge(control, tried).verdict is EgressVerdict.OPEN) == reached


@given(st.just(CONTROL) | failed_controls, results)
def test_only_closed_has_no_reasons(control, tried):
    """Every other verdict has reasons."""
    judgement = judge(control, tried)
    assert bool(judgement.reasons) == (judgement.verdict is not EgressVerdict.CLOSED)


@given(results)
def test_closed_means_that_every_attempt_was_made_and_blocked(tried):
    """With a good control: at least one attempt, none behind the wall, none that could not be tried."""
    if judge(CONTROL, tried).verdict is EgressVerdict.CLOSED:
        assert tried
        assert {result.outcome for result in tried} <= BLOCKED | {ProbeOutcome.REFUSED}


@pytest.mark.parametrize("outcome", sorted(BLOCKED))
def test_blocked_attempt_counts_as_closed(outcome):
    """No route, this machine's rules, a timeout, and an unknown name."""
    assert judge(CONTROL, [ended(outcome)]).verdict is EgressVerdict.CLOSED


@pytest.mark.parametrize("outcome", [ProbeOutcome.REFUSED_BY_WALL, ProbeOutcome.FAILED])
def test_attempt_that_did_not_test_the_network_is_inconclusive(outcome):
    """Even if all other attempts failed."""
    judgement = judge(CONTROL, [ended(ProbeOutcome.TIMED_OUT), ended(outcome, "8.8.8.8", detail="EMFILE")])
    assert judgement.verdict is EgressVerdict.INCONCLUSIVE
    assert "8.8.8.8" in judgement.reasons[0]


def test_a_refusal_alone_may_have_come_from_outside():
    """A host without a listener answers with a reset, as a firewall does."""
    judgement = judge(CONTROL, [ended(ProbeOutcome.REFUSED), ended(ProbeOutcome.TIMED_OUT, "192.0.2.1")])
    assert judgement.verdict is EgressVerdict.INCONCLUSIVE
    assert "1.1.1.1:443 refused" in judgement.reasons[0]


def test_refusal_is_a_firewalls_if_a_reserved_address_refuses_too():
    """Who answers for 192.0.2.1 is on the way."""
    tried = [ended(ProbeOutcome.REFUSED), ended(ProbeOutcome.REFUSED, "192.0.2.1")]
    assert judge(CONTROL, tried).verdict is EgressVerdict.CLOSED


@pytest.mark.parametrize(
    ("host", "kind"),
    [("2001:db8::1", ProbeKind.TCP), ("192.0.2.1", ProbeKind.UDP)],
    ids=["family", "protocol"],
)
def test_firewall_refusal_counts_only_for_its_protocol_and_family(host, kind):
    """One that rejects IPv6, or UDP, may let IPv4, or TCP, pass."""
    tried = [ended(ProbeOutcome.REFUSED), ended(ProbeOutcome.REFUSED, host, kind)]
    assert judge(CONTROL, tried).verdict is EgressVerdict.INCONCLUSIVE


def test_a_refusal_of_a_metadata_service_or_a_proxy_needs_no_witness():
    """Both are next door: a reset from there means that there is no such service."""
    tried = [
        ended(ProbeOutcome.REFUSED, "169.254.169.254", ProbeKind.METADATA),
        ended(ProbeOutcome.REFUSED, "p", ProbeKind.PROXY),
    ]
    assert judge(CONTROL, tried).verdict is EgressVerdict.CLOSED


def test_reason_for_open_names_the_target():
    """With what it answered."""
    judgement = judge(None, [ended(ProbeOutcome.CONNECTED, "8.8.8.8", ProbeKind.UDP, "a query was answered")])
    assert judgement.reasons == ("udp 8.8.8.8:443 connected (a query was answered)",)


def test_reason_for_a_reached_api_server_names_the_cause():
    """In a pod it means that no policy is enforced, whatever else was blocked."""
    blocked = ended(ProbeOutcome.TIMED_OUT)
    judgement = judge(CONTROL, [blocked, ended(ProbeOutcome.CONNECTED, "10.96.0.1", ProbeKind.KUBERNETES)])
    assert judgement.verdict is EgressVerdict.OPEN
    assert "no NetworkPolicy is enforced for this pod" in judgement.reasons[0]
