"""`appliance up`, `gateway` and `worker`: the commands that serve."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.app.run import Role, run_roles
from appliance.cli.common.options import ConfigOption, DataOption, settings_from

commands = typer.Typer()

HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 picks one.")]
AdminPortOption = Annotated[
    int | None,
    typer.Option("--admin-port", help="Port of the admin API, console and metrics; 0 picks one."),
]
ModelOption = Annotated[Path | None, typer.Option("--model", help="Directory of the target's weights.")]
DraftOption = Annotated[Path | None, typer.Option("--draft", help="Directory of the draft's weights.")]
LogOption = Annotated[
    str | None,
    typer.Option("--log", help="Write the log to standard error, as json or console."),
]
NoDraftOption = Annotated[bool, typer.Option("--no-draft", help="Serve the target model alone.")]


@commands.command()
def up(
    config: ConfigOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
    admin_port: AdminPortOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    no_draft: NoDraftOption = False,  # noqa: FBT002 - a flag of the command line
    log: LogOption = None,
) -> None:
    """Run gateway, control and one worker on this machine."""
    worker = _worker_overrides(model, draft, no_draft=no_draft)
    api = {"host": host, "port": port, "admin_port": admin_port}
    read = partial(settings_from, config, data, api=api, worker=worker, log={"format": log})
    run_roles(read, frozenset({Role.GATEWAY, Role.WORKER}))


@commands.command()
def gateway(
    config: ConfigOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
    admin_port: AdminPortOption = None,
    log: LogOption = None,
) -> None:
    """Run the gateway in front of the workers in `pool.urls`."""
    api = {"host": host, "port": port, "admin_port": admin_port}
    read = partial(settings_from, config, data, api=api, log={"format": log})
    run_roles(read, frozenset({Role.GATEWAY}))


@commands.command()
def worker(
    config: ConfigOption = None,
    data: DataOption = None,
    host: HostOption = None,
    port: PortOption = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    no_draft: NoDraftOption = False,  # noqa: FBT002 - a flag of the command line
    log: LogOption = None,
) -> None:
    """Run one vLLM worker and restart it if it fails."""
    overrides = _worker_overrides(model, draft, no_draft=no_draft)
    own = {**overrides, "host": host, "port": port}
    read = partial(settings_from, config, data, worker=own, log={"format": log})
    run_roles(read, frozenset({Role.WORKER}))


def _worker_overrides(model: Path | None, draft: Path | None, *, no_draft: bool) -> dict[str, Any]:
    overrides: dict[str, Any] = {"model": model, "draft": draft}
    overrides = {name: str(path.absolute()) for name, path in overrides.items() if path is not None}
    if no_draft or (model is not None and draft is None):
        # Another target with the demo's draft would fail later with a less clear error.
        overrides |= {"draft": None, "method": "none"}
    return overrides
