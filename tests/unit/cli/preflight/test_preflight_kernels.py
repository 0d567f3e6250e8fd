"""Promises of the check of FlashInfer's kernels."""

from importlib.metadata import PackageNotFoundError

import pytest

from appliance.cli.preflight.accelerator import Build
from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.kernels import CACHE, CUBIN, PYTHON, detect_kernels, judge_kernels

OLD, NEW = Build(cuda=(12, 8)), Build(cuda=(13, 0))


@pytest.mark.parametrize(
    ("versions", "build", "result"),
    [
        ({}, NEW, CheckResult.SKIPPED),
        ({PYTHON: "0.6.1", CUBIN: "0.6.1", CACHE: "0.6.1+cu130"}, NEW, CheckResult.OK),
        ({PYTHON: "0.6.1", CUBIN: "0.6.1"}, NEW, CheckResult.WARN),
        ({PYTHON: "0.6.1", CUBIN: "0.6.1"}, OLD, CheckResult.OK),
        ({PYTHON: "0.6.1"}, OLD, CheckResult.WARN),
        ({PYTHON: "0.6.1", CUBIN: "0.6.0", CACHE: "0.6.1+cu130"}, NEW, CheckResult.FAIL),
        ({PYTHON: "0.6.1", CUBIN: "0.6.1", CACHE: "0.5.3+cu130"}, NEW, CheckResult.FAIL),
    ],
)
def test_kernels_are_there_and_of_the_same_version(versions, build, result):
    """Absent they are replaced by slower ones without a word; of another version they are refused."""
    assert judge_kernels(versions, build).result is result


def test_missing_packages_or_files_are_named():
    """With how an image gets it."""
    check = judge_kernels({PYTHON: "0.6.1"}, NEW)
    assert f"no {CUBIN} and no {CACHE}" in check.seen
    assert "vllm download-kernels" in check.todo


def test_kernels_are_skipped_without_flashinfer():
    """The packages are asked for by name."""

    def find(name: str) -> str:
        if name == CACHE:
            raise PackageNotFoundError(name)
        return "0.6.1"

    assert detect_kernels(find) == {PYTHON: "0.6.1", CUBIN: "0.6.1"}
