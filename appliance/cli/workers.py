"""`appliance workers`: show, drain and reload a gateway's workers."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from appliance.cli.common.options import (
    ConfigOption,
    DataOption,
    JsonOption,
    NoteOption,
    UrlOption,
    ask_gateway,
    print_json,
    settings_from,
)

commands = typer.Typer(help="Show, drain and reload a gateway's workers.", no_args_is_help=True)

WorkerArgument = Annotated[str, typer.Argument(help="Id of the worker; `appliance workers list` shows it.")]


@commands.command(name="list")
def show(
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show every worker, whether it receives requests, and its load."""
    answer = ask_gateway(settings_from(config, data), url, "GET", "workers")
    if as_json:
        print_json(answer["workers"])
        return
    table = Table("worker", "models", "requests", "slots", "waiting", "state")
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
    """Send a worker no more requests; it finishes those in flight."""
    path, body = f"workers/{quote(worker, safe='')}/drain", {"note": note, "force": force}
    answer = ask_gateway(settings_from(config, data), url, "POST", path, body)
    typer.echo(f"{worker} receives no more requests; in flight: {answer['in_flight']}")


@commands.command()
def undrain(
    worker: WorkerArgument,
    note: NoteOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Let a drained worker receive requests again."""
    path = f"workers/{quote(worker, safe='')}/undrain"
    answer = ask_gateway(settings_from(config, data), url, "POST", path, {"note": note})
    typer.echo(f"{worker}: {', '.join(states_of(answer))}")


@commands.command()
def reload(url: UrlOption = None, config: ConfigOption = None, data: DataOption = None) -> None:
    """Make the gateway reread the list of workers in its settings file."""
    answer = ask_gateway(settings_from(config, data), url, "POST", "workers/reload", {})
    for change in ("joined", "left"):
        for worker in answer[change]:
            typer.echo(f"{worker} {change}")
    if not answer["joined"] and not answer["left"]:
        typer.echo("no worker joined or left")


def states_of(worker: dict[str, Any]) -> list[str]:
    """States of a worker, in the admin API's words; `takes requests` if it is in normal operation."""
    states = [] if worker["healthy"] else ["down"]
    states += [name for name in ("drained", "leaving", "avoided") if worker[name]]
    states += [worker["admission"]] if worker["admission"] != "admitted" else []
    states += [f"breaker {worker['breaker']}"] if worker["breaker"] != "closed" else []
    return states or ["takes requests"]
