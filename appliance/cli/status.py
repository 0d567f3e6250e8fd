"""`appliance status`: a live table of the gateway's state."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from appliance.cli.common.admin_client import AdminApi, open_admin
from appliance.cli.common.options import (
    ConfigOption,
    DataOption,
    JsonOption,
    UrlOption,
    ask_gateway,
    print_json,
    settings_from,
)
from appliance.infra.settings import Settings

commands = typer.Typer()
REFRESH_SECONDS = 1.0


@commands.command()
def status(
    config: ConfigOption = None,
    data: DataOption = None,
    url: UrlOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,  # noqa: FBT002
    as_json: JsonOption = False,  # noqa: FBT002
) -> None:
    """
    Show workers, acceptance length and the audit head, live.

    Once, if the output is not a terminal.
    """
    if as_json:
        print_json(ask_gateway(settings_from(config, data), url, "GET", "status"))
        return

    async def picture(gateway: AdminApi) -> Group:
        return render(await gateway.get("status"))

    show(settings_from(config, data), url, picture, once=once)


def show(
    settings: Settings,
    url: str | None,
    picture: Callable[[AdminApi], Awaitable[RenderableType]],
    *,
    once: bool,
) -> None:
    """Print the result of `picture` once, or refresh it on a terminal until interrupted."""
    console = Console()

    async def run() -> None:
        async with open_admin(settings, url) as gateway:
            if once or not console.is_terminal:
                console.print(await picture(gateway))
                return
            with Live(await picture(gateway), console=console, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(REFRESH_SECONDS)
                    live.update(await picture(gateway), refresh=True)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        return


def render(status: dict[str, Any]) -> Group:
    """The tables for one status, one column per worker, so that they fit a narrow terminal."""
    workers = status["workers"]
    table = Table(title="Workers", title_justify="left", header_style="bold")
    table.add_column("")
    for worker in workers:
        table.add_column(worker["worker"])
    for name, show in ROWS:
        table.add_row(name, *(show(worker) for worker in workers))
    head = status["audit"]
    audit = Table(title="Audit log", title_justify="left", show_header=False)
    audit.add_row("origin", head["origin"])
    audit.add_row("entries", f"{head['size']}, signed up to {head['checkpoint_size']}")
    audit.add_row("root", head["root"])
    audit.add_row("waiting", f"{head['queued']} entries, {head['open_requests']} requests open")
    audit.add_row("kept", _kept(head["health"]["durability"]))
    audit.add_row("checked", _checked(head["health"]["verification"]))
    audit.add_row("free", _free(head["health"]["disks"]))
    for warning in head["warnings"]:
        audit.add_row("warning", Text(warning, style="yellow"))
    if head["failure"]:
        audit.add_row("failure", Text(head["failure"], style="red"))
    network = Table(title="Network", title_justify="left", show_header=False)
    wall = status["wall"]
    network.add_row("wall", Text(wall["detail"], style="" if wall["is_up"] else "yellow"))
    network.add_row("egress", _egress(status["egress"]))
    return Group(table, audit, network)


def _egress(egress: dict[str, Any]) -> Text:
    if egress["verdict"] is None:
        return Text("not checked" + (", egress.mode is off" if egress["mode"] == "off" else " yet"))
    text = f"{egress['verdict']}, {egress['time']}" + (f": {egress['why']}" if egress["why"] else "")
    return Text(text, style={"closed": "green", "open": "red"}.get(egress["verdict"], "yellow"))


def _kept(durability: dict[str, Any]) -> str:
    waiting, dropped = durability["spooled_entries"], durability["dropped_entries"]
    return f"{durability['mode']}, {waiting} entries in the spool, {dropped} dropped"


def _checked(verification: dict[str, Any]) -> str:
    if not verification["time"]:
        return "not yet"
    when = datetime.fromtimestamp(verification["time"], UTC)
    return f"{verification['size']} entries, {when:%Y-%m-%d %H:%M:%S} UTC"


def _free(disks: list[dict[str, Any]]) -> str:
    return ", ".join(f"{disk['name']} {disk['free_bytes'] / 2**30:.1f} GiB" for disk in disks) or "-"


def _state(worker: dict[str, Any]) -> Text:
    return Text("up", style="green") if worker["healthy"] else Text("down", style="red")


def _acceptance(worker: dict[str, Any]) -> str:
    length, drafts = worker["acceptance_length"], worker["window_drafts"]
    return "-" if length is None else f"{length:.2f} over {drafts} drafts"


def _positions(worker: dict[str, Any]) -> str:
    return " ".join(f"{rate:.2f}" for rate in worker["acceptance_rate_per_position"]) or "-"


ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str | Text]], ...] = (
    ("state", _state),
    ("models", lambda worker: ", ".join(worker["models"]) or "-"),
    ("mode", lambda worker: worker["mode"]),
    ("reason", lambda worker: worker["reason"]),
    ("acceptance length", _acceptance),
    ("acceptance by position", _positions),
    ("tokens per second", lambda worker: f"{worker['tokens_per_second']:.0f}"),
    ("running, waiting", lambda worker: f"{worker['running']}, {worker['waiting']}"),
    ("KV cache in use", lambda worker: f"{worker['kv_cache_usage']:.0%}"),
)
