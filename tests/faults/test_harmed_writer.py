"""
If any call of the writer fails or is its last: the log is valid and has what the writer acknowledged.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.injection import AT_A_TIME, FAULTS, PLOTS, Run, harm, judge


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", PLOTS)
def test_no_fault_loses_an_acknowledged_entry_or_makes_the_log_invalid(
    name, fault, scenes, servers, tally, tmp_path, pytestconfig
):
    """For each time a call changes a file of the log; of writes of pages, each 25th without --all-faults."""
    scene = scenes[name]
    before = len(tally.complaints)

    def one(point):
        call, number = point
        server = servers.get()
        try:
            directory = tmp_path.resolve() / f"{call}-{number}"
            return harm(server, scene, directory, call, FAULTS[fault].format(n=number))
        finally:
            servers.put(server)

    points = list(scene.points(every=1 if pytestconfig.getoption("--all-faults", default=False) else 25))
    assert points
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for (call, number), found in zip(points, pool.map(one, points), strict=True):
            tally.add(scene, call, number, fault, found)
    complaints = tally.complaints[before:]
    assert not complaints, f"{len(complaints)} of {len(points)}:\n" + "\n".join(complaints[:5])
    outcomes = tally.outcomes_of(scene, fault)
    assert outcomes == {"killed"} if fault == "killed" else "killed" not in outcomes


def test_suite_injects_faults_into_durable_writes(scenes):
    """A run without the calls that matter would prove nothing."""
    assert {"pwrite64", "fdatasync", "fsync", "rename", "write", "openat"} <= set(scenes["write"].calls)
    assert {"write", "fsync", "openat"} <= set(scenes["spool"].calls)
    assert {"pwrite64", "fdatasync", "unlink"} <= set(scenes["drain"].calls)
    assert scenes["move"].calls["fdatasync"] > scenes["write"].calls["fdatasync"]
    assert "unlink" in scenes["close"].calls
    assert {"pwrite64", "fdatasync"} <= set(scenes["stamp"].calls)
    assert scenes["check"].calls["rename"] == 2


@pytest.mark.parametrize(
    ("report", "complaint"),
    [
        ({"acknowledged": [999, "x", "00"]}, "the log ends at"),
        ({"acknowledged": [0, "x", "00"]}, "not the one that was acknowledged"),
        ({"acknowledged": [None, "x", None]}, "is not in the log"),
        ({"refused": ["request.outcome", "x"]}, "its intent is gone"),
        ({"published": "nothing that was signed"}, "a published checkpoint is invalid"),
        ({"stamped": 7}, "is gone"),
    ],
)
def test_a_violated_promise_is_reported(report, complaint, servers, templates, tmp_path):
    """The check can fail."""
    directory = tmp_path.resolve() / "log"
    shutil.copytree(templates["closed"].directory, directory)
    server = servers.get()
    try:
        assert complaint in judge(server, directory, [], Run(told=[report], ended=0))
    finally:
        servers.put(server)
