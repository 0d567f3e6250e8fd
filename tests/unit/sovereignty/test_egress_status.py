"""When a gateway is ready, and what it warns of."""

import json
import re
from pathlib import Path

import pytest

from appliance.audit.entry import Entry, encode
from appliance.audit.entry_types import EntryType
from appliance.sovereignty.egress.egress_status import EgressReport, EgressStatus, Trigger
from appliance.sovereignty.egress.judge import EgressVerdict
from appliance.sovereignty.egress.probe import EgressProbe, Observation, ProbeKind, ProbeOutcome, ProbeResult

LONGEST_IPV6 = "2001:0db8:1111:2222:3333:4444:5555:6666"


def report(verdict: EgressVerdict) -> EgressReport:
    outcome = ProbeOutcome.CONNECTED if verdict is EgressVerdict.OPEN else ProbeOutcome.TIMED_OUT
    control = ProbeOutcome.TIMED_OUT if verdict is EgressVerdict.INCONCLUSIVE else ProbeOutcome.CONNECTED
    return made(
        Observation(
            control=ProbeResult(
                probe=EgressProbe(kind=ProbeKind.CONTROL, host="10.0.0.5", port=8000), outcome=control
            ),
            results=(
                ProbeResult(probe=EgressProbe(kind=ProbeKind.TCP, host="1.1.1.1", port=443), outcome=outcome),
            ),
        )
    )


def made(observation: Observation, host: str = "gateway-0") -> EgressReport:
    return EgressReport(
        observation=observation,
        time="2026-11-21T12:00:00Z",
        host=host,
        trigger=Trigger.SCHEDULE,
        settings="5" * 64,
        walled=True,
        seconds=3.2,
    )


def after(mode: str, *verdicts: EgressVerdict) -> EgressStatus:
    standing = EgressStatus(mode=mode)
    for verdict in verdicts:
        standing = standing.after(report(verdict))
    return standing


CLOSED, OPEN, INCONCLUSIVE = EgressVerdict.CLOSED, EgressVerdict.OPEN, EgressVerdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("verdicts", "problem"),
    [
        ([], "no egress check has been conclusive yet"),
        ([INCONCLUSIVE], "no egress check has been conclusive yet: control 10.0.0.5:8000"),
        ([CLOSED], None),
        ([CLOSED, INCONCLUSIVE], None),
        ([OPEN], "egress is possible: tcp 1.1.1.1:443 connected"),
        ([CLOSED, OPEN], "egress is possible"),
        ([OPEN, INCONCLUSIVE], "egress is possible"),
        ([OPEN, INCONCLUSIVE, CLOSED], None),
    ],
)
def test_strict_is_ready_after_closed_until_open(verdicts, problem):
    """An inconclusive check changes nothing."""
    found = after("strict", *verdicts).problem
    assert (found is None) if problem is None else (found or "").startswith(problem)


@pytest.mark.parametrize("mode", ["off", "warn"])
@pytest.mark.parametrize("verdict", EgressVerdict)
def test_gateway_is_always_ready_outside_of_strict(mode, verdict):
    """Before and after a check."""
    assert after(mode).problem is None
    assert after(mode, verdict).problem is None


def test_warn_reports_egress_until_a_check_is_closed():
    """An inconclusive check in between does not clear the warning."""
    assert after("warn", OPEN).warnings == ("egress is possible: tcp 1.1.1.1:443 connected",)
    assert len(after("warn", OPEN, INCONCLUSIVE).warnings) == 2
    assert after("warn", OPEN, CLOSED).warnings == ()


@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_inconclusive_check_is_a_warning(mode):
    """With its reason."""
    (warning,) = after(mode, CLOSED, INCONCLUSIVE).warnings
    assert warning.startswith("the egress check was inconclusive: control 10.0.0.5:8000 timed_out")


def test_empty_observation_is_inconclusive_with_a_reason():
    """The probe process had ended."""
    nothing = made(Observation(control=None, results=(), failure="it has ended"))
    assert (nothing.verdict, nothing.why) == (INCONCLUSIVE, "it has ended")
    assert nothing.to_json()["control"] is None


def test_the_largest_report_fits_an_entry():
    """As many targets as the settings allow, with the longest words."""
    outcome = ProbeOutcome.REFUSED_BY_WALL
    targets = [EgressProbe(kind=ProbeKind.METADATA, host=LONGEST_IPV6, port=65535)] * 24
    proxies = [EgressProbe(kind=ProbeKind.PROXY, host="p" * 250, port=65535)] * 4
    name = EgressProbe(kind=ProbeKind.DNS, host="n" * 250)
    fields = made(
        Observation(
            control=ProbeResult(
                probe=EgressProbe(kind=ProbeKind.CONTROL, host="c" * 250, port=65535), outcome=outcome
            ),
            results=tuple(ProbeResult(probe=probe, outcome=outcome) for probe in [*targets, *proxies, name]),
        ),
        host="h" * 250,
    ).to_entry()
    entry = Entry(
        type=EntryType.EGRESS_ATTESTED,
        id="0" * 26,
        time="2026-11-21T12:00:00.000Z",
        log="o" * 100,
        fields={**fields, "gateway": "g" * 63, "actor": "a" * 64},
    )
    assert len(encode(entry)) < 4096


def test_an_entry_names_every_attempt():
    """With the report's digest, which the full report can be compared with."""
    first, second = report(CLOSED), report(OPEN)
    fields = first.to_entry()
    assert fields["outcomes"] == ["tcp 1.1.1.1:443 timed_out"]
    assert fields["control"] == "control 10.0.0.5:8000 connected"
    assert fields["report"] != second.to_entry()["report"]


def test_page_shows_a_real_report():
    """The page has every member, outcome and kind for authors of consoles."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "check-egress.md").read_text(encoding="utf-8")
    found = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert found
    shown, real = json.loads(found[1]), report(OPEN).to_json()
    assert list(shown) == list(real)
    assert list(shown["probes"][0]) == list(shown["control"]) == list(real["control"])
    for word in [*ProbeOutcome, *ProbeKind, *EgressVerdict, *Trigger, *real]:
        assert f"`{word}`" in page, word
