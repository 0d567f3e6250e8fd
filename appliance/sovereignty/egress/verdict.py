"""
What follows from the attempts of an egress check.

Failing to get out proves nothing by itself: a machine whose network card is broken fails as well.  So
`closed` needs a positive control, a listener of the enclave that was reached by the same means at the
same time.  Without it, and wherever an attempt says nothing of the network, the verdict is
`inconclusive`.  A way out that was found is one, control or not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.sovereignty.egress.probe import Kind, Outcome, Probe, Result


class Verdict(StrEnum):
    """What a check showed."""

    CLOSED = "closed"
    """Everything that was tried failed, and the control did not."""
    OPEN = "open"
    """Something outside was reached."""
    INCONCLUSIVE = "inconclusive"
    """Neither was shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, and why it is not `closed`."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    """One line each; none if it is closed."""


def judge(control: Result | None, results: Sequence[Result]) -> Judgement:
    """
    Weigh one check.

    Args:
        control: how the connection to the enclave's own listener ended; None if it was not tried.
        results: how the attempts to get out ended.
    """
    ways_out = tuple(_way_out(result) for result in results if result.outcome is Outcome.CONNECTED)
    if ways_out:
        return Judgement(verdict=Verdict.OPEN, reasons=ways_out)
    doubts = tuple(_doubts(control, results))
    return Judgement(verdict=Verdict.INCONCLUSIVE if doubts else Verdict.CLOSED, reasons=doubts)


def _way_out(result: Result) -> str:
    return f"{result} ({result.detail})" if result.detail else str(result)


def _doubts(control: Result | None, results: Sequence[Result]) -> Iterator[str]:
    if control is None:
        yield "no listener of the enclave was tried"
    elif control.outcome is not Outcome.CONNECTED:
        yield f"{control}: where nothing can be reached at all, failing to get out proves nothing"
    if not results:
        yield "no way out was tried"
    walled = [result for result in results if result.outcome is Outcome.REFUSED_BY_WALL]
    if walled:
        yield f"{walled[0]}: the wall refused it ({len(walled)} in all), so the network was not tested"
    for result in results:
        if result.outcome is Outcome.FAILED:
            yield f"{result}: {result.detail}"
        elif result.outcome is Outcome.REFUSED and not _is_a_firewalls(result, results):
            yield (
                f"{result}: whoever has that address may have answered; probe a port where something "
                "listens, and an address that nobody has, such as 192.0.2.1 or 2001:db8::1"
            )


def _is_a_firewalls(refused: Result, results: Sequence[Result]) -> bool:
    """Whether a refusal cannot have come from outside: the same was said for an address nobody has."""
    if refused.probe.kind not in {Kind.TCP, Kind.UDP}:
        return True
    return any(
        result.outcome is Outcome.REFUSED
        and result.probe.is_nobodys
        and _road(result.probe) == _road(refused.probe)
        for result in results
    )


def _road(probe: Probe) -> tuple[Kind, bool]:
    """Protocol and address family: what a firewall says of one, it need not say of another."""
    return probe.kind, ":" in probe.host
