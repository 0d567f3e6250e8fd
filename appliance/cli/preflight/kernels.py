"""
FlashInfer's kernels: whether they are installed, in the version of its Python package.

Without them vLLM downloads or compiles kernels at start.  If neither is possible it uses slower ones:
nothing fails, and an air-gapped machine serves fewer tokens.  Kernels of another version break the import
of FlashInfer.  As in vLLM 0.32, `utils/flashinfer.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from appliance.cli.preflight.accelerator import Build, detect_build, wants_gpu
from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.serving.nvml import read_driver

VERSIONS = Subject("kernels.flashinfer", "FlashInfer kernels")
SUBJECTS = (VERSIONS,)
PYTHON, CUBIN, CACHE = "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"
CACHE_FROM = (12, 9)
"""Oldest CUDA version for which the second kernel package is published."""
TODO = "build the image with `vllm download-kernels`, which installs matching kernels"


def check_kernels(inquiry: Inquiry) -> Iterable[Check]:
    """Check the installed packages if a worker runs on a GPU."""
    build = detect_build()
    if not inquiry.worker:
        yield VERSIONS.skipped("no worker runs on this machine")
    elif not wants_gpu(inquiry.settings.worker, read_driver(), build):
        yield VERSIONS.skipped("the worker runs on the CPU")
    else:
        yield judge_kernels(detect_kernels(), build)


def detect_kernels(find: Callable[[str], str] = installed_version) -> dict[str, str]:
    """Version of each installed FlashInfer package."""
    found = {}
    for name in (PYTHON, CUBIN, CACHE):
        try:
            found[name] = find(name)
        except PackageNotFoundError:
            continue
    return found


def judge_kernels(versions: Mapping[str, str], build: Build | None) -> Check:
    """Whether the kernels match; a build label such as `+cu130` is not part of the version."""
    wanted = versions.get(PYTHON)
    if wanted is None:
        return VERSIONS.skipped(f"{PYTHON} is not installed here")
    seen = ", ".join(f"{name} {version}" for name, version in versions.items())
    has_cache = build is not None and build.cuda is not None and build.cuda >= CACHE_FROM
    expected = (CUBIN, CACHE) if has_cache else (CUBIN,)
    if any(version.partition("+")[0] != wanted.partition("+")[0] for version in versions.values()):
        return VERSIONS.fail(f"{seen}: the versions differ", TODO)
    missing = [name for name in expected if name not in versions]
    if missing:
        return VERSIONS.warn(f"{seen}; no {' and no '.join(missing)}: slower kernels are used", TODO)
    return VERSIONS.ok(seen)
