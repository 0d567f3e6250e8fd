"""
`appliance status`: a live table of what the gateway knows.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from appliance.errors import ConfigurationError
from appliance.installation import locate
from appliance.settings import Settings

REFRESH_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0


def show_status(settings: Settings, url: str | None, *, once: bool) -> None:
    """
    Print the table once, or keep it fresh until interrupted.

    Raises:
        ConfigurationError: the gateway does not answer, or refuses the admin key.
    """
    base = (url or f"http://{settings.api.host}:{settings.api.port}").rstrip("/")
    key_file = locate(settings).admin_key
    try:
        key = key_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        message = f"cannot read the admin key {key_file} ({error.strerror}): name its directory with --data"
        raise ConfigurationError(message) from error
    console = Console()
    if once:
        console.print(render(asyncio.run(fetch(base, key))))
        return
    try:
        asyncio.run(_refresh(base, key, console))
    except KeyboardInterrupt:
        return


async def fetch(base: str, key: str) -> dict[str, Any]:
    """Ask the gateway for its status."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base}/admin/v1/status", headers=headers) as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        message = (
            f"no gateway answers at {base} ({type(error).__name__}): start one, or name another with --url"
        )
        raise ConfigurationError(message) from error
    if response.status != 200:  # noqa: PLR2004
        message = f"the gateway at {base} answered {response.status}: is this its admin key?"
        raise ConfigurationError(message)
    content: dict[str, Any] = json.loads(text)
    return content


def render(status: dict[str, Any]) -> Group:
    """The tables for one status: a column for each worker, so that it fits a narrow terminal."""
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
    if head["failure"]:
        audit.add_row("failure", Text(head["failure"], style="red"))
    return Group(table, audit)


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


async def _refresh(base: str, key: str, console: Console) -> None:
    with Live(render(await fetch(base, key)), console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            live.update(render(await fetch(base, key)), refresh=True)
