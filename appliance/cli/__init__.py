"""
The `appliance` command: reads settings, and reports deliberate errors as one line and exit code 1.

A command's module is imported when the command is called: importing all of them takes seconds.
"""

import os
import signal
import sys

if os.getpid() == 1:
    # The first process of a container has no default action for SIGTERM: a pod deleted during the imports
    # would not end before its grace period does.  Services set their own handlers later.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
    # Images start it blocked: one that was sent while the interpreter started is delivered now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

from collections import UserDict
from importlib import import_module
from importlib.metadata import version as installed_version
from typing import Any

import typer
import yaml
from typer.core import TyperGroup
from typer.main import get_group

from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.errors import ApplianceError
from appliance.infra.files import OWNER_ONLY_UMASK

_COMMANDS = {
    "preflight": "appliance.cli.preflight.command",
    "up": "appliance.cli.roles",
    "gateway": "appliance.cli.roles",
    "worker": "appliance.cli.roles",
    "picker": "appliance.cli.picker",
    "worker-kit": "appliance.cli.worker_kit",
    "status": "appliance.cli.status",
}
_GROUPS = {
    "audit": "appliance.cli.audit",
    "bundle": "appliance.cli.bundle",
    "cost": "appliance.cli.cost",
    "draft": "appliance.cli.draft",
    "egress": "appliance.cli.egress",
    "key": "appliance.cli.keys",
    "tenant": "appliance.cli.tenants",
    "speculation": "appliance.cli.speculation",
    "workers": "appliance.cli.workers",
}


class _Commands(UserDict[str, Any]):
    """Commands and groups by name; a value that is a module's name is imported when it is read."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - typer's command or group
        found = super().__getitem__(name)
        if isinstance(found, str):
            group = get_group(import_module(found).commands)
            found = self[name] = group.commands.get(name, group)
            found.name = name
        return found


class _Lazy(TyperGroup):
    def __init__(self, *, commands: dict[str, Any], **attributes: Any) -> None:  # noqa: ANN401 - typer's
        super().__init__(**attributes)
        self.commands = _Commands({**_COMMANDS, **commands, **_GROUPS})


cli = typer.Typer(
    name="appliance",
    help="Serve large language models inside your own walls.",
    cls=_Lazy,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@cli.command(name="config")
def show_config(config: ConfigOption = None, data: DataOption = None) -> None:
    """Check the settings and print all of them, with defaults, as YAML."""
    settings = settings_from(config, data)
    typer.echo(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), nl=False)


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(installed_version("sovereign-appliance"))


def main() -> None:
    """Entry point of the console script."""
    # Inherited by every child: what the appliance writes, its databases included, only its owner may read.
    os.umask(OWNER_ONLY_UMASK)
    try:
        cli()
    except ApplianceError as error:
        typer.echo(f"appliance: {error}", err=True)
        sys.exit(1)
