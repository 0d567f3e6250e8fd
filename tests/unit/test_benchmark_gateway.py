"""What the benchmarks of the gateway make of what they measured."""

import pytest

from benchmarks.gateway.cases import LOADS, Found
from benchmarks.gateway.client import Segment
from benchmarks.gateway.instructions import total_of
from benchmarks.gateway.profile import counts, stage_of


def segment(*, units, cpu_seconds):
    return Segment(first_bytes=[0.1] * units, totals=(), seconds=1.0, units=units, cpu_seconds=cpu_seconds)


def test_cpu_time_of_a_request_is_the_median_of_the_rounds():
    found = Found(target="x", load=LOADS[0])
    assert found.cpu_ms is None
    found.segments += [segment(units=100, cpu_seconds=seconds) for seconds in (0.1, 0.2, 0.9)]
    assert found.cpu_ms == pytest.approx(2.0)


def test_cpu_time_of_a_target_without_a_process_is_unknown():
    assert Found(target="x", load=LOADS[0], segments=[segment(units=9, cpu_seconds=None)]).cpu_ms is None


def test_samples_count_for_the_innermost_function_and_its_stage():
    stages, functions = counts(
        [
            "main (appliance/__main__.py:5);send (uvicorn/protocols/http/httptools_impl.py:430) 7",
            "main (appliance/__main__.py:5);send (uvicorn/protocols/http/httptools_impl.py:431) 1",
            "_work (appliance/audit/commit_thread.py:9);_commit (appliance/audit/sqlite_append.py:60) 3",
        ]
    )
    assert stages == {"HTTP server": 8, "audit: commit": 3}
    assert functions["send (uvicorn/protocols/http/httptools_impl.py)"] == 8


@pytest.mark.parametrize(
    ("file", "stage"),
    [
        ("appliance/audit/entry.py", "audit: entries and writer"),
        ("appliance/infra/json_members.py", "rest of the gateway"),
        ("<string>", "other"),
    ],
)
def test_the_longest_prefix_names_the_stage(file, stage):
    assert stage_of(file) == stage


def test_instructions_are_the_total_of_a_dump():
    dump = "version: 1\nevents: Ir\nsummary: 18446744073660459854\n\nfn=(1) main\n0 7\ntotals: 46340\n"
    assert total_of(dump) == 46340
    assert total_of("version: 1\nevents: Ir\n") == 0  # nothing ran
