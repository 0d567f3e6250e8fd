"""Commands that pages and the chart show to operators."""

from typer.main import get_command

from appliance.cli import cli


def assert_command_exists(words: list[str], line: str) -> None:
    """Each command and option of `appliance WORDS…` is one of ours; `line` is shown if not."""
    command = get_command(cli)
    for word in words:
        if word.startswith("-"):
            known = {
                option
                for parameter in command.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
            assert word in known, line
        elif hasattr(command, "commands"):
            assert word in command.commands, line
            command = command.commands[word]
