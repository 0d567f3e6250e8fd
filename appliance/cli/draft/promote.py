"""
`appliance draft promote`, `rollback` and `status`: deploy a draft, roll it back, show the progress.

The gateway that holds the control lease does the work; it continues if the command is interrupted.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from appliance.cli.common.admin_client import AdminApi, open_admin
from appliance.cli.common.options import ConfigOption, DataOption, UrlOption, ask_gateway, settings_from
from appliance.drafts.promotion.promotion import short
from appliance.infra.settings import Settings

POLL_SECONDS = 1.0

DowntimeOption = Annotated[
    bool,
    typer.Option(
        "--allow-downtime", help="Also restart the only worker of a model; its requests wait meanwhile."
    ),
]
NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Return once the promotion or rollback has begun.")
]


def promote(
    draft: Annotated[str, typer.Argument(help="Digest of the draft, or a prefix.")],
    without_evaluation: Annotated[
        str | None,
        typer.Option(
            metavar="REASON", help="Skip the evaluation requirement; the reason goes into the audit log."
        ),
    ] = None,
    allow_downtime: DowntimeOption = False,  # noqa: FBT002 - a flag
    no_wait: NoWaitOption = False,  # noqa: FBT002 - a flag
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Deploy a draft: canary on one worker until the comparison is conclusive, then roll it out.

    If a check fails on the way, every worker gets the former draft again.  The exit code is 0 if the draft
    was promoted, 1 if not.
    """
    body: dict[str, Any] = {"draft": draft, "allow_downtime": allow_downtime}
    if without_evaluation is not None:
        body["without_evaluation"] = without_evaluation
    _submit(settings_from(config, data), url, "drafts/promotions", body, wanted="promoted", wait=not no_wait)


def rollback(
    reason: Annotated[str, typer.Option(help="Reason for the audit log.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="Digest of a draft that served before, `none` for worker.draft; default: the last one."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name, if several targets are served.")] = None,
    allow_downtime: DowntimeOption = False,  # noqa: FBT002 - a flag
    no_wait: NoWaitOption = False,  # noqa: FBT002 - a flag
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Restore a former draft, one worker at a time; cancels a running promotion.

    The exit code is 0 if every worker has the former draft again.
    """
    body: dict[str, Any] = {"reason": reason, "to": to, "model": model, "allow_downtime": allow_downtime}
    path = "drafts/rollbacks"
    _submit(settings_from(config, data), url, path, body, wanted="rolled_back", wait=not no_wait)


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - a flag
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show the active draft of each target, the draft of each worker, and the latest promotions."""
    answer = ask_gateway(settings_from(config, data), url, "GET", "drafts")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        _show(answer)


COMMANDS: dict[str, Callable[..., None]] = {"promote": promote, "rollback": rollback, "status": status}
"""By name below `appliance draft`."""


def _submit(
    settings: Settings, url: str | None, path: str, body: dict[str, Any], *, wanted: str, wait: bool
) -> None:
    async def submit() -> str:
        async with open_admin(settings, url) as gateway:
            begun = await gateway.request("POST", path, body)
            typer.echo(f"{begun['kind']} {begun['promotion_id']}")
            if not wait:
                _print_steps(begun, 0)
                return wanted
            return await _follow(gateway, begun)

    if asyncio.run(submit()) != wanted:
        sys.exit(1)


async def _follow(gateway: AdminApi, begun: dict[str, Any]) -> str:
    """Print each step once it is taken; return the last stage."""
    printed, waits, now = 0, None, begun
    while True:
        printed = _print_steps(now, printed)
        if now["over"]:
            return str(now["stage"])
        if now["waits"] != waits:
            waits = now["waits"]
            if waits and sys.stdout.isatty():
                typer.echo(f"{'':<24}  … {waits}")
        await asyncio.sleep(POLL_SECONDS)
        answer = await gateway.get("drafts")
        known = {each["promotion_id"]: each for each in answer["promotions"]}
        now = known.get(begun["promotion_id"], now)


def _print_steps(promotion: dict[str, Any], printed: int) -> int:
    """Print the steps after the first `printed`; return how many are printed now."""
    for step in promotion["timeline"][printed:]:
        typer.echo(f"{step['at']:<24}  {step['stage']:<11}  {step['text']}")
    return len(promotion["timeline"])


def _show(answer: dict[str, Any]) -> None:
    for active in answer["standings"]:
        typer.echo(f"target {short(active['target'])}: draft {short(active['draft'] or '')} is in service")
        if active["previous"]:
            served = ", ".join(short(draft or "") for draft in active["previous"])
            typer.echo(f"  before: {served}")
    table = Table("worker", "target", "draft", "models")
    for worker in answer["workers"]:
        table.add_row(
            worker["worker"],
            short(worker["target"]) if worker["target"] else "not reported",
            short(worker["draft"]) if worker["draft"] else "none" if worker["target"] else "not reported",
            ", ".join(worker["models"]),
        )
    Console().print(table)
    for promotion in answer["promotions"][:1]:
        typer.echo(
            f"{promotion['kind']} {promotion['promotion_id']}: {promotion['stage']}, "
            f"draft {short(promotion['draft'])}"
        )
        _print_steps(promotion, 0)
        numbers = promotion["numbers"]
        if numbers["drafts"]:
            typer.echo(f"trial: {_numbers(numbers)}")
        if promotion["waits"] and not promotion["over"]:
            typer.echo(f"now: {promotion['waits']}")
    for promotion in answer["promotions"][1:]:
        why = f": {promotion['reason']}" if promotion["reason"] else ""
        typer.echo(
            f"{promotion['began']}  {promotion['kind']} of {short(promotion['draft'])} "
            f"{promotion['stage']}{why}"
        )


def _numbers(numbers: dict[str, Any]) -> str:
    parts = [f"{numbers['drafts']} drafts"]
    if numbers["acceptance_length"] is not None and numbers["previous_acceptance_length"] is not None:
        lengths = numbers["acceptance_length"], numbers["previous_acceptance_length"]
        parts.append(f"acceptance length {lengths[0]:.3f} against {lengths[1]:.3f}")
    if numbers["speed_ratio"] is not None:
        parts.append(f"{numbers['speed_ratio']:.3f} times the tokens per engine second")
    return ", ".join(parts)
