"""
`appliance egress`: try to get out from where this command runs, or have a gateway do it.

Exit codes: 0 closed, 1 open, 2 inconclusive, which includes that it could not be tried.
"""

import asyncio
import json
import socket
import time
from datetime import UTC, datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from appliance.cli.common.admin import TIMEOUT_SECONDS, open_admin
from appliance.cli.common.options import ConfigOption, DataOption, UrlOption, settings_from
from appliance.errors import ApplianceError
from appliance.infra.settings import Settings, process_environment
from appliance.sovereignty.egress.plan import digest_of, plan_egress
from appliance.sovereignty.egress.prober import PATIENCE_SECONDS
from appliance.sovereignty.egress.probing import is_walled, run_probes
from appliance.sovereignty.egress.report import Report, Trigger
from appliance.sovereignty.egress.verdict import Verdict

commands = typer.Typer(help="Try to get out, and prove that it fails.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

EXIT_CODES = {Verdict.CLOSED: 0, Verdict.OPEN: 1, Verdict.INCONCLUSIVE: 2}
COLOURS = {Verdict.CLOSED: "green", Verdict.OPEN: "red", Verdict.INCONCLUSIVE: "yellow"}


@commands.command()
def check(
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Try to get out from here; nothing is recorded. Exit 0: closed, 1: open, 2: inconclusive."""
    try:
        report = look(settings_from(config, data))
    except ApplianceError as error:
        _give_up(error)
    _tell(report.to_json(), as_json=as_json)


@commands.command()
def attest(
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Have a running gateway try now, and record it in the audit log; exit codes as for `check`."""
    try:
        report = _ask(settings_from(config, data), url)
    except ApplianceError as error:
        _give_up(error)
    _tell(report, as_json=as_json)


def look(settings: Settings) -> Report:
    """Make one check in this process, under the settings' `egress` section."""
    began = time.monotonic()
    observation = run_probes(plan_egress(settings, process_environment()))
    return Report.of(
        observation,
        time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        host=socket.gethostname(),
        trigger=Trigger.REQUEST,
        settings=digest_of(settings.egress),
        walled=is_walled(),
        seconds=time.monotonic() - began,
    )


def _ask(settings: Settings, url: str | None) -> dict[str, Any]:
    patience = TIMEOUT_SECONDS + settings.egress.timeout_seconds + PATIENCE_SECONDS

    async def ask() -> dict[str, Any]:
        async with open_admin(settings, url, timeout_seconds=patience) as gateway:
            return await gateway.request("POST", "egress/check")

    return asyncio.run(ask())


def _give_up(error: ApplianceError) -> NoReturn:
    """Not the exit code of other commands' errors, which would say `open` here."""
    typer.echo(f"appliance: {error}", err=True)
    raise typer.Exit(EXIT_CODES[Verdict.INCONCLUSIVE])


def _tell(report: dict[str, Any], *, as_json: bool) -> None:
    verdict = Verdict(report["verdict"])
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        table = Table(title=f"Egress from {escape(report['host'])}")
        for column in ("way out", "target", "outcome", "detail"):
            table.add_column(column, overflow="fold")
        for result in ([report["control"]] if report["control"] else []) + report["probes"]:
            table.add_row(*(escape(result[name]) for name in ("kind", "target", "outcome", "detail")))
        console = Console()
        console.print(table)
        console.print(f"[bold {COLOURS[verdict]}]{verdict}[/]")
        for reason in report["reasons"]:
            console.print(escape(reason), soft_wrap=True)
    raise typer.Exit(EXIT_CODES[verdict])
