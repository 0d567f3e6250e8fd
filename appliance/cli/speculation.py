"""`appliance speculation`: show and override speculation, and run the drill."""

import asyncio
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group

from appliance.cli.common.admin_client import AdminApi, open_admin
from appliance.cli.common.duration import parse_duration, show_duration
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
from appliance.cli.drill.drill_command import drill
from appliance.cli.speculation_view import render
from appliance.cli.status import show
from appliance.control.override import AUTO, EVERY_WORKER
from appliance.infra.settings import Settings
from appliance.speculation.values import SpeculationMode

commands = typer.Typer(help="Show and override speculation.", no_args_is_help=True)
commands.command()(drill)

WorkerOption = Annotated[str, typer.Option("--worker", help="Id of the worker; default: all.")]
ForOption = Annotated[str, typer.Option("--for", help="Duration, such as 30m, 1h or 2d; maximum 7d.")]


@commands.command()
def status(
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,  # noqa: FBT002
    as_json: JsonOption = False,  # noqa: FBT002
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show mode, reason and draft tokens of each worker, overrides and recent changes, live."""
    settings = settings_from(config, data)
    if as_json:
        print_json(asyncio.run(_status(settings, url)))
    else:
        show(settings, url, _render, once=once)


@commands.command()
def off(
    worker: WorkerOption = EVERY_WORKER,
    duration: ForOption = "1h",
    note: NoteOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Serve the target model alone for a time, whatever the monitor measures."""
    _override(settings_from(config, data), url, worker, SpeculationMode.TARGET_ONLY, duration, note)


@commands.command()
def on(
    worker: WorkerOption = EVERY_WORKER,
    duration: ForOption = "1h",
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens at every batch size; default: the maximum.")
    ] = None,
    note: NoteOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Keep drafting for a time, whatever the monitor measures."""
    settings, mode = settings_from(config, data), SpeculationMode.SPECULATIVE
    _override(settings, url, worker, mode, duration, note, draft_tokens=draft_tokens)


@commands.command()
def auto(
    worker: WorkerOption = EVERY_WORKER,
    note: NoteOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Remove an override and return to automatic control."""
    body = {"worker": worker, "mode": AUTO, "note": note}
    ask_gateway(settings_from(config, data), url, "PUT", "speculation/override", body)
    typer.echo(f"{_name(worker)}: automatic control")


@commands.command()
def recycle(
    worker: Annotated[str, typer.Argument(help="Id of the worker.")],
    without_draft: Annotated[  # noqa: FBT002
        bool, typer.Option("--without-draft", help="Restart it without its draft.")
    ] = False,
    note: NoteOption = "",
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Drain a worker and restart it, by default with its draft."""
    path, body = f"workers/{quote(worker, safe='')}/recycle", {"with_draft": not without_draft, "note": note}
    ask_gateway(settings_from(config, data), url, "POST", path, body)
    typer.echo(f"{worker} is being recycled {'without' if without_draft else 'with'} its draft")


def _override(
    settings: Settings,
    url: str | None,
    worker: str,
    mode: SpeculationMode,
    duration: str,
    note: str,
    *,
    draft_tokens: int | None = None,
) -> None:
    seconds = parse_duration(duration)
    body = {"worker": worker, "mode": str(mode), "seconds": seconds, "note": note}
    if draft_tokens is not None:
        body["draft_tokens"] = draft_tokens
    ask_gateway(settings, url, "PUT", "speculation/override", body)
    typer.echo(f"{_name(worker)}: {mode} for {show_duration(seconds)}; `appliance speculation auto` ends it")


def _name(worker: str) -> str:
    return "all workers" if worker == EVERY_WORKER else worker


async def _status(settings: Settings, url: str | None) -> dict[str, Any]:
    async with open_admin(settings, url) as gateway:
        events = await gateway.get("speculation/events")
        return {**await gateway.get("speculation"), "events": events["events"]}


async def _render(gateway: AdminApi) -> Group:
    events = await gateway.get("speculation/events")
    return render(await gateway.get("speculation"), events["events"])
