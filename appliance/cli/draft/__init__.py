"""`appliance draft`: draft models from lint to rollback."""

from collections.abc import Callable

import typer

from appliance.cli.draft.compare import COMMANDS as COMPARE_COMMANDS
from appliance.cli.draft.evaluate import COMMANDS as EVALUATE_COMMANDS
from appliance.cli.draft.harvest import COMMANDS as HARVEST_COMMANDS
from appliance.cli.draft.lint import COMMANDS as LINT_COMMANDS
from appliance.cli.draft.promote import COMMANDS as PROMOTE_COMMANDS
from appliance.cli.draft.provenance import COMMANDS as PROVENANCE_COMMANDS
from appliance.cli.draft.registry import COMMANDS as REGISTRY_COMMANDS
from appliance.cli.draft.train import COMMANDS as TRAIN_COMMANDS

commands = typer.Typer(
    help="Draft models: lint, register, harvest, train, evaluate, compare, promote.", no_args_is_help=True
)
_COMMANDS: dict[str, Callable[..., None]] = {
    **LINT_COMMANDS,
    **REGISTRY_COMMANDS,
    **PROVENANCE_COMMANDS,
    **HARVEST_COMMANDS,
    **TRAIN_COMMANDS,
    **EVALUATE_COMMANDS,
    **COMPARE_COMMANDS,
    **PROMOTE_COMMANDS,
}
for _name, _command in _COMMANDS.items():
    commands.command(name=_name)(_command)


@commands.callback()
def _group() -> None: ...
