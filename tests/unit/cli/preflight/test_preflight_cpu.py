"""The checks of CPU and memory."""

from dataclasses import replace

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.memory import Need
from appliance.cli.preflight.processor import (
    Processor,
    detect_processor,
    judge_cores,
    judge_instructions,
    judge_memory,
)
from appliance.infra.settings import WorkerSettings

GIB = 2**30
SEEN = Processor(flags=frozenset({"avx2", "avx512f"}), bfloat16=True, cores=8, free_bytes=32 * GIB)
NEED = Need(weights=10 * GIB, token=1000, context=1000)


@pytest.mark.parametrize(
    ("flags", "result"),
    [
        ({"avx2", "avx512f"}, CheckResult.OK),
        ({"asimd"}, CheckResult.OK),
        ({"avx2"}, CheckResult.WARN),
        ({"sse4_2"}, CheckResult.FAIL),
        (set(), CheckResult.FAIL),
    ],
)
def test_the_engine_has_code_for_this_cpu(flags, result):
    """AVX-512, NEON, and AVX2 with a warning; there is none for others."""
    assert judge_instructions(replace(SEEN, flags=frozenset(flags))).result is result


def test_cpu_without_bfloat16_reports_float32():
    """Weights then take twice as much memory."""
    assert "float32" in judge_instructions(replace(SEEN, bfloat16=False)).seen


def test_one_core_is_a_warning():
    """Also if a container's quota allows no more."""
    assert judge_cores(replace(SEEN, cores=1)).result is CheckResult.WARN
    assert judge_cores(replace(SEEN, cores=1.5)).result is CheckResult.WARN
    assert judge_cores(replace(SEEN, cores=2)).result is CheckResult.OK


def test_weights_and_cache_must_fit():
    """With memory left for the engine, the gateway and the system."""
    settings = WorkerSettings(cpu_kv_cache_gib=4)
    assert judge_memory(settings, SEEN, NEED).result is CheckResult.OK
    assert judge_memory(settings, replace(SEEN, free_bytes=16 * GIB), NEED).result is CheckResult.WARN
    assert judge_memory(settings, replace(SEEN, free_bytes=13 * GIB), NEED).result is CheckResult.FAIL


def test_one_longest_context_fits_the_cache():
    """Otherwise the engine does not start."""
    check = judge_memory(WorkerSettings(cpu_kv_cache_gib=1), SEEN, replace(NEED, context=2_000_000))
    assert check.result is CheckResult.FAIL
    assert "cpu_kv_cache_gib" in check.todo


def test_deferred_prefill_must_fit_in_memory():
    """Allocated while speculation is off, at most for every token in the KV cache."""
    settings = WorkerSettings(cpu_kv_cache_gib=4)
    deferring = replace(NEED, deferred=2000)  # twice what a token takes in the cache: 8 GiB
    assert judge_memory(settings, SEEN, deferring).result is CheckResult.OK
    tight = replace(SEEN, free_bytes=24 * GIB)
    assert judge_memory(settings, tight, NEED).result is CheckResult.OK
    assert judge_memory(settings, tight, deferring).result is CheckResult.WARN
    check = judge_memory(settings, replace(SEEN, free_bytes=21 * GIB), deferring)
    assert check.result is CheckResult.FAIL
    assert "up to 8.0 GiB for deferred draft prefill" in check.seen
    assert "deferred" not in judge_memory(settings, SEEN, NEED).seen


def test_container_limits_are_applied(tmp_path):
    """Flags and memory come from the kernel, quota and limit from the control group."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    proc.mkdir()
    groups.mkdir()
    (proc / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    (proc / "meminfo").write_text("MemTotal: 64 kB\nMemAvailable:   50 kB\n")
    free = detect_processor(proc=proc, groups=groups)
    assert free.flags == {"fpu", "avx2", "avx512f"}
    assert free.free_bytes == 50 * 1024
    (groups / "cpu.max").write_text("50000 100000\n")
    (groups / "memory.max").write_text("30000\n")
    (groups / "memory.current").write_text("10000\n")
    held = detect_processor(proc=proc, groups=groups)
    assert held.cores == 0.5
    assert held.free_bytes == 20000
    (groups / "memory.stat").write_text("anon 2000\ninactive_file 8000\nactive_file 0\n")
    read = detect_processor(proc=proc, groups=groups)
    assert read.free_bytes == held.free_bytes + 8000, "weights that were read can be dropped"
    (groups / "cpu.max").write_text("max 100000\n")
    (groups / "memory.max").write_text("max\n")
    assert detect_processor(proc=proc, groups=groups) == free
