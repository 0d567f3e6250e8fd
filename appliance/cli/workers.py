"""
`appliance workers`: which workers a gateway has, and orders about them.
"""

import asyncio
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from appliance.cli.common.admin import open_admin
from appliance.cli.common.options import ConfigOption, DataOption, UrlOption, settings_from
from appliance.infra.settings import Settings

commands = typer.Typer(help="See a gateway's workers, and say which get requests.", no_args_is_help=True)

WorkerArgument = Annotated[str, typer.Argument(help="Id of the worker; `appliance workers list` shows it.")]
NoteOption = Annotated[str, typer.Option("--note", help="Why; goes into the audit log.")]


@commands.command(name="list")
def show(url: UrlOption = None, config: ConfigOption = None, data: DataOption = None) -> None:
    """Show every worker, whether it gets requests, and how full it is."""
    answer = _ask(settings_from(config, data), url, "GET", "workers")
    table = Table("worker", "models", "requests", "of at most", "waiting inside", "state")
    for worker in answer["workers"]:
        table.add_row(
            worker["worker"],
            ", ".join(worker["models"]),
            str(worker["in_flight"]),
            str(worker["places"]),
            str(worker["waiting"]),
            ", ".join(states_of(worker)),
        )
    Console().print(table)


@commands.command()
def drain(
    worker: WorkerArgument,
    force: Annotated[  # noqa: FBT002
        bool, typer.Option("--force", help="Also if it is the last one that serves some model.")
    ] = False,
    note: NoteOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Keep requests away from a worker; what it has is finished."""
    body = {"note": note, "force": force}
    answer = _ask(settings_from(config, data), url, "POST", f"workers/{quote(worker, safe='')}/drain", body)
    typer.echo(f"{worker} gets nothing more; requests to finish: {answer['in_flight']}")


@commands.command()
def undrain(
    worker: WorkerArgument,
    note: NoteOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Let a drained worker have requests again."""
    path = f"workers/{quote(worker, safe='')}/undrain"
    answer = _ask(settings_from(config, data), url, "POST", path, {"note": note})
    typer.echo(f"{worker}: {', '.join(states_of(answer))}")


@commands.command()
def reload(url: UrlOption = None, config: ConfigOption = None, data: DataOption = None) -> None:
    """Have the gateway take over the list of workers from its settings file."""
    answer = _ask(settings_from(config, data), url, "POST", "workers/reload", {})
    for change in ("joined", "left"):
        for worker in answer[change]:
            typer.echo(f"{worker} {change}")
    if not answer["joined"] and not answer["left"]:
        typer.echo("no worker came or went")


def states_of(worker: dict[str, Any]) -> list[str]:
    """What there is to say about a worker, in the admin API's words; `takes requests` if nothing is amiss."""
    states = [] if worker["healthy"] else ["down"]
    states += [name for name in ("drained", "leaving", "avoided") if worker[name]]
    states += [worker["admission"]] if worker["admission"] != "admitted" else []
    states += [f"breaker {worker['breaker']}"] if worker["breaker"] != "closed" else []
    return states or ["takes requests"]


def _ask(
    settings: Settings, url: str | None, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with open_admin(settings, url) as gateway:
            return await gateway.request(method, path, body)

    return asyncio.run(ask())
