"""
docs/how-to/back-up-and-restore.md, run verbatim: an installation on SQLite is backed up while it runs,
destroyed, and restored; and a backup that is too old is detected.
"""

import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command import run_command
from tests.how_to import run_block

PAGE = "back-up-and-restore.md"
SECONDS = 300


def appliance(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = run_command(*words)
    if check:
        done.check_returncode()
    return done


@contextmanager
def gateway(data: Path):
    """A gateway that has opened and signed its log; no worker is needed."""
    began = time.time_ns()
    head = data / "audit.head"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "appliance",
            "gateway",
            "--data",
            str(data),
            "--port",
            "0",
            "--admin-port",
            "0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        umask=0o022,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (head.exists() and head.stat().st_mtime_ns > began):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "it signed nothing"
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
        process.stdout.close()


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The data directory of an installation that was started once."""
    data = tmp_path_factory.mktemp("installed") / "data"
    with gateway(data):
        pass
    return data


@pytest.fixture
def places(tmp_path):
    """Where the page's variables point."""
    return {
        "DATA": tmp_path / "data",
        "BACKUP": tmp_path / "backup",
        "KEYS": tmp_path / "keys",
        "EXPORT": tmp_path / "export",
    }


def test_installation_is_restored_completely(places):
    """Backed up while a gateway writes, destroyed, restored, verified against a checkpoint that was kept."""
    data = places["DATA"]
    with gateway(data):
        appliance("tenant", "create", "radiology", "--data", data)
        backed_up = [
            run_block(PAGE, title, **places) for title in ("keep a checkpoint", "back up", "save the keys")
        ]
    assert not any(done.returncode for done in backed_up), [done.stderr for done in backed_up]
    shutil.rmtree(data)
    restored = run_block(PAGE, "restore", **places)
    assert restored.returncode == 0, restored.stdout + restored.stderr
    assert "radiology" in appliance("tenant", "list", "--data", data).stdout
    with gateway(data):
        appliance("tenant", "create", "surgery", "--data", data)
    verified = appliance("audit", "verify", "--data", data, "--held", places["EXPORT"] / "checkpoint")
    assert "valid" in verified.stdout


def test_only_the_owner_can_read_what_a_gateway_and_the_commands_write(tmp_path):
    """All of the data directory while a gateway runs, and an export, under a umask of 022."""
    data, export = tmp_path / "data", tmp_path / "export"
    words = (["tenant", "create", "radiology"], ["audit", "export", export, "--purpose", "a visit"])
    with gateway(data):
        for command in words:
            process = [sys.executable, "-m", "appliance", *command, "--data", data]
            subprocess.run(process, check=True, timeout=SECONDS, umask=0o022)
        modes = {path.relative_to(tmp_path): path.stat().st_mode for path in tmp_path.rglob("*")}
    assert {"audit.db", "audit.db-wal", "audit.head", "files", "payload-keys"} <= {
        path.name for path in modes
    }
    assert [path for path, mode in modes.items() if mode & 0o077] == []


def test_a_backup_older_than_the_kept_checkpoint_is_detected(places, installed):
    """The restore stops at the checkpoint that was kept, and with the newer seal no gateway starts."""
    data = places["DATA"]
    shutil.copytree(installed, data)
    for title in ("back up", "save the keys"):
        assert run_block(PAGE, title, **places).returncode == 0
    with gateway(data):
        appliance("tenant", "create", "radiology", "--data", data)
    assert run_block(PAGE, "keep a checkpoint", **places).returncode == 0
    newer = (data / "audit.head").read_bytes()
    shutil.rmtree(data)
    restored = run_block(PAGE, "restore", **places)
    assert restored.returncode == 3, restored.stdout + restored.stderr
    (data / "audit.head").write_bytes(newer)
    command = [
        sys.executable,
        "-m",
        "appliance",
        "gateway",
        "--data",
        data,
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    assert subprocess.run(command, capture_output=True, check=False, timeout=SECONDS).returncode == 1
    assert (
        appliance("preflight", "--data", data, "--role", "gateway", "--skip", "ports", check=False).returncode
        == 1
    )


def test_a_backup_with_a_flipped_bit_is_not_restored(places, installed):
    """Its sums were taken with it."""
    data = places["DATA"]
    shutil.copytree(installed, data)
    for title in ("back up", "save the keys", "keep a checkpoint"):
        assert run_block(PAGE, title, **places).returncode == 0
    copy = places["BACKUP"] / "audit.db"
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    shutil.rmtree(data)
    assert run_block(PAGE, "restore", **places).returncode != 0
    assert not data.exists()
