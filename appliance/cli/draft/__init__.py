"""
`appliance draft`: draft models from the first look at one to the day it is taken back.
"""

from collections.abc import Callable

import typer

from appliance.cli.draft.lint import COMMANDS as LINT_COMMANDS

commands = typer.Typer(help="Draft models: judge, register, refresh, try out, promote.", no_args_is_help=True)
_COMMANDS: dict[str, Callable[..., None]] = {**LINT_COMMANDS}
for _name, _command in _COMMANDS.items():
    commands.command(name=_name)(_command)


@commands.callback()
def _group() -> None:
    """Keep each a command of its own, whatever their number."""
