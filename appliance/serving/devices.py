"""
What this machine can compute with: NVIDIA GPUs, or a CPU with or without bfloat16 arithmetic.

Looking is kept apart from choosing: `look` touches the machine, the rest is a function of what it saw.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance.errors import ConfigurationError

NVML = "libnvidia-ml.so.1"
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Words in /proc/cpuinfo of a CPU that multiplies bfloat16 natively: x86 first, then ARM."""


class DeviceKind(StrEnum):
    """What a worker runs on."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was seen on this machine."""

    gpus: int
    """GPUs the NVIDIA driver shows."""
    bfloat16: bool
    """Whether the CPU has bfloat16 instructions."""
    openmp: Path | None
    """Intel's OpenMP library, which vLLM's CPU build wants preloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a worker is to run on."""

    kind: DeviceKind
    count: int
    """GPUs there are; 1 for a CPU."""
    bfloat16: bool
    """Whether bfloat16 is computed natively; taken for granted on a GPU, where vLLM checks it."""
    openmp: Path | None = None


def look(
    *,
    proc: Path = Path("/proc"),
    prefix: Path = Path(sys.prefix),
    count_by_nvml: Callable[[], int] | None = None,
) -> Machine:
    """
    Look at this machine.

    Args:
        proc: where the kernel shows itself.
        prefix: root of the Python environment the worker runs in.
        count_by_nvml: asks the driver's library for the number of GPUs (for tests).
    """
    try:
        cpuinfo = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    openmp = prefix / "lib" / "libiomp5.so"
    return Machine(
        gpus=_count_gpus(proc, count_by_nvml or _count_by_nvml),
        bfloat16=has_bfloat16(cpuinfo),
        openmp=openmp if openmp.exists() else None,
    )


def choose_device(wanted: str, machine: Machine) -> Device:
    """
    Decide what to run on.

    Args:
        wanted: `auto`, `cpu` or `gpu`, as in the settings.
        machine: what was seen.

    Raises:
        ConfigurationError: a GPU is wanted and there is none.
    """
    if wanted == "gpu" and not machine.gpus:
        message = "worker.device is gpu, but the NVIDIA driver shows no GPU on this machine"
        raise ConfigurationError(message)
    if wanted != "cpu" and machine.gpus:
        return Device(kind=DeviceKind.GPU, count=machine.gpus, bfloat16=True)
    return Device(kind=DeviceKind.CPU, count=1, bfloat16=machine.bfloat16, openmp=machine.openmp)


def choose_dtype(wanted: str, device: Device) -> str:
    """
    Decide the arithmetic type; `auto` is the model's own where it is computed natively.

    A CPU without bfloat16 instructions converts to float32 and back for every product.  Measured with
    the demo's models on two cores of such a CPU: a tenth fewer tokens per second at one request,
    1.4 times as many at four.
    """
    if wanted != "auto" or device.bfloat16:
        return wanted
    return "float32"


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the first processor in the text of /proc/cpuinfo has bfloat16 instructions."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in {"flags", "features"}:
            return not BFLOAT16_FLAGS.isdisjoint(words.split())
    return False


def _count_gpus(proc: Path, count_by_nvml: Callable[[], int]) -> int:
    """GPUs by the library, which knows what a container was given, else by the driver's directory."""
    try:
        return count_by_nvml()
    except OSError:
        pass
    try:
        return sum(1 for _ in (proc / "driver" / "nvidia" / "gpus").iterdir())
    except OSError:
        return 0


def _count_by_nvml() -> int:
    """Ask the driver's own library; it needs neither CUDA nor a child process."""
    nvml = ctypes.CDLL(NVML)
    if nvml.nvmlInit_v2():
        message = f"{NVML} is installed but finds no driver"
        raise OSError(message)
    try:
        count = ctypes.c_uint(0)
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
