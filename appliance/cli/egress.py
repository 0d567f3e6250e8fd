"""
`appliance egress`: check egress from this machine, or have a gateway do it.

Exit codes: 0 closed, 1 open, 2 inconclusive, also if the check could not run.
"""

import json
import socket
import time
from datetime import UTC, datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from appliance.cli.common.admin_client import TIMEOUT_SECONDS
from appliance.cli.common.options import ConfigOption, DataOption, UrlOption, ask_gateway, settings_from
from appliance.errors import ApplianceError
from appliance.infra.settings import Settings, process_environment
from appliance.sovereignty.egress.egress_status import EgressReport, Trigger
from appliance.sovereignty.egress.judge import EgressVerdict
from appliance.sovereignty.egress.plan import digest_of, plan_egress
from appliance.sovereignty.egress.prober import PATIENCE_SECONDS
from appliance.sovereignty.egress.probing import is_walled, run_probes

commands = typer.Typer(help="Check that egress is blocked.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

EXIT_CODES = {EgressVerdict.CLOSED: 0, EgressVerdict.OPEN: 1, EgressVerdict.INCONCLUSIVE: 2}
COLOURS = {EgressVerdict.CLOSED: "green", EgressVerdict.OPEN: "red", EgressVerdict.INCONCLUSIVE: "yellow"}


@commands.command()
def check(
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Check egress from this machine; not recorded. Exit code 0: closed, 1: open, 2: inconclusive."""
    try:
        report = check_here(settings_from(config, data))
    except ApplianceError as error:
        _fail(error)
    _print(report.to_json(), as_json=as_json)


@commands.command()
def attest(
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Have a running gateway check egress and record it in the audit log; exit codes as for `check`."""
    try:
        settings = settings_from(config, data)
        # The gateway answers after all attempts have ended.
        patience = TIMEOUT_SECONDS + settings.egress.timeout_seconds + PATIENCE_SECONDS
        report = ask_gateway(settings, url, "POST", "egress/check", timeout_seconds=patience)
    except ApplianceError as error:
        _fail(error)
    _print(report, as_json=as_json)


def check_here(settings: Settings) -> EgressReport:
    """Run one check in this process, under the settings' `egress` section."""
    began = time.monotonic()
    observation = run_probes(plan_egress(settings, process_environment()))
    return EgressReport(
        observation=observation,
        time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        host=socket.gethostname(),
        trigger=Trigger.REQUEST,
        settings=digest_of(settings.egress),
        walled=is_walled(),
        seconds=time.monotonic() - began,
    )


def _fail(error: ApplianceError) -> NoReturn:
    """Exit with 2: the exit code of other commands' errors would mean `open` here."""
    typer.echo(f"appliance: {error}", err=True)
    raise typer.Exit(EXIT_CODES[EgressVerdict.INCONCLUSIVE])


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    verdict = EgressVerdict(report["verdict"])
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        table = Table(title=f"Egress from {escape(report['host'])}")
        for column in ("kind", "target", "outcome", "detail"):
            table.add_column(column, overflow="fold")
        for result in ([report["control"]] if report["control"] else []) + report["probes"]:
            table.add_row(*(escape(result[name]) for name in ("kind", "target", "outcome", "detail")))
        console = Console()
        console.print(table)
        console.print(f"[bold {COLOURS[verdict]}]{verdict}[/]")
        for reason in report["reasons"]:
            console.print(escape(reason), soft_wrap=True)
    raise typer.Exit(EXIT_CODES[verdict])
