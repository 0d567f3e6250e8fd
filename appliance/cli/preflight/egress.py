"""
Whether the outside can be reached from here: the gateway's own egress check, made once.
"""

from collections.abc import Iterable

from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.infra.settings import process_environment
from appliance.sovereignty.egress.plan import plan_egress
from appliance.sovereignty.egress.probing import run_probes
from appliance.sovereignty.egress.verdict import Judgement, Verdict, judge

OUTSIDE = Subject("egress.outside", "Ways out")
SUBJECTS = (OUTSIDE,)


def check_egress(inquiry: Inquiry) -> Iterable[Check]:
    """Try to get out, where the settings or the installer agree to it; it takes `egress.timeout_seconds`."""
    settings = inquiry.settings
    if settings.egress.mode == "off" and not inquiry.egress:
        todo = "set egress.mode: strict, or try once with `appliance preflight --egress`"
        yield OUTSIDE.warn("egress.mode is off: nothing was tried, and no gateway will", todo)
        return
    observed = run_probes(plan_egress(settings, process_environment()))
    found = judge(observed.control, observed.results)
    if observed.failure:
        found = Judgement(verdict=Verdict.INCONCLUSIVE, reasons=(observed.failure,))
    yield judge_egress(
        found, attempts=len(observed.results), strict=inquiry.egress or settings.egress.mode == "strict"
    )


def judge_egress(found: Judgement, *, attempts: int, strict: bool) -> Check:
    """
    Decide on the verdict of one egress check.

    Args:
        found: the verdict and its reasons.
        attempts: how many ways out were tried.
        strict: whether it has to be closed: gateways are not ready otherwise, or the installer asked.
    """
    first = next(iter(found.reasons), "")
    more = f" (and {len(found.reasons) - 1} more)" if len(found.reasons) > 1 else ""
    if found.verdict is Verdict.CLOSED:
        return OUTSIDE.ok(f"closed: {attempts} ways were tried, and the control was reached")
    if found.verdict is Verdict.OPEN:
        seen, todo = f"open: {first}{more}", "close it in the network, then see `appliance egress check`"
        return OUTSIDE.fail(seen, todo) if strict else OUTSIDE.warn(seen, todo)
    seen = f"inconclusive: {first}{more}"
    return OUTSIDE.warn(
        seen, "name a listener of the enclave in egress.control; see `appliance egress check`"
    )
