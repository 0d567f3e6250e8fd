"""Promises of the check of ways out."""

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.no_egress import check_egress, judge_egress
from appliance.sovereignty.egress.judge import EgressJudgement, EgressVerdict
from tests.unit.cli.preflight.test_preflight_files import inquiry_in


@pytest.mark.parametrize(
    ("verdict", "strict", "result"),
    [
        (EgressVerdict.CLOSED, True, CheckResult.OK),
        (EgressVerdict.OPEN, True, CheckResult.FAIL),
        (EgressVerdict.OPEN, False, CheckResult.WARN),
        (EgressVerdict.INCONCLUSIVE, True, CheckResult.WARN),
    ],
)
def test_only_closed_passes(verdict, strict, result):
    """Without the positive control nothing is proved."""
    found = EgressJudgement(verdict=verdict, reasons=() if verdict is EgressVerdict.CLOSED else ("a", "b"))
    check = judge_egress(found, attempts=3, strict=strict)
    assert check.result is result
    assert verdict is EgressVerdict.CLOSED or "a (and 1 more)" in check.seen


def test_egress_is_not_checked_unless_enabled(tmp_path):
    """Foreign doors are not knocked at by a command that was run to look at disks."""
    (check,) = check_egress(inquiry_in(tmp_path))
    assert check.result is CheckResult.WARN
    assert "egress was not checked" in check.seen


def test_egress_is_checked_if_the_settings_enable_it(tmp_path):
    """With no targets but one that refuses on this machine, and a control that answers."""
    targets = {"tcp_targets": ["127.0.0.1:1"], "udp_targets": [], "metadata_targets": [], "canary_name": None}
    (check,) = check_egress(
        inquiry_in(tmp_path, egress={"mode": "strict", "timeout_seconds": 0.5, **targets})
    )
    assert check.result is CheckResult.WARN
    assert "inconclusive" in check.seen
