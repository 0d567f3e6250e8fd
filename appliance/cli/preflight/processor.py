"""The CPU of a worker: instructions, cores, memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.cli.preflight.accelerator import cache_bytes, detect_build, require_pair, wants_gpu
from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family, gib, read_text
from appliance.cli.preflight.memory import Need, estimate
from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import (
    CONTROL_GROUP,
    Device,
    DeviceKind,
    choose_dtype,
    has_bfloat16,
    usable_cores,
)
from appliance.serving.nvml import read_driver

INSTRUCTIONS = Subject("cpu.instructions", "CPU instructions")
CORES = Subject("cpu.cores", "CPU cores")
MEMORY = Subject("cpu.memory", "Memory")
FEW_CORES = 2
"""Engine and API server of a worker are separate processes that both compute."""
REST_BYTES = 4 * 2**30
"""For the engine's code, activations, gateway and system: a rule of thumb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    flags: frozenset[str]
    """Words of `flags` or `Features` in /proc/cpuinfo."""
    bfloat16: bool
    cores: float
    """CPUs this process may use, including a container's quota."""
    free_bytes: int
    """Memory this process may still allocate, including a container's limit."""


@family(INSTRUCTIONS, CORES, MEMORY)
def check_cpu(inquiry: Inquiry) -> Iterable[Check]:
    inquiry.require_worker()
    settings = inquiry.settings.worker
    if wants_gpu(settings, read_driver(), detect_build()):
        raise SkippedError("the worker runs on a GPU")
    seen = detect_processor()
    yield judge_instructions(seen)
    yield judge_cores(seen)
    device = Device(kind=DeviceKind.CPU, count=1, bfloat16=seen.bfloat16)
    need = estimate(
        *require_pair(settings),
        dtype=choose_dtype(settings.dtype, device),
        context=settings.max_model_len,
        cache_bytes=cache_bytes(settings),
    )
    yield judge_memory(settings, seen, need)


def detect_processor(*, proc: Path = Path("/proc"), groups: Path = CONTROL_GROUP) -> Processor:
    cpuinfo = read_text(proc / "cpuinfo")
    return Processor(
        flags=_flags(cpuinfo),
        bfloat16=has_bfloat16(cpuinfo),
        cores=usable_cores(groups),
        free_bytes=_free(
            read_text(proc / "meminfo"),
            read_text(groups / "memory.max"),
            read_text(groups / "memory.current"),
            read_text(groups / "memory.stat"),
        ),
    )


def judge_instructions(seen: Processor) -> Check:
    """Whether vLLM's CPU build has code for this CPU: AVX2, AVX-512 or ARM's NEON."""
    arithmetic = "with bfloat16" if seen.bfloat16 else "no bfloat16, so arithmetic is float32"
    if "avx512f" in seen.flags:
        return INSTRUCTIONS.ok(f"AVX-512, {arithmetic}")
    if "asimd" in seen.flags:
        return INSTRUCTIONS.ok(f"NEON, {arithmetic}")
    if "avx2" in seen.flags:
        todo = "expect fewer tokens per second; use a newer CPU"
        return INSTRUCTIONS.warn(f"AVX2 without AVX-512, {arithmetic}", todo)
    todo = "use another machine; in a virtual one, pass the host's CPU through"
    return INSTRUCTIONS.fail("neither AVX2 nor NEON", todo)


def judge_cores(seen: Processor) -> Check:
    text = f"{seen.cores:g} usable"
    if seen.cores < FEW_CORES:
        return CORES.warn(text, f"assign at least {FEW_CORES}: engine and server are separate processes")
    return CORES.ok(text)


def judge_memory(settings: WorkerSettings, seen: Processor, need: Need) -> Check:
    """
    Whether weights, KV cache and deferred draft prefill fit, and one context fits the KV cache.

    Deferred prefill grows while speculation is off: a worker without memory for it starts, and is killed
    later.
    """
    cache = settings.cpu_kv_cache_bytes
    deferred = need.deferred_bytes(cache)
    text = f"{gib(seen.free_bytes)} free: weights {gib(need.weights)}, KV cache {gib(cache)}"
    if deferred:
        text = f"{text}, up to {gib(deferred)} for deferred draft prefill"
    taken = need.weights + cache + deferred
    if taken > seen.free_bytes:
        return MEMORY.fail(text, "add memory, use a smaller model, or lower worker.cpu_kv_cache_gib")
    if need.one_context > cache:
        text = f"{text}, of which one context of {need.context} tokens takes {gib(need.one_context)}"
        return MEMORY.fail(text, "raise worker.cpu_kv_cache_gib or lower worker.max_model_len")
    if taken + REST_BYTES > seen.free_bytes:
        return MEMORY.warn(text, f"leave {gib(REST_BYTES)} for the engine itself, gateway and system")
    return MEMORY.ok(text)


def _flags(cpuinfo: str) -> frozenset[str]:
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in {"flags", "features"}:
            return frozenset(words.split())
    return frozenset()


def _free(meminfo: str, limit: str, current: str, stat: str) -> int:
    """
    Bytes by the kernel's own estimate, or by the container's limit if that is less.

    Reclaimable page cache, such as weights, counts against the limit but blocks no allocation: Kubernetes,
    too, excludes `inactive_file` from a container's usage.
    """
    lines = (line.split() for line in meminfo.splitlines())
    available = next((int(words[1]) * 1024 for words in lines if words[:1] == ["MemAvailable:"]), 0)
    limit, current = limit.strip(), current.strip()
    if limit.isdigit() and current.isdigit():
        cached = next((line for line in stat.splitlines() if line.startswith("inactive_file ")), "")
        return min(available, int(limit) - int(current) + int(cached.partition(" ")[2] or 0))
    return available
