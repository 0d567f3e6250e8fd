"""`appliance draft lint`: lines, a stable JSON object, an exit code."""

import json

import pytest
from typer.testing import CliRunner

from appliance.cli import cli
from appliance.drafts.lint.rules import Rule
from tests.unit.drafts.lint.builder import Draft, eagle31, write


@pytest.fixture
def lint(tmp_path):
    def run(draft: Draft, *options: str):
        target, weights = write(draft, tmp_path)
        return CliRunner().invoke(cli, ["draft", "lint", str(target.path), str(weights.path), *options])

    return run


def damaged() -> Draft:
    draft = eagle31()
    draft.drop("fc.weight")
    del draft.config["norm_output"]
    return draft


def test_draft_that_fits_is_one_line(lint):
    result = lint(eagle31())
    assert (result.exit_code, result.stdout) == (0, "verdict  fits\n")


def test_warnings_keep_the_exit_code_at_zero(lint):
    """A script stops at errors, not at warnings."""
    result = lint(eagle31(), "--context", "4096")
    first, verdict = result.stdout.splitlines()
    assert result.exit_code == 0
    assert first.startswith("warning  max-position-embeddings: its max_position_embeddings is 1024")
    assert first.endswith("lower worker.max_model_len, or expect low acceptance beyond it")
    assert verdict == "verdict  fits, 1 warning"


def test_errors_are_printed_with_advice(lint):
    result = lint(damaged())
    assert result.exit_code == 1
    error, warning, verdict = result.stdout.splitlines()
    assert error == f"error    fc-missing: it has no fc.weight; {Rule.FC_MISSING.advice}"
    assert warning.startswith("warning  norm-output-unset: its config sets fc_norm, but not norm_output")
    assert warning.endswith(f"; {Rule.NORM_OUTPUT_UNSET.advice}")
    assert verdict == "verdict  does not fit: 1 error, 1 warning"


def test_json_is_one_object_with_the_same_keys_always(lint, tmp_path):
    """Programs read it: the names are stable."""
    result = lint(damaged(), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    findings = report.pop("findings")
    assert report == {
        "target": str(tmp_path / "target"),
        "draft": str(tmp_path / "draft"),
        "context": None,
        "verdict": "errors",
        "errors": 1,
        "warnings": 1,
    }
    assert [set(finding) for finding in findings] == [{"rule", "severity", "message", "advice"}] * 2
    assert [Rule(finding["rule"]) for finding in findings] == [Rule.FC_MISSING, Rule.NORM_OUTPUT_UNSET]


def test_another_method_is_checked_by_its_own_rules(lint):
    result = lint(eagle31(), "--method", "draft_model")
    first, verdict = result.stdout.splitlines()
    assert result.exit_code == 1
    assert first.startswith("error    draft-model-head: it is a head (LlamaForCausalLMEagle3)")
    assert verdict == "verdict  does not fit: 1 error"


@pytest.mark.parametrize(("draft", "method"), [(False, "eagle3"), (True, "mtp")])
def test_a_draft_is_named_if_the_method_reads_one(tmp_path, draft, method):
    target, weights = write(eagle31(), tmp_path)
    paths = [str(target.path), *([str(weights.path)] if draft else [])]
    result = CliRunner().invoke(cli, ["draft", "lint", *paths, "--method", method])
    assert result.exit_code == 2
    assert f"{method} {'uses no' if draft else 'needs a'} draft" in result.output


def test_the_target_of_mtp_is_checked_alone(tmp_path):
    target, _ = write(eagle31(), tmp_path)
    result = CliRunner().invoke(cli, ["draft", "lint", str(target.path), "--method", "mtp", "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["draft"]) == (1, None)
    assert [finding["rule"] for finding in report["findings"]] == ["mtp-layers"]


def test_rule_values_match_their_names():
    assert all(rule == rule.name.lower().replace("_", "-") for rule in Rule)
