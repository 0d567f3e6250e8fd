"""The checks of GPUs, driver, GPU memory and FlashInfer's kernels."""

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from appliance.cli.preflight.accelerator import (
    CACHE,
    CUBIN,
    PYTHON,
    Build,
    cache_bytes,
    detect_build,
    detect_kernels,
    judge_count,
    judge_driver,
    judge_kernels,
    judge_memory,
    wants_gpu,
)
from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.memory import Need
from appliance.infra.settings import WorkerSettings
from appliance.serving.nvml import NvidiaDriver, NvidiaGpu

GIB = 2**30
CARD = NvidiaGpu(name="NVIDIA H200", total_bytes=140 * GIB, free_bytes=139 * GIB)


def driver(*gpus: NvidiaGpu, cuda=(13, 0)) -> NvidiaDriver:
    return NvidiaDriver(version="580.95.05", cuda=cuda, gpus=gpus or (CARD,))


def need(weights: int, token: int | None = 100_000, context: int | None = 8192) -> Need:
    return Need(weights=weights, token=token, context=context)


@pytest.mark.parametrize(
    ("device", "seen", "build", "wanted"),
    [
        ("gpu", None, None, True),
        ("cpu", driver(), None, False),
        ("auto", None, None, False),
        ("auto", driver(), None, True),
        ("auto", None, Build(cuda=(13, 0)), True),
        ("auto", None, Build(cuda=None), False),
    ],
)
def test_an_engine_built_for_gpus_wants_one(device, seen, build, wanted):
    """With `auto`, an image for GPUs on a machine that shows none is a failure, not a CPU worker."""
    assert wants_gpu(WorkerSettings(device=device), seen, build) is wanted


def test_no_gpu_is_a_failure():
    """A container that was given no GPU sees none."""
    assert judge_count(WorkerSettings(), None).result is CheckResult.FAIL


def test_there_are_as_many_gpus_as_the_model_is_shared_over():
    """Tensor times pipeline; with several machines the others have the rest."""
    shared = WorkerSettings(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert judge_count(shared, driver(CARD, CARD)).result is CheckResult.FAIL
    assert judge_count(shared, driver(CARD, CARD, CARD, CARD)).result is CheckResult.OK
    several = shared.model_copy(update={"extra_arguments": ("--nnodes", "2")})
    assert judge_count(several, driver(CARD, CARD)).result is CheckResult.OK


def test_gpus_of_two_kinds_are_a_warning_if_one_model_uses_both():
    """The slower one limits the speed, the smaller one the memory."""
    other = NvidiaGpu(name="NVIDIA L40S", total_bytes=48 * GIB, free_bytes=48 * GIB)
    assert judge_count(WorkerSettings(tensor_parallel_size=2), driver(CARD, other)).result is CheckResult.WARN
    assert judge_count(WorkerSettings(), driver(CARD, other)).result is CheckResult.OK


@pytest.mark.parametrize(
    ("cuda", "build", "result"),
    [
        ((13, 0), Build(cuda=(13, 0)), CheckResult.OK),
        ((13, 1), Build(cuda=(12, 8)), CheckResult.OK),
        ((13, 0), Build(cuda=(13, 1)), CheckResult.WARN),
        ((12, 8), Build(cuda=(13, 0)), CheckResult.FAIL),
        ((13, 0), Build(cuda=None), CheckResult.FAIL),
        ((13, 0), None, CheckResult.SKIPPED),
    ],
)
def test_the_driver_runs_what_the_engine_was_built_for(cuda, build, result):
    """An older major version cannot; an older minor one can, except for code compiled on the machine."""
    assert judge_driver(driver(cuda=cuda), build).result is result


def test_missing_driver_is_a_failure():
    assert "worker.device: cpu" in judge_driver(None, Build(cuda=(13, 0))).todo


def test_weights_and_one_longest_context_must_fit():
    """They must fit the worker's share of the smallest GPU it uses."""
    settings = WorkerSettings(gpu_memory_fraction=0.9)
    assert judge_memory(settings, driver(), need(70 * GIB)).result is CheckResult.OK
    assert judge_memory(settings, driver(), need(120 * GIB)).result is CheckResult.WARN
    assert judge_memory(settings, driver(), need(130 * GIB)).result is CheckResult.FAIL
    long = need(70 * GIB, context=1_000_000)
    assert judge_memory(settings, driver(), long).result is CheckResult.FAIL


def test_gpu_in_use_is_a_failure():
    """The engine allocates its share at start, and fails without it."""
    busy = NvidiaGpu(name="NVIDIA H200", total_bytes=140 * GIB, free_bytes=60 * GIB)
    check = judge_memory(WorkerSettings(), driver(busy), need(10 * GIB))
    assert check.result is CheckResult.FAIL
    assert "60.0 GiB are free" in check.seen


def test_unknown_kv_cache_size_is_a_warning():
    """An estimate without the KV cache would be too low."""
    assert judge_memory(WorkerSettings(), driver(), need(10 * GIB, token=None)).result is CheckResult.WARN


def test_the_estimate_is_shown():
    """With the tokens for which the KV cache has space."""
    seen = judge_memory(WorkerSettings(), driver(), need(70 * GIB, token=GIB // 8192)).seen
    assert seen == "126.0 GiB each: weights 70.0 GiB, KV of 8192 tokens 1.0 GiB; about 458752 tokens fit"


def test_an_eight_bit_cache_counts_half():
    """In both spellings of the argument."""
    assert cache_bytes(WorkerSettings(extra_arguments=("--kv-cache-dtype", "fp8"))) == 1
    assert cache_bytes(WorkerSettings(extra_arguments=("--kv-cache-dtype=fp8_e4m3",))) == 1
    assert cache_bytes(WorkerSettings()) is None


def test_what_the_engine_was_built_for_is_read_without_importing_it(tmp_path, monkeypatch):
    """Torch takes seconds to import, and starts threads."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # other tests use it
    for text, cuda in (("cuda: Optional[str] = '13.0'", (13, 0)), ("cuda: Optional[str] = None", None)):
        (package / "version.py").write_text(f"__version__ = '2.13.0'\n{text}\nhip = None\n")
        assert detect_build() == Build(cuda=cuda)


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
def test_kernels_must_have_the_same_version(versions, build, result):
    """vLLM silently replaces missing kernels with slower ones, and refuses another version."""
    assert judge_kernels(versions, build).result is result


def test_missing_kernel_packages_are_named():
    check = judge_kernels({PYTHON: "0.6.1"}, NEW)
    assert f"no {CUBIN} and no {CACHE}" in check.seen
    assert "vllm download-kernels" in check.todo


def test_kernels_are_skipped_without_flashinfer():

    def find(name: str) -> str:
        if name == CACHE:
            raise PackageNotFoundError(name)
        return "0.6.1"

    assert detect_kernels(find) == {PYTHON: "0.6.1", CUBIN: "0.6.1"}
