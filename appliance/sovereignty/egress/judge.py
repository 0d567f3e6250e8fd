"""
Judge the attempts of an egress check.

Failed attempts prove nothing by themselves: on a machine with a broken network card they fail as well.  So
`closed` needs a positive control, a listener inside that was reached by the same means at the same time.
Without it, and if an attempt says nothing about the network, the verdict is `inconclusive`.  An attempt
that succeeded means `open`, with or without control.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.sovereignty.egress.probe import EgressProbe, ProbeKind, ProbeOutcome, ProbeResult


class EgressVerdict(StrEnum):
    CLOSED = "closed"
    """Every attempt failed, and the control succeeded."""
    OPEN = "open"
    """An outside target was reached."""
    INCONCLUSIVE = "inconclusive"
    """Neither was shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressJudgement:
    verdict: EgressVerdict
    reasons: tuple[str, ...] = ()
    """One line each; none if `closed`."""


def judge(control: ProbeResult | None, results: Sequence[ProbeResult]) -> EgressJudgement:
    """Judge one check; `control` is None if the control was not tried."""
    reached = tuple(
        f"{result} ({detail})" if (detail := _cause(result)) else str(result)
        for result in results
        if result.outcome is ProbeOutcome.CONNECTED
    )
    if reached:
        return EgressJudgement(verdict=EgressVerdict.OPEN, reasons=reached)
    doubts = tuple(_doubts(control, results))
    return EgressJudgement(
        verdict=EgressVerdict.INCONCLUSIVE if doubts else EgressVerdict.CLOSED, reasons=doubts
    )


def _cause(reached: ProbeResult) -> str:
    if reached.probe.kind is ProbeKind.KUBERNETES:
        return (
            "the cluster's API server: no NetworkPolicy is enforced for this pod; use a network plugin that"
            " enforces them, and look for policies that allow more"
        )
    return reached.detail


def _doubts(control: ProbeResult | None, results: Sequence[ProbeResult]) -> Iterator[str]:
    if control is None:
        yield "the control, a listener inside, was not tried"
    elif control.outcome is not ProbeOutcome.CONNECTED:
        yield f"{control}: without a reachable control, failed attempts prove nothing"
    if not results:
        yield "no attempt was made"
    walled = [result for result in results if result.outcome is ProbeOutcome.REFUSED_BY_WALL]
    if walled:
        yield f"{walled[0]}: the wall refused it ({len(walled)} in all), so the network was not tested"
    for result in results:
        if result.outcome is ProbeOutcome.FAILED:
            yield f"{result}: {result.detail}"
        elif result.outcome is ProbeOutcome.REFUSED and not _is_a_firewalls(result, results):
            yield (
                f"{result}: the host with that address may have refused it; probe an open port, and a "
                "reserved address such as 192.0.2.1 or 2001:db8::1"
            )


def _is_a_firewalls(refused: ProbeResult, results: Sequence[ProbeResult]) -> bool:
    """Whether a refusal came from a firewall: a reserved address was refused in the same way."""
    if refused.probe.kind not in {ProbeKind.TCP, ProbeKind.UDP}:
        return True
    return any(
        result.outcome is ProbeOutcome.REFUSED
        and result.probe.is_reserved
        and _channel(result.probe) == _channel(refused.probe)
        for result in results
    )


def _channel(probe: EgressProbe) -> tuple[ProbeKind, bool]:
    """Protocol and address family: a firewall may treat them differently."""
    return probe.kind, ":" in probe.host
