"""Where the keys of a first start are shown, and where not."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import run_command
from tests.leaks import KEY

SECONDS = 60


def start_once(data: Path, output: int, printed: Callable[[], str]) -> str:
    """What a gateway prints until it has signed its log; no worker is needed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "appliance", "gateway", "--data", str(data), "--port=0", "--admin-port=0"],
        stdout=output,
        stderr=output,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (data / "audit.head").exists():
            assert process.poll() is None, printed()
            assert time.monotonic() < deadline, "it signed nothing"
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
    return printed()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_a_gateway_prints_no_key_to_a_file_or_pipe(data, tmp_path):
    """Container engines and service managers keep what it prints, so it names the file instead."""
    log = tmp_path / "log"
    with log.open("wb") as output:
        printed = start_once(data, output.fileno(), log.read_text)
    assert not re.search(KEY, printed), printed
    key = data / "admin.key"
    assert f"admin key        in {key}\n" in printed
    assert re.fullmatch(KEY, key.read_text().strip())
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_terminal_shows_the_admin_key_of_a_first_start(data):
    """To the person who started it."""
    ours, theirs = os.openpty()
    try:
        printed = start_once(data, theirs, lambda: os.read(ours, 2**16).decode())
    finally:
        os.close(ours)
        os.close(theirs)
    assert (data / "admin.key").read_text().strip() in printed


def test_a_gateway_makes_no_tenant_that_may_call_models(data, tmp_path):
    """The tenant `demo`, without limits, is for `appliance up`."""
    log = tmp_path / "log"
    with log.open("wb") as output:
        start_once(data, output.fileno(), log.read_text)
    listed = run_command("tenant", "list", "--data", data)
    assert listed.returncode == 0, listed.stderr
    assert "operator" in listed.stdout
    assert "demo" not in listed.stdout
    assert not (data / "demo.key").exists()
