"""
The `appliance` command: reads settings, and turns deliberate errors into one line and exit code 1.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from appliance.cli.audit import commands as audit_commands
from appliance.cli.audit_migrate import COMMANDS as DATABASE_COMMANDS
from appliance.cli.bundle import commands as bundle_commands
from appliance.cli.cost import commands as cost_commands
from appliance.cli.draft import commands as draft_commands
from appliance.cli.egress import commands as egress_commands
from appliance.cli.erase import COMMANDS as CONTENT_COMMANDS
from appliance.cli.keys import commands as key_commands
from appliance.cli.options import ConfigOption, DataOption, settings_from
from appliance.cli.preflight import preflight
from appliance.cli.rotate import COMMANDS as ROTATION_COMMANDS
from appliance.cli.speculation import commands as speculation_commands
from appliance.cli.status import show_status
from appliance.cli.tenants import commands as tenant_commands
from appliance.cli.witness import commands as witness_commands
from appliance.cli.workers import commands as worker_commands
from appliance.errors import ApplianceError
from appliance.run import Role, run_roles

cli = typer.Typer(
    name="appliance",
    help="Serve large language models inside your own walls.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_AUDIT_COMMANDS: dict[str, Callable[..., None]] = {
    **CONTENT_COMMANDS,
    **DATABASE_COMMANDS,
    **ROTATION_COMMANDS,
}
for _name, _command in _AUDIT_COMMANDS.items():
    audit_commands.command(name=_name)(_command)
audit_commands.add_typer(witness_commands, name="witness")
cli.command()(preflight)
cli.add_typer(audit_commands, name="audit")
cli.add_typer(bundle_commands, name="bundle")
cli.add_typer(cost_commands, name="cost")
cli.add_typer(draft_commands, name="draft")
cli.add_typer(egress_commands, name="egress")
cli.add_typer(key_commands, name="key")
cli.add_typer(tenant_commands, name="tenant")
cli.add_typer(speculation_commands, name="speculation")
cli.add_typer(worker_commands, name="workers")

HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 picks one.")]
ModelOption = Annotated[Path | None, typer.Option("--model", help="Directory of the target's weights.")]
DraftOption = Annotated[Path | None, typer.Option("--draft", help="Directory of the draft head's weights.")]
NoDraftOption = Annotated[bool, typer.Option("--no-draft", help="Serve the target model alone.")]


@cli.command()
def up(
    config: ConfigOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    no_draft: NoDraftOption = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Run gateway, control and one worker on this machine."""
    worker = _worker_overrides(model, draft, no_draft=no_draft)
    read = partial(settings_from, config, data, api={"host": host, "port": port}, worker=worker)
    run_roles(read, frozenset({Role.GATEWAY, Role.WORKER}))


@cli.command()
def gateway(
    config: ConfigOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Run the gateway in front of the workers in `pool.urls`."""
    read = partial(settings_from, config, data, api={"host": host, "port": port})
    run_roles(read, frozenset({Role.GATEWAY}))


@cli.command()
def worker(
    config: ConfigOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    no_draft: NoDraftOption = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Run one vLLM worker and keep it running."""
    overrides = _worker_overrides(model, draft, no_draft=no_draft)
    read = partial(settings_from, config, data, worker={**overrides, "host": host, "port": port})
    run_roles(read, frozenset({Role.WORKER}))


@cli.command()
def status(
    config: ConfigOption = None,
    data: DataOption = None,
    url: Annotated[str | None, typer.Option(help="Base URL of the gateway.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,  # noqa: FBT002
) -> None:
    """Show workers, acceptance length and the audit head, live."""
    show_status(settings_from(config, data), url, once=once)


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
    try:
        cli()
    except ApplianceError as error:
        typer.echo(f"appliance: {error}", err=True)
        sys.exit(1)


def _worker_overrides(model: Path | None, draft: Path | None, *, no_draft: bool) -> dict[str, Any]:
    overrides: dict[str, Any] = {"model": model, "draft": draft}
    overrides = {name: str(path.absolute()) for name, path in overrides.items() if path is not None}
    if no_draft or (model is not None and draft is None):
        # Another target with the demo's draft would only fail later, and less clearly.
        overrides |= {"draft": None, "method": "none"}
    return overrides
