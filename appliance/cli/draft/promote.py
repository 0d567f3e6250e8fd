"""
`appliance draft promote`, `rollback` and `status`: take a draft into service, take it out, see how it goes.

The gateway that steers does it; a command that is ended early ends nothing of it.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from appliance.cli.common.admin import AdminApi, open_admin
from appliance.cli.common.options import ConfigOption, DataOption, UrlOption, settings_from
from appliance.drafts.promotion.gate import short
from appliance.infra.settings import Settings

LOOK_SECONDS = 1.0

DowntimeOption = Annotated[
    bool,
    typer.Option(
        "--allow-downtime",
        help="Also restart a worker that nobody can stand in for; its requests wait meanwhile.",
    ),
]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Return once it has begun.")]


def promote(
    draft: Annotated[str, typer.Argument(help="Digest of the draft, or its beginning.")],
    without_evaluation: Annotated[
        str | None,
        typer.Option(
            "--without-evaluation",
            metavar="REASON",
            help="Try it although no evaluation lets it; why goes into the audit log.",
        ),
    ] = None,
    allow_downtime: DowntimeOption = False,  # noqa: FBT002 - a flag
    no_wait: NoWaitOption = False,  # noqa: FBT002 - a flag
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Take a draft into service: on one worker, beside the others for as long as it takes to tell, then on all.

    Whatever speaks against it on the way gives every worker the draft in service again.  The exit code is
    0 where it came into service, and 1 where it did not.
    """
    body: dict[str, Any] = {"draft": draft, "allow_downtime": allow_downtime}
    if without_evaluation is not None:
        body["without_evaluation"] = without_evaluation
    _order(settings_from(config, data), url, "drafts/promotions", body, wanted="promoted", wait=not no_wait)


def rollback(
    reason: Annotated[str, typer.Option("--reason", help="Why; goes into the audit log.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Digest of a draft that served before, `none` for that of the settings; default: the last.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A name of the target, where several are served.")
    ] = None,
    allow_downtime: DowntimeOption = False,  # noqa: FBT002 - a flag
    no_wait: NoWaitOption = False,  # noqa: FBT002 - a flag
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Take a draft out of service again, one worker at a time; a promotion under way is given back.

    The exit code is 0 where every worker has the former draft again.
    """
    body: dict[str, Any] = {"reason": reason, "to": to, "model": model, "allow_downtime": allow_downtime}
    path = "drafts/rollbacks"
    _order(settings_from(config, data), url, path, body, wanted="rolled_back", wait=not no_wait)


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - a flag
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show which draft serves each target, which one each worker has, and how promotions went."""
    settings = settings_from(config, data)

    async def ask() -> dict[str, Any]:
        async with open_admin(settings, url) as gateway:
            return await gateway.get("drafts")

    answer = asyncio.run(ask())
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    _show(answer)


COMMANDS: dict[str, Callable[..., None]] = {"promote": promote, "rollback": rollback, "status": status}
"""By name below `appliance draft`."""


def _order(
    settings: Settings, url: str | None, path: str, body: dict[str, Any], *, wanted: str, wait: bool
) -> None:
    async def order() -> str:
        async with open_admin(settings, url) as gateway:
            begun = await gateway.request("POST", path, body)
            typer.echo(f"{begun['kind']} {begun['promotion_id']}")
            if not wait:
                _tell(begun, 0)
                return wanted
            return await _follow(gateway, begun)

    ended = asyncio.run(order())
    if ended != wanted:
        sys.exit(1)


async def _follow(gateway: AdminApi, begun: dict[str, Any]) -> str:
    """Print each step as it is taken; how it ended."""
    told, waits, now = 0, None, begun
    while True:
        told = _tell(now, told)
        if now["over"]:
            return str(now["stage"])
        if now["waits"] != waits:
            waits = now["waits"]
            if waits and sys.stdout.isatty():
                typer.echo(f"{'':<24}  … {waits}")
        await asyncio.sleep(LOOK_SECONDS)
        answer = await gateway.get("drafts")
        known = {each["promotion_id"]: each for each in answer["promotions"]}
        now = known.get(begun["promotion_id"], now)


def _tell(promotion: dict[str, Any], told: int) -> int:
    """Print the steps after so many; how many have been told now."""
    for step in promotion["timeline"][told:]:
        typer.echo(f"{step['at']:<24}  {step['stage']:<11}  {step['text']}")
    return len(promotion["timeline"])


def _show(answer: dict[str, Any]) -> None:
    for standing in answer["standings"]:
        typer.echo(
            f"target {short(standing['target'])}: draft {short(standing['draft'] or '')} is in service"
        )
        if standing["previous"]:
            served = ", ".join(short(draft or "") for draft in standing["previous"])
            typer.echo(f"  before: {served}")
    table = Table("worker", "target", "draft", "models")
    for worker in answer["workers"]:
        table.add_row(
            worker["worker"],
            short(worker["target"]) if worker["target"] else "not said",
            short(worker["draft"]) if worker["draft"] else "none" if worker["target"] else "not said",
            ", ".join(worker["models"]),
        )
    Console().print(table)
    for promotion in answer["promotions"][:1]:
        typer.echo(
            f"{promotion['kind']} {promotion['promotion_id']}: {promotion['stage']}, "
            f"draft {short(promotion['draft'])}"
        )
        _tell(promotion, 0)
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
    said = [f"{numbers['drafts']} drafts"]
    if numbers["acceptance_length"] is not None and numbers["previous_acceptance_length"] is not None:
        lengths = numbers["acceptance_length"], numbers["previous_acceptance_length"]
        said.append(f"acceptance length {lengths[0]:.3f} against {lengths[1]:.3f}")
    if numbers["speed_ratio"] is not None:
        said.append(f"{numbers['speed_ratio']:.3f} times the tokens per engine second")
    return ", ".join(said)
