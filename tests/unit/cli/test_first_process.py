"""The command as the first process of a container."""

import signal
import subprocess
import sys

import pytest

EARLY = "import os, signal, time; import appliance.cli; os.kill(1, signal.SIGTERM); time.sleep(60)"
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def test_sigterm_ends_the_first_process_before_a_service_handles_it():
    """It has no default action: a pod deleted during its start would last for its grace period."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip(
            "NO PROCESS NAMESPACE CAN BE MADE HERE: the end of a container's first process is not tried"
        )
    command = [*NAMESPACE, sys.executable, "-c", EARLY]
    done = subprocess.run(command, capture_output=True, timeout=50, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
