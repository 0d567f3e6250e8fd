"""
The tables of `appliance speculation status`: pure, from the answers of the admin API.

Values come from models, tenants and operators, so they are shown as text, never as markup.
"""

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from appliance.cli.common.duration import show_duration
from appliance.speculation.values import Capability

EVENTS = 8


def render(speculation: dict[str, Any], events: list[dict[str, Any]]) -> Group:
    """Workers, the traffic that wastes most drafts, and the newest changes."""
    failure = speculation["failure"]
    warnings = [Text(f"overrides are unknown: {failure}", style="red")] if failure else []
    offenders = _offenders(speculation["attribution"]["offenders"])
    return Group(_workers(speculation), *warnings, offenders, _events(events))


def show_ranges(table: Iterable[tuple[int, int, int]]) -> str:
    """A draft-token table as ranges of batch sizes, such as `1-4: 3, 5-64: 0`."""
    spans = (
        f"{first}: {draft_tokens}" if first == last else f"{first}-{last}: {draft_tokens}"
        for first, last, draft_tokens in table
    )
    return ", ".join(spans) or "-"


def _workers(speculation: dict[str, Any]) -> Table:
    """One column per worker, so that the table fits a narrow terminal."""
    table = Table(title="Workers", title_justify="left", header_style="bold")
    table.add_column("")
    for worker in speculation["workers"]:
        table.add_column(Text(worker["worker"]))
    for name, show in ROWS:
        table.add_row(name, *(Text(show(worker, speculation["now"])) for worker in speculation["workers"]))
    return table


def _mode(worker: dict[str, Any], now: float) -> str:
    since = worker["since"]
    return worker["mode"] if since is None else f"{worker['mode']} for {show_duration(now - since)}"


def _acceptance(worker: dict[str, Any], _now: float) -> str:
    length, drafts = worker["acceptance_length"], worker["window_drafts"]
    return "-" if length is None else f"{length:.2f} over {drafts} drafts"


def _break_even(worker: dict[str, Any], _now: float) -> str:
    known = (bucket for bucket in worker["buckets"] if bucket["break_even"] is not None)
    return ", ".join(f"{bucket['bucket']}: {bucket['break_even']:.2f}" for bucket in known) or "-"


def _exploration(worker: dict[str, Any], _now: float) -> str:
    share = worker["exploration_share"]
    return "-" if share is None else f"{share:.2%} of engine time"


def _missing(worker: dict[str, Any], _now: float) -> str:
    names: dict[str, list[str]] = {}
    for name, why in worker["missing_capabilities"].items():
        names.setdefault(why, []).append(name)
    return (
        "; ".join(
            f"{'all' if len(which) == len(Capability) else ', '.join(which)}: {why}"
            for why, which in names.items()
        )
        or "-"
    )


def _override(worker: dict[str, Any], now: float) -> str:
    order = worker["override"]
    if order is None:
        return "-"
    draft_tokens = "" if order["draft_tokens"] is None else f" with {order['draft_tokens']} draft tokens"
    left = show_duration(order["expires_at"] - now)
    text = f"{order['mode']}{draft_tokens} by {order['actor']}, {left} left"
    return f"{text}: {order['note']}" if order["note"] else text


def _admission(worker: dict[str, Any], _now: float) -> str:
    state = worker["admission"] if worker["healthy"] else "down"
    return f"{state}, avoided" if worker["avoided"] else state


ROWS: tuple[tuple[str, Callable[[dict[str, Any], float], str]], ...] = (
    ("models", lambda worker, _now: ", ".join(worker["models"]) or "-"),
    ("requests", _admission),
    ("mode", _mode),
    ("reason", lambda worker, _now: worker["reason"]),
    ("draft tokens by batch size", lambda worker, _now: show_ranges(worker["table"])),
    ("acceptance length", _acceptance),
    ("break-even by batch size", _break_even),
    ("price of exploration", _exploration),
    ("missing capabilities", _missing),
    ("override", _override),
)


def _offenders(offenders: list[dict[str, Any]]) -> Table:
    table = Table(title="Traffic that wastes most drafts", title_justify="left", header_style="bold")
    for name in ("tenant", "model", "template", "context", "acceptance length", "wasted tokens"):
        table.add_column(name, overflow="fold")
    for row in offenders:
        names = (Text(row[name]) for name in ("tenant", "model", "template", "context"))
        table.add_row(*names, f"{row['acceptance_length']:.2f}", str(row["wasted_draft_tokens"]))
    return table


def _events(events: list[dict[str, Any]]) -> Table:
    table = Table(title="Newest changes", title_justify="left", header_style="bold")
    table.add_column("time, UTC", no_wrap=True)
    for name in ("worker", "mode", "reason", "draft tokens", "acceptance length"):
        table.add_column(name, overflow="fold")
    for event in events[-EVENTS:]:
        length = event["acceptance_length"]
        table.add_row(
            Text(event["time"][5:19].replace("T", " ")),
            *(Text(event[name]) for name in ("worker", "mode", "reason")),
            Text(", ".join(event["table"]) or "-"),
            "-" if length is None else f"{length:.2f}",
        )
    return table
