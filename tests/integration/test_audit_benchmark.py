"""`benchmarks.audit` in small: each measurement runs to its end, and the measured log is valid."""

import json

import pytest

from benchmarks.audit import __main__ as command
from benchmarks.audit import appends, large, serving, soak

pytestmark = pytest.mark.slow


def test_a_writer_on_sqlite_loses_nothing():
    """Every acknowledged entry is in the log, and it verifies; SQLite has one writer."""
    (line,) = appends.measure(["sqlite"], [1, 2], requests=4, seconds=0.5)
    assert (line.database, line.writers) == ("sqlite", 1)
    assert line.entries > 10
    assert line.append.count == line.entries
    assert 0 < line.commit.p50 <= line.commit.p99
    assert "sqlite" in appends.table([line])


def test_writers_of_one_log_on_postgresql_lose_nothing():
    """Two processes append to one log; each acknowledged entry is in it once, and it verifies."""
    (line,) = appends.measure(["postgresql"], [2], requests=4, seconds=1.0)
    assert (line.database, line.writers) == ("postgresql", 2)
    assert line.append.count == line.entries > 10


def test_a_writer_that_fails_fails_the_measurement(tmp_path, monkeypatch):
    """A failure of one process fails the measurement instead of lowering its result."""
    monkeypatch.setattr(appends, "create_signing_key", lambda _path: None)
    with pytest.raises(RuntimeError, match="writer 0: AuditKeyError"):
        list(appends.measure(["sqlite"], [1], requests=1, seconds=0.1))


def test_a_large_log_is_continued_where_it_stopped(tmp_path):
    """The second run appends the missing entries, and every step works on the whole log."""
    directory, said = tmp_path / "now", []
    directory.mkdir()
    assert large.fill(directory, 300, said.append) is not None
    assert large.fill(directory, 300, said.append) is None
    (found,) = large.measure(tmp_path, 700, said.append, commit="now", starts=1)
    findings = {done.name: done.finding for done in found.steps}
    assert findings["verify"].startswith("valid, 70")
    assert findings["verify a receipt"] == "valid"
    assert all(done.memory_mib > 1 for done in found.steps)
    assert {"start", "start, empty log"} <= findings.keys()
    assert found.bytes_per_entry > 300
    assert "| open, check, sign |" in large.table([found])


def test_a_soak_counts_two_entries_for_each_request():
    """However short it is, the log is complete and valid."""
    found = soak.measure(3.0, 0.2, lambda _text: None)
    assert found.requests > 10
    assert (found.is_complete, found.exit_code) == (True, 0)
    assert found.entries == 2 * found.requests + sum(found.bookkeeping.values())
    assert len(found.samples) > 5
    assert f"{found.requests:,} requests" in soak.table(found)


def test_both_gateways_are_measured(tmp_path):
    """With and without the log, plain and streamed, alone and sixteen at a time."""
    lines = serving.measure(rounds=2, requests=8)
    assert [(line.stream, line.concurrency) for line in lines] == [
        (False, 1),
        (False, 16),
        (True, 1),
        (True, 16),
    ]
    assert all(line.none.count == line.strict.count == 16 for line in lines)
    assert all(line.ratio > 0 for line in lines)
    provenance = command.provenance_of("python -m benchmarks.audit", model="", draft="")
    command.write(tmp_path, provenance, "serving", "Serving", serving.table(lines), serving.document(lines))
    (file,) = tmp_path.glob("*.json")
    assert len(json.loads(file.read_text())["results"]) == 4
