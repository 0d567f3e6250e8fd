"""
Ask the NVIDIA driver's own library what GPUs there are; it needs neither CUDA nor a child process.

Functions and structures are those of NVML (https://docs.nvidia.com/deploy/nvml-api/).
"""

import ctypes
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The driver, and what it shows this process."""

    version: str
    """Such as `570.133.20`."""
    cuda: tuple[int, int]
    """Newest CUDA version it runs: major, minor."""
    gpus: tuple[Gpu, ...]


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def look_at_driver(library: str = LIBRARY) -> Driver | None:
    """
    The driver and its GPUs; None where there is no driver, or this process may not use it.

    Raises:
        OSError: the library is there and answers one of the questions with an error.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        version = ctypes.create_string_buffer(TEXT_BYTES)
        _ask(nvml.nvmlSystemGetDriverVersion(version, TEXT_BYTES), "its version")
        cuda, count = ctypes.c_int(0), ctypes.c_uint(0)
        _ask(nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)), "its CUDA version")
        _ask(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "the number of GPUs")
        return Driver(
            version=version.value.decode(),
            cuda=(cuda.value // 1000, cuda.value % 1000 // 10),
            gpus=tuple(_gpu(nvml, index) for index in range(count.value)),
        )
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(TEXT_BYTES), _Memory()
    _ask(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), f"GPU {index}")
    _ask(nvml.nvmlDeviceGetName(handle, name, TEXT_BYTES), f"the name of GPU {index}")
    _ask(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), f"the memory of GPU {index}")
    return Gpu(name=name.value.decode(), total_bytes=memory.total, free_bytes=memory.free)


def _ask(code: int, what: str) -> None:
    if code:
        message = f"the NVIDIA driver does not tell {what} (NVML error {code})"
        raise OSError(message)
