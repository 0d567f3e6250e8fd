"""The list of checks as a whole, and the report."""

import io
import json

import jsonschema
import pytest
from rich.console import Console

from appliance.cli.preflight.check import Check, CheckResult, Subject
from appliance.cli.preflight.checklist import FAMILIES, SUBJECTS, CheckFamily, run_checks
from appliance.cli.preflight.command import WIDTH, show
from appliance.cli.preflight.summary_screen import PreflightReport, make_report
from appliance.errors import ConfigurationError
from tests.unit.cli.preflight.test_preflight_files import inquiry_in

A, B, C = (Subject(f"demo.{name}", name.upper()) for name in "abc")


def report_of(*checks: Check) -> PreflightReport:
    return make_report(checks, version="1", now=0.0, gateway=True, worker=True)


def test_every_check_has_a_unique_id():
    """Programs identify results by it."""
    ids = [subject.id for subject in SUBJECTS]
    assert len(set(ids)) == len(ids)
    assert all(name.count(".") == 1 for name in ids)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.subjects[0].id.partition(".")[0])
@pytest.mark.parametrize("role", ["gateway", "worker"])
def test_each_family_yields_its_checks_once_in_order(tmp_path, family, role, monkeypatch):
    """With either role."""
    monkeypatch.setattr("appliance.cli.preflight.draft_fit.find_spec", lambda name: None)
    settings = inquiry_in(tmp_path).settings
    inquiry = inquiry_in(tmp_path).__class__(
        settings=settings,
        settings_file=None,
        clock=lambda: 1.8e9,
        gateway=role == "gateway",
        worker=role == "worker",
    )
    assert [check.id for check in family(inquiry)] == [subject.id for subject in family.subjects]


def test_failing_check_stops_no_other(tmp_path):
    """It is a failure itself; the remaining checks of its family are skipped."""

    def broken(inquiry):
        yield A.ok("fine")
        raise ConfigurationError("gone")

    families = (CheckFamily(broken, (A, B, C)), CheckFamily(lambda inquiry: [C.ok("fine")], (C,)))
    checks = tuple(run_checks(inquiry_in(tmp_path), families=families))
    assert [check.result for check in checks] == [
        CheckResult.OK,
        CheckResult.FAIL,
        CheckResult.SKIPPED,
        CheckResult.OK,
    ]
    assert checks[1].seen == "the check failed: gone"


def test_skipped_family_does_not_run(tmp_path):
    """A check is skipped by its id, a family by the prefix of its ids."""

    def never(inquiry):
        raise AssertionError

    families = (CheckFamily(never, (A, B)),)
    inquiry = inquiry_in(tmp_path)
    assert {check.result for check in run_checks(inquiry, skip=frozenset({"demo"}), families=families)} == {
        CheckResult.SKIPPED
    }
    families = (CheckFamily(lambda inquiry: [A.fail("x", "y"), B.ok("z")], (A, B)),)
    checks = tuple(run_checks(inquiry, skip=frozenset({"demo.a"}), families=families))
    assert [check.result for check in checks] == [CheckResult.SKIPPED, CheckResult.OK]


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([A.ok("x")], CheckResult.OK),
        ([A.skipped("x")], CheckResult.OK),
        ([A.ok("x"), B.warn("x", "y")], CheckResult.WARN),
        ([A.warn("x", "y"), B.fail("x", "y"), C.ok("x")], CheckResult.FAIL),
    ],
)
def test_worst_result_is_the_verdict(checks, verdict):
    """Skipped checks do not count."""
    assert report_of(*checks).verdict is verdict


def test_every_result_is_one_line():
    """Also from an error with several lines."""
    assert A.fail("a\nb", "c\n  d") == Check(
        id="demo.a", title="A", result=CheckResult.FAIL, seen="a b", todo="c d"
    )


def test_the_screen_is_a_hundred_columns_wide():
    """Long lines are folded, the remedy is below the finding, and skipped checks are listed together."""
    long = "x " * 200
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    show(report_of(A.fail(long, long), B.skipped("nothing there"), C.skipped("nothing there")), console)
    lines = console.export_text().splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert "skipped  B, C: nothing there" in lines
    assert lines[-1] == "not ready: 1 fail, 2 skipped"


def test_json_output_matches_its_schema():
    """The docs have the model's schema, which accepts the output."""
    printed = json.loads(report_of(A.ok("x"), B.warn("x", "y")).model_dump_json())
    jsonschema.validate(printed, PreflightReport.model_json_schema(mode="serialization"))
    assert printed["counts"] == {"ok": 1, "warn": 1, "fail": 0, "skipped": 0}
    assert printed["checks"][1] == {"id": "demo.b", "title": "B", "result": "warn", "seen": "x", "todo": "y"}
