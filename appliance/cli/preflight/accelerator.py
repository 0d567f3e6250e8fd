"""
The GPUs: whether they are present, large enough, and have a recent driver and FlashInfer's kernels.

Without FlashInfer's kernels vLLM downloads or compiles kernels at start.  If neither is possible it uses
slower ones: nothing fails, and an air-gapped machine serves fewer tokens.  Kernels of another version than
FlashInfer's Python package break its import.  As in vLLM 0.32, `utils/flashinfer.py`.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family, gib
from appliance.cli.preflight.memory import Need, estimate
from appliance.errors import ConfigurationError
from appliance.infra.settings import WorkerSettings
from appliance.serving.nvml import NvidiaDriver, read_driver
from appliance.serving.weights import Weights, inspect_weights

COUNT = Subject("gpu.count", "GPUs")
DRIVER = Subject("gpu.driver", "NVIDIA driver")
MEMORY = Subject("gpu.memory", "GPU memory")
VERSIONS = Subject("kernels.flashinfer", "FlashInfer kernels")
TIGHT = 0.9
"""Share of the worker's memory above which too little remains for activations and CUDA graphs."""
PYTHON, CUBIN, CACHE = "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"
CACHE_FROM = (12, 9)
"""Oldest CUDA version for which the second kernel package is published."""
ANY_CUDA = re.compile(r"^cuda\b[^=]*=\s*'(\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Target of the installed engine."""

    cuda: tuple[int, int] | None
    """CUDA version: major, minor; None for a build without CUDA."""


@family(COUNT, DRIVER, MEMORY)
def check_gpus(inquiry: Inquiry) -> Iterable[Check]:
    """Query the driver, and compare with the worker's settings."""
    inquiry.require_worker()
    settings, driver, build = inquiry.settings.worker, read_driver(), detect_build()
    if not wants_gpu(settings, driver, build):
        raise SkippedError("the worker runs on the CPU")
    yield judge_count(settings, driver)
    yield judge_driver(driver, build)
    need = estimate(
        *require_pair(settings),
        dtype=settings.dtype,
        context=settings.max_model_len,
        tensor=settings.tensor_parallel_size,
        pipeline=settings.pipeline_parallel_size,
        cache_bytes=cache_bytes(settings),
    )
    yield judge_memory(settings, driver, need)


def wants_gpu(settings: WorkerSettings, driver: NvidiaDriver | None, build: Build | None) -> bool:
    """Whether the worker runs on a GPU; with `auto`, also if only the engine was built for one."""
    if settings.device != "auto":
        return settings.device == "gpu"
    return bool(driver and driver.gpus) or (build is not None and build.cuda is not None)


def judge_count(settings: WorkerSettings, driver: NvidiaDriver | None) -> Check:
    wanted = settings.tensor_parallel_size * settings.pipeline_parallel_size
    asked = f"tensor {settings.tensor_parallel_size} x pipeline {settings.pipeline_parallel_size} = {wanted}"
    gpus = driver.gpus if driver else ()
    if not gpus:
        todo = "check `nvidia-smi`, and in a container the GPU runtime; or set worker.device: cpu"
        return COUNT.fail("this process sees none", todo)
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    seen = f"{len(gpus)} ({names}), {asked} wanted"
    if wanted > len(gpus) and "--nnodes" not in settings.extra_arguments:
        return COUNT.fail(seen, "lower worker.tensor_parallel_size or pipeline_parallel_size, or add GPUs")
    if len({gpu.name for gpu in gpus}) > 1 and wanted > 1:
        return COUNT.warn(f"{seen}, of several kinds", "use GPUs of one kind for a worker")
    return COUNT.ok(seen)


def judge_driver(driver: NvidiaDriver | None, build: Build | None) -> Check:
    """
    Whether the driver supports the engine's CUDA version.

    A driver runs programs of its own CUDA major version and older ones; within a major version also newer
    minor ones, except for code that is compiled on the machine
    (https://docs.nvidia.com/deploy/cuda-compatibility/).
    """
    if driver is None:
        todo = "install the NVIDIA driver and vLLM's GPU build with nvidia-ml-py, or set worker.device: cpu"
        return DRIVER.fail("no NVIDIA driver answers", todo)
    seen = f"driver {driver.version} runs CUDA {_version(driver.cuda)}"
    if build is None:
        return DRIVER.skipped(f"{seen}; no engine is installed here")
    if build.cuda is None:
        seen = f"{seen}; the engine installed here is built without CUDA"
        return DRIVER.fail(seen, "install vLLM's GPU build")
    wanted = _version(build.cuda)
    seen = f"{seen}, vLLM is built for {wanted}"
    if driver.cuda[0] < build.cuda[0]:
        return DRIVER.fail(seen, f"install a driver for CUDA {wanted} or newer")
    if driver.cuda < build.cuda:
        todo = f"install a driver for CUDA {wanted}: kernels compiled here may fail with this one"
        return DRIVER.warn(seen, todo)
    return DRIVER.ok(seen)


def judge_memory(settings: WorkerSettings, driver: NvidiaDriver | None, need: Need) -> Check:
    """Whether weights and the KV cache of one longest context fit the worker's memory."""
    used = (driver.gpus if driver else ())[: settings.tensor_parallel_size * settings.pipeline_parallel_size]
    if not used:
        return MEMORY.skipped("there is no GPU")
    allowed = round(min(gpu.total_bytes for gpu in used) * settings.gpu_memory_fraction)
    free = min(gpu.free_bytes for gpu in used)
    if free < allowed:
        seen = f"{gib(free)} are free, and the worker takes {gib(allowed)} at start"
        todo = "end other processes on the GPU (a running worker counts), or lower gpu_memory_fraction"
        return MEMORY.fail(seen, todo)
    if need.token is None:
        seen = (
            f"weights {gib(need.weights)} of {gib(allowed)}; its config.json does not determine the KV cache"
        )
        return MEMORY.warn(seen, "start the worker once and read how many tokens its log says fit")
    room = max(0, allowed - need.weights) // need.token if need.token else 0
    each = f"{need.context} tokens" if need.context else "a context of unknown length"
    seen = (
        f"{gib(allowed)} each: weights {gib(need.weights)}, KV of {each} {gib(need.one_context)}; "
        f"about {room} tokens fit"
    )
    taken = need.weights + need.one_context
    if taken > allowed:
        return MEMORY.fail(seen, "use more GPUs, a smaller or quantized model, or lower worker.max_model_len")
    if taken > TIGHT * allowed:
        return MEMORY.warn(seen, "lower worker.max_model_len: activations and CUDA graphs come on top")
    return MEMORY.ok(seen)


def detect_build() -> Build | None:
    """Target of the installed engine, read from torch's own files without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = ANY_CUDA.search(text)
    return Build(cuda=(int(match[1]), int(match[2])) if match else None)


def read_pair(settings: WorkerSettings) -> tuple[Weights, Weights | None]:
    """
    Config and headers of the target, and of the draft if one is used.

    Raises ConfigurationError if a path or file is missing or broken.
    """
    draft = settings.own_draft
    return inspect_weights(settings.model), None if draft is None else inspect_weights(draft)


def require_pair(settings: WorkerSettings) -> tuple[Weights, Weights | None]:
    try:
        return read_pair(settings)
    except ConfigurationError as error:
        raise SkippedError("the weights cannot be read; see weights.files") from error


def cache_bytes(settings: WorkerSettings) -> int | None:
    """Bytes of a number in the KV cache if an argument makes it smaller than the arithmetic type's."""
    arguments = " ".join(settings.extra_arguments).replace("=", " ")
    return 1 if "--kv-cache-dtype fp8" in arguments else None


@family(VERSIONS)
def check_kernels(inquiry: Inquiry) -> Iterable[Check]:
    inquiry.require_worker()
    build = detect_build()
    if not wants_gpu(inquiry.settings.worker, read_driver(), build):
        raise SkippedError("the worker runs on the CPU")
    yield judge_kernels(detect_kernels(), build)


def detect_kernels(find: Callable[[str], str] = installed_version) -> dict[str, str]:
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
    todo = "build the image with `vllm download-kernels`, which installs matching kernels"
    has_cache = build is not None and build.cuda is not None and build.cuda >= CACHE_FROM
    expected = (CUBIN, CACHE) if has_cache else (CUBIN,)
    if any(version.partition("+")[0] != wanted.partition("+")[0] for version in versions.values()):
        return VERSIONS.fail(f"{seen}: the versions differ", todo)
    missing = [name for name in expected if name not in versions]
    if missing:
        return VERSIONS.warn(f"{seen}; no {' and no '.join(missing)}: slower kernels are used", todo)
    return VERSIONS.ok(seen)


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
