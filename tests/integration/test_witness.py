"""
A real gateway process has its log witnessed by real witness processes, over HTTP and by file.

The log is also time-stamped by OpenSSL.  The witness's machine and the log's are two directories here; only
a URL or a file connects them.  Every test ends with the auditor's verifier, run alone as a copied file.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from appliance.audit import verify
from appliance.audit.entry_types import EntryType
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.audit.verify import ExitCode
from appliance.infra.settings import DataSettings, Settings
from tests.audit_log import open_log
from tests.command import run_command
from tests.timestamp_authority import TimestampAuthority, answering

ORIGIN = "appliance.local/audit"
WITNESS = "auditor.test/witness"
SECOND = "press.test/witness"
SECONDS = 120.0


def command(*arguments, check=True):
    """Run `appliance audit ...` to its end."""
    done = run_command("audit", *arguments)
    assert not check or done.returncode == 0, done.stderr
    return done


def until(found, what):
    """Wait until `found` returns something."""
    deadline = time.monotonic() + SECONDS
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.1)
    return value


@contextlib.contextmanager
def process(log, *arguments, environment=None):
    """One running command of ours, what it prints going to a file."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "appliance", *map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        try:
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            child.wait(SECONDS)


@contextlib.contextmanager
def serving(home, log, port=0):
    """
    A witness on the network; gives its URL.

    At a separate address: no client's socket can take its port while it is stopped.
    """
    address = ("--host", "127.0.0.2", "--port", port)
    with process(log, "audit", "witness", "serve", home, *address) as child:
        pattern = re.compile(r"cosigns at (http://\S+)")

        def url():
            assert child.poll() is None, log.read_text()
            return pattern.search(log.read_text())

        yield until(url, "the witness")[1]


class Gateway:
    """A gateway without workers, whose log grows by readings that are recorded."""

    def __init__(self, data, url):
        self.data, self.url = data, url

    def read(self, count):
        """Make so many entries."""
        key = (self.data / "admin.key").read_text().strip()
        reading = {"account": "tester", "operation": "tail", "start": 0, "end": 1}
        for _ in range(count):
            request = urllib.request.Request(
                f"{self.url}/admin/v1/audit/reads",
                data=json.dumps(reading).encode(),
                headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            )
            assert urllib.request.urlopen(request).status == 201

    def metric(self, name):
        """Value of a metric."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


@contextlib.contextmanager
def gateway(data, log, witnesses=(), **settings):
    """A running gateway whose log knows these witnesses."""
    names = {"witnesses": json.dumps(list(witnesses)), "witness_seconds": "1", "checkpoint_seconds": "0.1"}
    environment = {f"APPLIANCE_AUDIT__{name.upper()}": value for name, value in {**names, **settings}.items()}
    # Without a worker it prints no ready line; the admin listener is at an address of its own.
    environment["APPLIANCE_API__ADMIN_HOST"] = "127.0.0.3"
    ports = ("--port", 0, "--admin-port", 0)
    with process(log, "gateway", "--data", data, *ports, environment=environment) as child:

        def port():
            assert child.poll() is None, log.read_text()
            sockets = psutil.Process(child.pid).net_connections("tcp")
            return [
                each.laddr.port
                for each in sockets
                if each.status == psutil.CONN_LISTEN and each.laddr.ip == "127.0.0.3"
            ]

        yield Gateway(data, f"http://127.0.0.3:{until(port, 'the gateway')[0]}")
        child.send_signal(signal.SIGTERM)
        assert child.wait(SECONDS) == 0, log.read_text()


async def grow(data, count):
    """Append entries to a log that no process has open, and sign it."""
    store = SqlAuditStore(f"sqlite:///{data / 'audit.db'}")
    async with open_log(Settings(data=DataSettings(directory=data)), store) as log:
        for _ in range(count):
            await log.sink.append(EntryType.AUDIT_READ, actor="cli:tester", operation="tail")
    store.close()


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def log_key(data):
    """The log's public key."""
    data.mkdir(mode=0o700)
    create_signing_key(data / "audit.key")
    return load_signing_key(data / "audit.key", ORIGIN).vkey


@pytest.fixture
def config(tmp_path):
    """Write a settings file for commands on the log's machine."""

    def config_(*witnesses, **audit):
        path = tmp_path / "settings.yaml"
        path.write_text(json.dumps({"audit": {"witnesses": list(witnesses), **audit}}))
        return path

    return config_


@pytest.fixture
def auditor(tmp_path):
    """Export the log and verify it with the copied verifier; returns exit code and report."""

    def audit(data, *arguments):
        directory = tmp_path / f"export-{len(list(tmp_path.glob('export-*')))}"
        command("export", directory, "--data", data, "--unrecorded")
        copy = tmp_path / "verify.py"
        shutil.copy(verify.__file__, copy)
        done = subprocess.run(
            [sys.executable, "-I", copy, directory, "--json", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)

    return audit


def test_a_running_log_is_witnessed_over_http(tmp_path, data, log_key, auditor):
    """Two witnesses: one stops, the log continues without it, it returns; the other is never up."""
    keys = {
        name: command("witness", "init", tmp_path / name[:5], "--name", name, "--log", log_key, *more).stdout
        for name, more in ((WITNESS, ()), (SECOND, ("--post-quantum",)))
    }
    for name, text in keys.items():
        (tmp_path / f"{name[:5]}.keys").write_text(text)
    with contextlib.ExitStack() as stack:
        witness = contextlib.ExitStack()
        stack.enter_context(witness)
        home = tmp_path / WITNESS[:5]
        first = witness.enter_context(serving(home, tmp_path / "w1.log"))
        entries = [
            {"name": WITNESS, "key": keys[WITNESS].strip(), "url": first},
            {"name": SECOND, "key": str(tmp_path / f"{SECOND[:5]}.keys"), "url": "http://127.0.0.1:9"},
        ]
        running = stack.enter_context(gateway(data, tmp_path / "gateway.log", entries))
        running.read(3)
        size = "appliance_audit_witnessed_size"
        until(
            lambda: running.metric(size) == running.metric("appliance_audit_tree_size") > 3, "a cosignature"
        )
        assert running.metric('appliance_audit_witnesses{state="known"}') == 2
        assert running.metric('appliance_audit_witnesses{state="cosigned"}') == 1
        assert running.metric("appliance_audit_last_witness_timestamp_seconds") > 1_700_000_000
        before = running.metric(size)
        witness.close()
        running.read(3)
        assert running.metric(size) == before
        stack.enter_context(serving(home, tmp_path / "w2.log", port=first.rpartition(":")[2]))
        until(lambda: running.metric(size) >= before + 3, "the next cosignature")
    assert "witness_failed" in (tmp_path / "gateway.log").read_text()
    code, report = auditor(data, "--key", log_key, "--witness", keys[WITNESS].strip())
    assert (code, report["witnesses_named"]) == (ExitCode.VALID, 1)
    assert report["witnessed_size"] >= before + 3
    both = ("--witness", keys[WITNESS].strip(), "--witness", tmp_path / f"{SECOND[:5]}.keys")
    assert auditor(data, "--key", log_key, *both)[0] == ExitCode.UNWITNESSED
    assert auditor(data, "--key", log_key, *both, "--witnesses-needed", "1")[0] == ExitCode.VALID


async def test_no_request_waits_for_the_time_stamp_authority(tmp_path, data, log_key, auditor):
    """Entries are recorded while it has not answered; then its time stamp is kept."""
    authority = TimestampAuthority(tmp_path / "authority")
    await grow(data, 3)
    released = threading.Event()

    def answer_late(query):
        assert released.wait(SECONDS)
        return authority.reply(query)

    certificate, size = str(authority.certificate), "appliance_audit_timestamped_size"
    with answering(answer_late) as (url, asked):
        settings = {"timestamp_url": url, "timestamp_certificate_file": certificate}
        with gateway(data, tmp_path / "gateway.log", **settings) as running:
            until(lambda: asked, "the request to the authority")
            running.read(3)
            assert running.metric(size) == 0
            released.set()
            until(lambda: running.metric(size) > 3, "the time stamp")
            assert running.metric("appliance_audit_timestamp_interval_seconds") == 3600
            assert running.metric("appliance_audit_last_timestamp_seconds") > 1_700_000_000
            assert abs(running.metric("appliance_audit_timestamp_clock_difference_seconds")) < 60
    code, report = auditor(data, "--key", log_key, "--timestamp-cert", authority.issuer)
    assert (code, report["timestamps"]["level"], report["timestamps"]["trusted"]) == (
        ExitCode.VALID,
        "timed",
        1,
    )


async def test_a_log_is_witnessed_by_file(tmp_path, data, log_key, config, auditor):
    """Export, carry, cosign, carry back, import; the second time the proof starts where the first ended."""
    home, file = tmp_path / "witness", tmp_path / "head.txt"
    key = command("witness", "init", home, "--name", WITNESS, "--log", log_key).stdout.strip()
    here = ("--config", config({"name": WITNESS, "key": key}), "--data", data)
    sizes = []
    for _ in range(2):
        await grow(data, 4)
        if not sizes:
            assert "UNWITNESSED (0 of 1)" in command("witness", "status", *here).stdout
            assert command("verify", *here).returncode == ExitCode.VALID
            needed = command("verify", *here, "--witnesses-needed", "1", check=False)
            assert needed.returncode == ExitCode.UNWITNESSED
        command("witness", "export-head", file, *here)
        assert file.read_text().startswith(f"old {sizes[-1] if sizes else 0}\n")
        command("witness", "cosign", home, file)
        imported = command("witness", "import", file, *here).stdout
        assert command("verify", *here, "--witnesses-needed", "1").returncode == ExitCode.VALID
        sizes.append(int(re.search(r"cosigned (\d+) entries", imported)[1]))
    assert sizes[0] + 4 <= sizes[1]
    assert f"{sizes[1]} of {sizes[1]} entries" in command("witness", "status", *here).stdout
    code, report = auditor(data, "--key", log_key, "--witness", key)
    assert (code, report["witnessed_size"]) == (ExitCode.VALID, sizes[1])


async def test_a_witness_refuses_what_does_not_continue_the_log(tmp_path, data, log_key, config):
    """A log restored from an old copy, and one rebuilt with the stolen key, get an error with the reason."""
    home, file = tmp_path / "witness", tmp_path / "head.txt"
    key = command("witness", "init", home, "--name", WITNESS, "--log", log_key).stdout.strip()
    await grow(data, 0)
    shutil.copytree(data, tmp_path / "old")
    await grow(data, 4)
    settings = config({"name": WITNESS, "key": key})
    command("witness", "export-head", file, "--config", settings, "--data", data)
    command("witness", "cosign", home, file)
    size = int(file.read_text().splitlines()[1])

    restored = ("--config", settings, "--data", tmp_path / "old")
    command("witness", "export-head", file, *restored)
    refused = command("witness", "cosign", home, file, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"--from {size}" in refused.stderr
    shrunk = command("witness", "export-head", file, "--from", size, *restored, check=False)
    assert "rolled back" in shrunk.stderr

    await grow(tmp_path / "old", 9)  # another history than the one that was cosigned
    command("witness", "export-head", file, "--from", size, *restored)
    forked = command("witness", "cosign", home, file, check=False)
    assert "not cosigned" in forked.stderr
    assert command("witness", "import", file, *restored, check=False).returncode == 1


def test_a_key_is_rotated_between_two_runs(tmp_path, data, log_key, auditor):
    """Old key and new key both verify; a running gateway forbids it, and an old key never signs again."""
    with gateway(data, tmp_path / "gateway.log", post_quantum="true") as running:
        running.read(2)
        assert "another gateway runs" in command("rotate-key", "--data", data, check=False).stderr
        old = command("key", "--data", data).stdout
    done = command("rotate-key", "--data", data)
    new = command("key", "--data", data).stdout
    assert new in done.stdout
    assert len(set(old.split()) | set(new.split())) == 4
    retired = [Path(line.split()[1].rstrip(":")) for line in done.stderr.splitlines() if "Destroy" in line]
    assert len(retired) == 2
    for path in retired:
        path.unlink()
    with gateway(data, tmp_path / "gateway2.log", post_quantum="true") as running:
        running.read(2)
    (tmp_path / "old.keys").write_text(old)
    (tmp_path / "new.keys").write_text(new)
    for keys in ("old.keys", "new.keys"):
        code, report = auditor(data, "--key", tmp_path / keys)
        assert (code, report["problems"]) == (ExitCode.VALID, [])
        assert len(report["rotations"]) == (2 if keys == "old.keys" else 0)
    assert auditor(data, "--key", log_key)[0] == ExitCode.VALID
    plain = command("key", "--data", data)
    assert plain.stdout == new
