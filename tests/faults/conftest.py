"""Fixtures of the crash suite: waiting writers, the logs they start from, and the table of results."""

import queue
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.audit.sealed import SealedHead
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.timestamping import latest_text
from appliance.infra.data_directory import locate
from tests.audit_log import prepare, settings_for, signer_in
from tests.disposed_log import DAY_MS, aged, plan_of, record
from tests.faults.injection import AT_A_TIME, PLOTS, Tally, Template, WriterServer, look_at
from tests.timestamp_authority import TimestampAuthority

TABLE = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--fault-table", type=Path, help="Also write what the crash suite saw to this file.")
    parser.addoption("--all-faults", action="store_true", help="Harm each single write of a page.")


@pytest.fixture(scope="session")
def strace():
    """Skip, loudly, where no process can be traced."""
    if shutil.which("strace") is None:
        pytest.skip("CRASHES ARE NOT TESTED: strace is missing, install the Debian package `strace`")
    probe = ["strace", "-o", "/dev/null", sys.executable, "-c", ""]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = tried.stderr.strip()
        pytest.skip(f"CRASHES ARE NOT TESTED: this machine does not allow tracing (ptrace): {reason}")


@pytest.fixture(scope="session")
def servers(strace):
    """A pool of writers."""
    made = [WriterServer() for _ in range(AT_A_TIME)]
    waiting = queue.SimpleQueue()
    for server in made:
        waiting.put(server)
    yield waiting
    for server in made:
        server.close()


@pytest.fixture(scope="session")
def templates(servers, tmp_path_factory):
    """Logs to start from: none yet, closed, with a full tile, due for cleanup, spooled, to be stamped."""
    base = tmp_path_factory.mktemp("templates").resolve()
    server = servers.get()
    told = {}

    def run(task, name, start):
        shutil.copytree(base / start, base / name)
        done = server.run(task, base / name)
        assert done.ended == 0, server.errors
        told[name] = done.told

    try:
        prepare(base / "new")
        run("recover", "closed", "new")
        shutil.rmtree(base / "closed" / "export")
        shutil.copytree(base / "closed", base / "small")
        done = server.run("pad", base / "closed")
        assert done.ended == 0, server.errors
        run("write", "tiled", "closed")
        run("fill", "full", "closed")
        run("spool", "spooled", "closed")
        shutil.copytree(base / "closed", base / "stampable")
        _have_stamped(base / "stampable")
        shutil.copytree(base / "new", base / "disposable")
        _have_recorded_a_disposal(base / "disposable")
    finally:
        servers.put(server)
    return {
        name: Template(directory=base / name, told=told.get(name, []))
        for name in ("new", "small", "closed", "tiled", "full", "spooled", "stampable", "disposable")
    }


def _have_recorded_a_disposal(directory):
    """Write an old log in the directory, of which a signed entry disposes in part."""
    installation = locate(settings_for(directory))
    store = SqlAuditStore(installation.database_url)
    log = aged(store, signer_in(directory), old=700, step_ms=DAY_MS)
    record(log, plan_of(log))
    SealedHead(installation.sealed_head).write(store.latest_checkpoint().note)
    store.close()


def _have_stamped(directory):
    """Leave a time stamp over the newest checkpoint in the log's directory, and the certificate it needs."""
    authority = TimestampAuthority(directory / "authority")
    store = SqlAuditStore(locate(settings_for(directory)).database_url)
    text, _ = latest_text(store)
    store.close()
    (directory / "stamp.tsr").write_bytes(authority.stamp(text.encode()))
    shutil.copyfile(authority.certificate, directory / "stamp.pem")


@pytest.fixture(scope="session")
def scenes(servers, templates, tmp_path_factory):
    """Every plot with the calls its task makes."""
    scratch = tmp_path_factory.mktemp("unharmed").resolve()
    server = servers.get()
    try:
        return {name: look_at(server, name, templates[PLOTS[name].template], scratch) for name in PLOTS}
    finally:
        servers.put(server)


@pytest.fixture(scope="session")
def tally(request):
    """Counts every case; printed at the end, and written where `--fault-table` says."""
    tally = Tally()
    yield tally
    request.config.stash[TABLE] = tally.table()


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash.get(TABLE, "")
    terminalreporter.write(table)
    wanted = config.getoption("--fault-table", default=None)
    if table and wanted:
        wanted.write_text(table, encoding="utf-8")
