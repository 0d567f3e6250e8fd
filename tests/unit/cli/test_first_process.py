"""The command as the first process of a container."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KILL, IMPORT = "os.kill(1, signal.SIGTERM)", "import appliance.cli"
DOCKERFILE = Path(__file__).parents[3] / "deploy" / "images" / "Dockerfile"
(ENTRYPOINT,) = (
    json.loads(words) for words in re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
)
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@pytest.mark.parametrize("steps", [(IMPORT, KILL), (KILL, IMPORT)], ids=["after the imports", "before them"])
def test_sigterm_ends_the_first_process_before_a_service_handles_it(steps: tuple[str, str]):
    """It has no default action: a pod deleted during its start would last for its grace period."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip(
            "NO PROCESS NAMESPACE CAN BE MADE HERE: the end of a container's first process is not tried"
        )
    program = "; ".join(("import os, signal, time", *steps, "time.sleep(60)"))
    command = [*NAMESPACE, *ENTRYPOINT[:-1], sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, timeout=50, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
