"""
The NVIDIA driver, its GPUs and their energy counters, read through NVIDIA's own bindings (`nvidia-ml-py`).

The only access to NVML (https://docs.nvidia.com/deploy/nvml-api/).  The bindings are optional: they come with
the GPU build of the worker.  Without them, or without a driver, this module reports that there is none.
NVML needs neither CUDA nor a child process.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

LoadBindings = Callable[[], ModuleType | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaGpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaDriver:
    version: str
    """Such as `570.133.20`."""
    cuda: tuple[int, int]
    """Newest CUDA version it runs: major, minor."""
    gpus: tuple[NvidiaGpu, ...]


def load_bindings() -> ModuleType | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def count_gpus(load: LoadBindings = load_bindings) -> int:
    """GPUs that the driver shows this process; raises OSError without bindings or driver."""
    nvml: Any = load()
    if nvml is None:
        raise OSError("nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise OSError(f"NVML finds no driver: {error}") from error
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        return 0
    finally:
        nvml.nvmlShutdown()


def read_driver(load: LoadBindings = load_bindings) -> NvidiaDriver | None:
    """
    The driver and its GPUs; None if there is none, or this process may not use it.  OSError if it fails.
    """
    nvml: Any = load()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        version = _ask(nvml, "its version", nvml.nvmlSystemGetDriverVersion)
        cuda = int(_ask(nvml, "its CUDA version", nvml.nvmlSystemGetCudaDriverVersion_v2))
        count = int(_ask(nvml, "the number of GPUs", nvml.nvmlDeviceGetCount))
        gpus = tuple(_gpu(nvml, index) for index in range(count))
        return NvidiaDriver(version=_text(version), cuda=(cuda // 1000, cuda % 1000 // 10), gpus=gpus)
    finally:
        nvml.nvmlShutdown()


class EnergyMeter:
    """Sum of `nvmlDeviceGetTotalEnergyConsumption`: Volta and newer count since the driver was loaded."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:  # noqa: ANN401 - the bindings have no types
        self._nvml = nvml
        self._handles = handles

    @property
    def gpus(self) -> int:
        return len(self._handles)

    def read(self) -> int | None:
        """Millijoules since the driver was loaded, summed over the GPUs; None if one has no counter."""
        try:
            return sum(int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(each)) for each in self._handles)
        except self._nvml.NVMLError:
            return None


def open_meter(visible: str | None, count: int, load: LoadBindings = load_bindings) -> EnergyMeter | None:
    """
    A meter of the GPUs that a worker uses; None unless all of them are measured.

    `visible` is `CUDA_VISIBLE_DEVICES`, None if all GPUs are visible; the worker uses the first `count`.
    Fails open: costs then come from the watts in the settings.  A worker on several machines is not measured:
    the driver counts only the GPUs here.
    """
    nvml: Any = load()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        names = _names(visible, nvml.nvmlDeviceGetCount())[:count]
        if len(names) < count:
            return None
        handles = [_handle(nvml, name) for name in names]
        meter = EnergyMeter(nvml, handles)
        return meter if handles and meter.read() is not None else None
    except (nvml.NVMLError, ValueError):
        return None


def _gpu(nvml: Any, index: int) -> NvidiaGpu:  # noqa: ANN401
    handle = _ask(nvml, f"GPU {index}", nvml.nvmlDeviceGetHandleByIndex, index)
    name = _ask(nvml, f"the name of GPU {index}", nvml.nvmlDeviceGetName, handle)
    memory = _ask(nvml, f"the memory of GPU {index}", nvml.nvmlDeviceGetMemoryInfo, handle)
    return NvidiaGpu(name=_text(name), total_bytes=int(memory.total), free_bytes=int(memory.free))


def _ask(nvml: Any, what: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        raise OSError(f"the NVIDIA driver does not report {what}: {error}") from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _names(visible: str | None, there_are: int) -> list[str]:
    if visible is None:
        return [str(number) for number in range(there_are)]
    return [name.strip() for name in visible.split(",") if name.strip()]


def _handle(nvml: Any, name: str) -> Any:  # noqa: ANN401
    if name.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByIndex(int(name))
