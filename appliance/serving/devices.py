"""
What this machine can compute with: NVIDIA GPUs, or a CPU with or without bfloat16 arithmetic.

`detect_hardware` and `usable_cores` touch the machine; the other functions are pure.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance.errors import ConfigurationError
from appliance.serving.nvml import count_gpus

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Words in /proc/cpuinfo of a CPU that multiplies bfloat16 natively: x86 first, then ARM."""

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Of this process (version 2), as a container sees it."""


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    gpus: int
    bfloat16: bool
    openmp: Path | None
    """Intel's OpenMP library, which vLLM's CPU build wants preloaded."""
    cores: int = 1
    """Whole ones that this process may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    kind: DeviceKind
    count: int
    """GPUs of this machine; 1 for a CPU."""
    bfloat16: bool
    """Whether bfloat16 is computed natively; assumed on a GPU, where vLLM checks it."""
    openmp: Path | None = None
    cores: int = 1


def detect_hardware(
    *,
    proc: Path = Path("/proc"),
    prefix: Path = Path(sys.prefix),
    groups: Path = CONTROL_GROUP,
    count_by_nvml: Callable[[], int] = count_gpus,
) -> Hardware:
    """The hardware of this machine; `prefix` is the Python environment that the worker runs in."""
    try:
        cpuinfo = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    openmp = prefix / "lib" / "libiomp5.so"
    return Hardware(
        gpus=_count_gpus(proc, count_by_nvml),
        bfloat16=has_bfloat16(cpuinfo),
        openmp=openmp if openmp.exists() else None,
        cores=max(1, int(usable_cores(groups))),
    )


def choose_device(wanted: str, hardware: Hardware) -> Device:
    """The device for `worker.device`; raises ConfigurationError if that is `gpu` and there is none."""
    if wanted == "gpu" and not hardware.gpus:
        raise ConfigurationError("worker.device is gpu, but the NVIDIA driver shows no GPU on this machine")
    if wanted != "cpu" and hardware.gpus:
        return Device(kind=DeviceKind.GPU, count=hardware.gpus, bfloat16=True)
    return Device(
        kind=DeviceKind.CPU,
        count=1,
        bfloat16=hardware.bfloat16,
        openmp=hardware.openmp,
        cores=hardware.cores,
    )


def choose_dtype(wanted: str, device: Device) -> str:
    """
    The arithmetic type; `auto` is the model's own where the device computes it natively.

    A CPU without bfloat16 instructions converts to float32 and back for every product.  Measured on two
    cores: a tenth fewer tokens per second at one request, 1.4 times as many at four.
    """
    if wanted != "auto" or device.bfloat16:
        return wanted
    return "float32"


def has_bfloat16(cpuinfo: str) -> bool:
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in {"flags", "features"}:
            return not BFLOAT16_FLAGS.isdisjoint(words.split())
    return False


def usable_cores(groups: Path = CONTROL_GROUP) -> float:
    """CPUs this process may use, including a container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (groups / "cpu.max").read_text(encoding="utf-8").split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no control group, or one without a limit
        return cores


def _count_gpus(proc: Path, count_by_nvml: Callable[[], int]) -> int:
    """GPUs by NVML, which knows what a container was given, else by the driver's directory."""
    try:
        return count_by_nvml()
    except OSError:
        pass
    try:
        return sum(1 for _ in (proc / "driver" / "nvidia" / "gpus").iterdir())
    except OSError:
        return 0
