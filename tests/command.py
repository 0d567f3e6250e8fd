"""
`appliance` in this process: what a command does, without the interpreter and the imports of a new one.

The commands that a test is about still run as processes; this is for those before and after them.
"""

import subprocess

from typer.testing import CliRunner

from appliance.cli import cli
from appliance.errors import ApplianceError


def run_command(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as `appliance.cli.main` does; a defect is raised."""
    result = CliRunner().invoke(cli, [str(word) for word in words], env=environment)
    complaint = result.stderr
    if isinstance(result.exception, ApplianceError):
        complaint += f"appliance: {result.exception}\n"
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, complaint)
