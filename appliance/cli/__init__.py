"""
The `appliance` command: reports each deliberate error as one line, with exit code 1.

A command's module is imported when the command is called: importing all of them takes seconds.
"""

import gc
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
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from appliance import __version__
from appliance.errors import ApplianceError
from appliance.infra.files import OWNER_ONLY_UMASK

RUN, OBSERVE, ADMINISTER = "Install and run", "Observe and prove", "Administer"
COMMANDS = {
    "preflight": ("cli.preflight.command", RUN, "Check this machine before going live; nothing is changed."),
    "up": ("cli.roles", RUN, "Run gateway, control and one worker on this machine."),
    "gateway": ("cli.roles", RUN, "Run the gateway in front of the workers in `pool.urls`."),
    "worker": ("cli.roles", RUN, "Run one vLLM worker and restart it if it fails."),
    "picker": (
        "cli.picker",
        RUN,
        "Tell the proxy of others which worker in `pool` each request should go to.",
    ),
    "worker-kit": (
        *("cli.worker_kit", RUN),
        "Copy the plugin for a vLLM that others start and route to; print what its container needs.",
    ),
    "bundle": ("cli.bundle", RUN, "Bundles for sites without internet."),
    "config": ("cli.config", RUN, "Check the settings and print all of them, with defaults, as YAML."),
    "version": ("cli", RUN, "Print the version."),
    "status": ("cli.status", OBSERVE, "Show workers, acceptance length and the audit head, live."),
    "audit": ("cli.audit", OBSERVE, "Read, export and verify the audit log."),
    "egress": ("cli.egress", OBSERVE, "Check that egress is blocked."),
    "cost": ("cli.cost", OBSERVE, "Report the cost of serving, by tenant and model."),
    "tenant": ("cli.tenants", ADMINISTER, "Manage tenants: models, priority, limits, permissions."),
    "key": ("cli.keys", ADMINISTER, "Manage tenants' API keys."),
    "speculation": ("cli.speculation", ADMINISTER, "Show and override speculation."),
    "workers": ("cli.workers", ADMINISTER, "Show, drain and reload a gateway's workers."),
    "draft": (
        *("cli.draft", ADMINISTER),
        "Draft models: lint, register, harvest, train, evaluate, compare, promote.",
    ),
}
"""By name: module below `appliance`, panel of `--help`, and the first paragraph of its own help."""


class _Commands(UserDict[str, Any]):
    """Commands and groups by name; a module is imported when its command is read."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - typer's command or group
        found = super().__getitem__(name)
        if isinstance(found, str):
            gc.disable()  # an import leaves little to collect, and looking for it takes time
            try:
                group = get_group(import_module(found).commands)
            finally:
                gc.enable()
            found = self[name] = group.commands.get(name, group)
            found.name = name
            _add_examples(f"appliance {name}", found)
        return found


def _add_examples(path: str, command: Any) -> None:  # noqa: ANN401 - typer's command or group
    """Show the command's examples, or those of a group's commands, at the end of their help."""
    from appliance.cli.examples import EXAMPLES  # noqa: PLC0415 - for a command's own help only

    for name, child in getattr(command, "commands", {}).items():
        _add_examples(f"{path} {name}", child)
    if not hasattr(command, "commands"):
        mine = [line for line in EXAMPLES if f"{line} ".startswith(f"{path} ")]
        command.epilog = "\n\n".join(["Examples:" if len(mine) > 1 else "Example:", *mine])


class _Lazy(TyperGroup):
    def __init__(self, *, commands: dict[str, Any], **attributes: Any) -> None:  # noqa: ANN401 - typer's
        super().__init__(**attributes)
        assert not commands  # noqa: S101 - all are in the table
        self.commands = _Commands({name: f"appliance.{module}" for name, (module, _, _) in COMMANDS.items()})

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's
        self._list_by_table()
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:  # noqa: ANN401 - typer's
        self._list_by_table()
        return super().shell_complete(ctx, incomplete)

    def _list_by_table(self) -> None:
        """Replace the commands by their names and help: nothing is imported to list them."""
        self.commands = {
            name: TyperCommand(name, help=text, rich_help_panel=panel)
            for name, (_, panel, text) in COMMANDS.items()
        }


cli = typer.Typer(name="appliance", cls=_Lazy, no_args_is_help=True, pretty_exceptions_enable=False)


commands = typer.Typer()
"""Of this module, as the other modules of commands have it."""


@cli.callback()
def _group() -> None:
    """Serve large language models inside your own walls."""


@commands.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Entry point of the console script."""
    # Inherited by every child: what the appliance writes, its databases included, only its owner may read.
    os.umask(OWNER_ONLY_UMASK)
    try:
        cli()
    except ApplianceError as error:
        for line in str(error).splitlines():  # settings have one for each problem
            typer.echo(f"appliance: {line}", err=True)
        sys.exit(1)
