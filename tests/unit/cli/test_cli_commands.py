"""The command itself: what it lists, and how little it does before a command's own work."""

import os
import shlex
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from appliance.cli import COMMANDS, cli
from appliance.cli.examples import EXAMPLES
from appliance.errors import ConfigurationError
from appliance.infra.settings import CONFIG_VARIABLE


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_commands_help_says(name):
    """The list is a table, so that `appliance --help` imports no command."""
    command = get_command(cli).commands[name]
    assert command.name == name
    assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name][2]


def leaves(path, command):
    for name in (children := getattr(command, "commands", {})):
        yield from leaves(f"{path} {name}", children[name])
    if not children:
        yield path, command


def test_every_command_has_an_example():
    for path, command in leaves("appliance", get_command(cli)):
        assert any(f"{line} ".startswith(f"{path} ") for line in EXAMPLES), path
        assert command.epilog.startswith("Example")


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_is_parsed_by_its_command(example: str):
    """Nothing runs: options and arguments are read and converted."""
    command, words = get_command(cli), shlex.split(example)
    while hasattr(command, "commands"):
        words = words[1:]
        command = command.commands[words[0]]
    command.make_context(words[0], words[1:]).close()


def test_help_ends_with_examples():
    assert "appliance audit show 4711" in CliRunner().invoke(cli, ["audit", "show", "--help"]).stdout


def completed(*words: str) -> tuple[list[str], set[str]]:
    """What the shell is offered, and the modules of commands that were imported for it."""
    environment = {
        **os.environ,
        "_APPLIANCE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    program = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
        "from appliance.cli import cli; cli(prog_name='appliance')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    modules = {f"appliance.{module}" for module, _, _ in COMMANDS.values()}
    return done.stdout.split(), modules.intersection(done.stderr.split())


def test_shell_completes_names_without_importing_their_commands():
    assert completed("appliance", "au") == (["audit"], {"appliance.cli"})


def test_shell_completes_what_is_below_a_command_by_importing_that_one_only():
    assert completed("appliance", "audit", "verif") == (["verify"], {"appliance.cli", "appliance.cli.audit"})


@pytest.mark.parametrize("arguments", [("version",), ("--help",)], ids=" ".join)
def test_starts_without_importing_the_commands(arguments):
    """Importing all of them takes seconds, mostly for packages that others wrote."""
    call = f"cli({list(arguments)}, standalone_mode=False)"
    program = f"import sys; from appliance.cli import cli; {call}; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stderr.split())
    assert "appliance.errors" in imported
    assert imported.isdisjoint({"fastapi", "sqlalchemy", "aiohttp", "cryptography"})
    assert {name for name in imported if name.startswith("appliance.cli.")} <= {"appliance.cli.examples"}


def test_settings_file_of_the_machine_is_the_default(tmp_path, monkeypatch):
    file = tmp_path / "appliance.yaml"
    monkeypatch.setattr("appliance.cli.common.options.DEFAULT_CONFIG", file)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    of_defaults = CliRunner().invoke(cli, ["config"], catch_exceptions=False)
    file.write_text("api: {port: 1234}")
    read = CliRunner().invoke(cli, ["config"], catch_exceptions=False)
    assert ("port: 1234" in of_defaults.stdout, "port: 1234" in read.stdout) == (False, True)


def test_settings_file_of_the_machine_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """Defaults in its place would serve without what it demands."""
    (tmp_path / "appliance.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    monkeypatch.setattr("appliance.cli.common.options.DEFAULT_CONFIG", tmp_path / "appliance.yaml")
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=r"cannot read .*appliance\.yaml"):
        CliRunner().invoke(cli, ["config"], catch_exceptions=False)


def test_each_problem_of_the_settings_is_one_line(tmp_path):
    file = tmp_path / "appliance.yaml"
    file.write_text("api: {prot: 1, port: 70000}")
    done = subprocess.run(
        [sys.executable, "-m", "appliance", "config", "--config", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.split(" ")[:2] for line in done.stderr.splitlines()] == [
        ["appliance:", "api.port:"],
        ["appliance:", "api.prot"],
    ]
