"""
How much energy this worker's GPUs have taken, by the driver's own counters.

NVML counts millijoules since the driver was loaded, on Volta and newer
(`nvmlDeviceGetTotalEnergyConsumption`, https://docs.nvidia.com/deploy/nvml-api/).  NVIDIA's Python
bindings are used where they are installed.  It fails open: what cannot be read is not said, and costs are
then made of the watts in the settings.  So it is for a worker that spans several machines: the driver here
knows the GPUs of this one only, and a part must not pass for the whole.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any


def open_meter(
    visible: str | None, count: int, load: Callable[[], ModuleType | None] | None = None
) -> "EnergyMeter | None":
    """
    A meter of the GPUs that a worker uses; None where nothing measures all of them.

    Args:
        visible: `CUDA_VISIBLE_DEVICES`, numbers or ids of GPUs; None where all are visible.
        count: GPUs the worker uses, the first ones it can see.
        load: gives NVIDIA's bindings, or None where there are none (for tests).
    """
    nvml: Any = (load or _load)()
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


class EnergyMeter:
    """Reads the counters of some GPUs."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:  # noqa: ANN401 - the bindings have no types
        self._nvml = nvml
        self._handles = handles

    @property
    def gpus(self) -> int:
        """GPUs it reads."""
        return len(self._handles)

    def read(self) -> int | None:
        """Millijoules since the driver was loaded, of all of them; None where one does not say."""
        try:
            return sum(int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(each)) for each in self._handles)
        except self._nvml.NVMLError:
            return None


def _load() -> ModuleType | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _names(visible: str | None, there_are: int) -> list[str]:
    if visible is None:
        return [str(number) for number in range(there_are)]
    return [name.strip() for name in visible.split(",") if name.strip()]


def _handle(nvml: Any, name: str) -> Any:  # noqa: ANN401 - the bindings have no types
    if name.startswith("GPU-"):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByIndex(int(name))
