"""
After a power cut the synced data alone is a valid log with every acknowledged entry.
"""

import json
import shutil
from pathlib import Path
from random import Random

import pytest

from tests.faults.injection import Run, judge
from tests.faults.powercut import STRACE, Disk, parse_trace

CHANCES = 2
"""Random remains of unsynced writes that are tried at each moment, in addition to none."""


@pytest.fixture
def moments(templates, servers, tmp_path):
    """Play a task of the writer and yield each moment before a sync: the reports so far, and the disk."""

    def moments_(task, name):
        template = templates[name].directory
        directory = tmp_path.resolve() / "played"
        shutil.copytree(template, directory)
        disk = Disk.of(directory)
        server = servers.get()
        try:
            run = server.run(task, directory, STRACE)
        finally:
            servers.put(server)
        assert run.outcome == "unharmed", run.told
        found, told = [], []
        for step in parse_trace(run.trace):
            if step.call == "report":
                told.append(json.loads(step.content))
            elif step.path.startswith(str(directory)):
                if step.call == "sync":
                    found.append((list(told), disk.after_power_cut(), [*_chances(disk, len(found))]))
                disk.follow(step)
        found.append((list(told), disk.after_power_cut(), []))
        reports = [report for report in run.told if not {"pid", "ended"} & set(report)]
        assert told == reports, "every report is in the trace"
        for path in filter(Path.is_file, directory.iterdir()):
            assert path.name.endswith("-shm") or disk.seen[str(path)] == path.read_bytes(), path
        return directory, found

    return moments_


def _chances(disk, moment):
    return (disk.after_power_cut(Random(f"{moment}-{number}")) for number in range(CHANCES))


def _complaint(server, directory, told, files):
    """Put the files where the log was, and judge them."""
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path, content in files.items():
        if not path.endswith("-shm"):  # memory that processes share; SQLite recreates it
            (directory / path.rpartition("/")[2]).write_bytes(content)
    (directory / "audit.key").chmod(0o600)
    return judge(server, directory, [], Run(told=told, ended=-9))


@pytest.mark.parametrize("name", ["closed", "full"])
def test_a_power_cut_takes_nothing_that_was_acknowledged(name, moments, servers):
    """At the last instant before each sync, with nothing or anything of the unsynced writes left."""
    directory, found = moments("write", name)
    assert len(found) > 10
    server = servers.get()
    try:
        for number, (told, bare, torn) in enumerate(found):
            for files in (bare, *torn):
                complaint = _complaint(server, directory, told, files)
                assert complaint is None, f"at sync {number}: {complaint}"
    finally:
        servers.put(server)


def test_without_full_syncs_the_same_power_cut_does_lose_entries(moments, servers):
    """The simulation can fail: with `synchronous=NORMAL`, acknowledged entries are gone."""
    directory, found = moments("carelessly", "closed")
    server = servers.get()
    try:
        told, bare, _ = found[-1]
        assert "acknowledged" in str(told)
        assert _complaint(server, directory, told, bare) is not None
    finally:
        servers.put(server)
