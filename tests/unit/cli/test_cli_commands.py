"""The command itself: what it lists, and how little it does before a command's own work."""

import resource
import subprocess
import sys

import pytest
from typer.main import get_command

from appliance.cli import COMMANDS, cli

REPEATS = 5
LARGEST_RATIO = 25
"""Of the CPU time of `appliance version` and of `python -c pass`; importing all commands makes it 100."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_commands_help_says(name):
    """The list is a table, so that `appliance --help` imports no command."""
    command = get_command(cli).commands[name]
    assert command.name == name
    assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name][2]


def cpu_seconds(*arguments: str) -> float:
    def of_children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = of_children()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return of_children() - before


@pytest.mark.parametrize("arguments", [("version",), ("--help",)], ids=" ".join)
def test_starts_without_importing_the_commands(arguments):
    """In turn, and the least of several: others use the machine."""
    pairs = [(cpu_seconds("-c", "pass"), cpu_seconds("-m", "appliance", *arguments)) for _ in range(REPEATS)]
    assert min(pair[1] for pair in pairs) <= LARGEST_RATIO * min(pair[0] for pair in pairs)
