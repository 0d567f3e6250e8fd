"""Hardware detection, from texts and directories of other machines."""

import os
from pathlib import Path

import pytest

from appliance.errors import ConfigurationError
from appliance.serving.devices import (
    Device,
    DeviceKind,
    Hardware,
    choose_device,
    choose_dtype,
    detect_hardware,
    has_bfloat16,
    usable_cores,
)

CASCADE_LAKE = "processor : 0\nflags\t\t: fpu avx512f avx512_vnni\n\nprocessor : 1\nflags : fpu avx512_bf16\n"
SAPPHIRE_RAPIDS = "processor : 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n"
GRAVITON = "processor : 0\nFeatures\t: fp asimd bf16 i8mm svebf16\n"
NO_GPU = Hardware(gpus=0, bfloat16=False, openmp=None)
EIGHT_GPUS = Hardware(gpus=8, bfloat16=True, openmp=None)


def no_library() -> int:
    raise OSError


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (CASCADE_LAKE, False),
        (SAPPHIRE_RAPIDS, True),
        (GRAVITON, True),
        ("", False),
        ("flags : mybf16x", False),
    ],
)
def test_reads_bfloat16_from_the_first_processor(cpuinfo, expected):
    """Only a whole word of the first processor's flags counts."""
    assert has_bfloat16(cpuinfo) is expected


def test_counts_the_drivers_directory_without_nvml(tmp_path):
    """A container without NVML still knows its GPUs."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "driver" / "nvidia" / "gpus" / name).mkdir(parents=True)
    assert detect_hardware(proc=tmp_path, count_by_nvml=no_library).gpus == 2


def test_nvml_overrides_the_drivers_directory(tmp_path):
    """A container that was given one of two GPUs sees both in /proc."""
    (tmp_path / "driver" / "nvidia" / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert detect_hardware(proc=tmp_path, count_by_nvml=lambda: 0).gpus == 0


def test_detects_a_plain_cpu(tmp_path):
    """Neither /proc nor a driver nor OpenMP: a plain CPU."""
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    seen = detect_hardware(proc=tmp_path, prefix=tmp_path, groups=tmp_path, count_by_nvml=no_library)
    assert seen == NO_GPU


@pytest.mark.parametrize(("limit", "less"), [("50000 100000\n", True), ("max 100000\n", False), ("", False)])
def test_a_containers_cpu_limit_counts(tmp_path, limit, less):
    (tmp_path / "cpu.max").write_text(limit)
    everything = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (0.5 if less else everything)
    seen = detect_hardware(proc=tmp_path, groups=tmp_path, count_by_nvml=no_library)
    assert seen.cores == (1 if less else everything)


def test_finds_openmp_in_the_interpreters_environment(tmp_path):
    """vLLM's CPU build installs the library below the environment's root."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    seen = detect_hardware(proc=tmp_path, prefix=tmp_path, count_by_nvml=no_library)
    assert seen.openmp == tmp_path / "lib" / "libiomp5.so"


def test_detects_this_machine():
    """It never raises, on any machine."""
    assert detect_hardware(prefix=Path("/")).gpus >= 0


def test_auto_prefers_the_gpu():
    """`auto` prefers the GPU; `cpu` does not."""
    assert choose_device("auto", EIGHT_GPUS).kind is DeviceKind.GPU
    assert choose_device("gpu", EIGHT_GPUS).count == 8
    assert choose_device("cpu", EIGHT_GPUS).kind is DeviceKind.CPU
    assert choose_device("auto", NO_GPU).kind is DeviceKind.CPU


def test_refuses_gpu_without_one():
    """A silent fallback to the CPU would look like a slow GPU."""
    with pytest.raises(ConfigurationError, match="shows no GPU"):
        choose_device("gpu", NO_GPU)


@pytest.mark.parametrize(
    ("wanted", "bfloat16", "expected"),
    [
        ("auto", False, "float32"),
        ("auto", True, "auto"),
        ("bfloat16", False, "bfloat16"),
        ("float16", True, "float16"),
    ],
)
def test_auto_dtype_follows_the_device(wanted, bfloat16, expected):
    """Without bfloat16 instructions `auto` is float32; an explicit type is kept."""
    assert choose_dtype(wanted, Device(kind=DeviceKind.CPU, count=1, bfloat16=bfloat16)) == expected
