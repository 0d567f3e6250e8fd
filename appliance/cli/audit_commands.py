"""
`appliance audit`: the commands of several modules in one group.
"""

from collections.abc import Callable

from appliance.cli.audit import commands
from appliance.cli.audit_migrate import COMMANDS as DATABASE_COMMANDS
from appliance.cli.erase import COMMANDS as CONTENT_COMMANDS
from appliance.cli.rotate import COMMANDS as ROTATION_COMMANDS
from appliance.cli.witness import commands as witness_commands

_COMMANDS: dict[str, Callable[..., None]] = {
    **CONTENT_COMMANDS,
    **DATABASE_COMMANDS,
    **ROTATION_COMMANDS,
}
for _name, _command in _COMMANDS.items():
    commands.command(name=_name)(_command)
commands.add_typer(witness_commands, name="witness")
