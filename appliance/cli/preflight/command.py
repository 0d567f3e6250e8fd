"""`appliance preflight`: checks before going live, on one screen."""

import sys
from enum import StrEnum
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.preflight.check import CheckResult, Inquiry
from appliance.cli.preflight.checklist import SUBJECTS, run_checks
from appliance.cli.preflight.secret_files import FILE
from appliance.cli.preflight.summary_screen import PreflightReport, make_report
from appliance.errors import ConfigurationError

commands = typer.Typer()
WIDTH = 100
STYLES = {
    CheckResult.OK: "green",
    CheckResult.WARN: "yellow",
    CheckResult.FAIL: "bold red",
    CheckResult.SKIPPED: "dim",
}

EgressOption = Annotated[bool, typer.Option("--egress", help="Check egress even if `egress.mode` is off.")]


class MachineRole(StrEnum):
    UP = "up"
    GATEWAY = "gateway"
    WORKER = "worker"


@commands.command()
def preflight(
    role: Annotated[MachineRole, typer.Option(help="Roles of this machine.")] = MachineRole.UP,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Bundle directory, or list of SHA-256 sums, to compare the weights with; reads every byte."
        ),
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--name", help="Host name that clients use; repeatable.")
    ] = None,
    egress: EgressOption = False,  # noqa: FBT002 - a flag of the command line
    requests_per_day: Annotated[
        int | None, typer.Option(min=1, help="Expected load, to compute the space of the audit log.")
    ] = None,
    keep_days: Annotated[
        int, typer.Option(min=1, help="Days for which the audit log must have space.")
    ] = 365,
    entries: Annotated[int, typer.Option(min=1, help="Number of newest audit entries to read.")] = 1000,
    skip: Annotated[
        list[str] | None, typer.Option(help="Id of a check or a family to skip; repeatable.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail as well.")] = False,  # noqa: FBT002
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Check this machine before going live; nothing is changed.

    The exit code is 0 if no check failed and 1 otherwise; with --strict, warnings fail as well.
    """
    left_out = frozenset(skip or ())
    _refuse_unknown(left_out)
    progress = Console(stderr=True)
    gateway, worker = role is not MachineRole.WORKER, role is not MachineRole.GATEWAY
    with progress.status("checking", spinner="line") as status:
        try:
            inquiry = Inquiry(
                settings=settings_from(config, data),
                settings_file=config,
                clock=wall_clock,
                gateway=gateway,
                worker=worker,
                manifest=against,
                names=tuple(names or ()),
                egress=egress,
                requests_per_day=requests_per_day,
                keep_days=keep_days,
                entries=entries,
            )
        except ConfigurationError as error:
            wrong = FILE.fail(str(error), "correct it; `appliance config` prints the effective values")
            others = (subject for subject in SUBJECTS if subject is not FILE)
            checks = (wrong, *(subject.skipped("the settings are not valid") for subject in others))
        else:
            checks = tuple(
                run_checks(inquiry, skip=left_out, report=lambda title: status.update(escape(title)))
            )
    report = make_report(
        checks,
        version=installed_version("sovereign-appliance"),
        now=wall_clock(),
        gateway=gateway,
        worker=worker,
    )
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        show(report, Console(width=min(WIDTH, Console().width) if sys.stdout.isatty() else WIDTH))
    failed = report.verdict is CheckResult.FAIL or (strict and report.verdict is CheckResult.WARN)
    sys.exit(1 if failed else 0)


def show(report: PreflightReport, console: Console) -> None:
    """Print one line per check, with the remedy below it; skipped checks come last."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=None)
    table.add_column("")
    table.add_column("Check", no_wrap=True)
    table.add_column("Seen", overflow="fold")
    left_out: dict[str, list[str]] = {}
    for check in report.checks:
        if check.result is CheckResult.SKIPPED:
            left_out.setdefault(check.seen, []).append(check.title)
            continue
        seen = Text(check.seen)
        if check.todo:
            seen.append(f"\n-> {check.todo}", style=STYLES[check.result])
        table.add_row(Text(check.result, style=STYLES[check.result]), check.title, seen)
    console.print(table)
    for why, titles in left_out.items():
        console.print(Text(f"skipped  {', '.join(titles)}: {why}", style=STYLES[CheckResult.SKIPPED]))
    console.print(Text(report.title, style=STYLES[report.verdict]))


def _refuse_unknown(names: frozenset[str]) -> None:
    known = {subject.id for subject in SUBJECTS}
    known |= {name.partition(".")[0] for name in known}
    unknown = sorted(names - known)
    if unknown:
        raise ConfigurationError(
            f"--skip {unknown[0]} is not a check; `appliance preflight --json` lists them"
        )
