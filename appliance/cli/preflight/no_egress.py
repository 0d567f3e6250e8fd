"""Egress: the gateway's own egress check, run once."""

from collections.abc import Iterable

from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.infra.settings import process_environment
from appliance.sovereignty.egress.judge import EgressJudgement, EgressVerdict, judge
from appliance.sovereignty.egress.plan import plan_egress
from appliance.sovereignty.egress.probing import run_probes

OUTSIDE = Subject("egress.outside", "Egress")
SUBJECTS = (OUTSIDE,)


def check_egress(inquiry: Inquiry) -> Iterable[Check]:
    """Run the check if settings or options allow it; takes `egress.timeout_seconds`."""
    settings = inquiry.settings
    if settings.egress.mode == "off" and not inquiry.egress:
        todo = "set egress.mode: strict, or check once with `appliance preflight --egress`"
        yield OUTSIDE.warn("egress.mode is off: egress was not checked, and no gateway checks it", todo)
        return
    observed = run_probes(plan_egress(settings, process_environment()))
    found = judge(observed.control, observed.results)
    if observed.failure:
        found = EgressJudgement(verdict=EgressVerdict.INCONCLUSIVE, reasons=(observed.failure,))
    yield judge_egress(
        found, attempts=len(observed.results), strict=inquiry.egress or settings.egress.mode == "strict"
    )


def judge_egress(found: EgressJudgement, *, attempts: int, strict: bool) -> Check:
    """
    Decide on the verdict of one egress check.

    `strict` if it must be closed: gateways are not ready otherwise, or the installer requested the check.
    """
    first = next(iter(found.reasons), "")
    more = f" (and {len(found.reasons) - 1} more)" if len(found.reasons) > 1 else ""
    if found.verdict is EgressVerdict.CLOSED:
        return OUTSIDE.ok(f"closed: {attempts} attempts failed, and the control was reached")
    if found.verdict is EgressVerdict.OPEN:
        seen, todo = f"open: {first}{more}", "block it in the network, then run `appliance egress check`"
        return OUTSIDE.fail(seen, todo) if strict else OUTSIDE.warn(seen, todo)
    seen = f"inconclusive: {first}{more}"
    return OUTSIDE.warn(
        seen, "set egress.control to a listener of your network; see `appliance egress check`"
    )
