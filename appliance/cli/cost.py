"""
`appliance cost`: reports the cost of serving from the database; no gateway has to run.

The report names tenants and holds no content.  Reading it is not recorded in the audit log.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from appliance.cli.common.audit_log import has_log
from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.errors import ConfigurationError
from appliance.gateway.cost.prices import JOULES_PER_KWH, SECONDS_PER_HOUR
from appliance.gateway.cost.reader import UsageQuery, read_usage
from appliance.gateway.cost.report import CostReport
from appliance.gateway.cost.report_page import render_page
from appliance.gateway.cost.rows import parse_day
from appliance.gateway.cost.sheet import IDLE, TOTAL, UNATTRIBUTED, render_sheet
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings

commands = typer.Typer(help="Report the cost of serving, by tenant and model.", no_args_is_help=True)


@commands.command()
def report(
    first: Annotated[
        str | None, typer.Option("--from", help="First day or month; default: the first of this month.")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Day or month before which it ends; default: the end of today.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV for spreadsheets.")] = False,  # noqa: FBT002 - a flag of the command line
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,  # noqa: FBT002
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page.")] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show engine time, energy, tokens and cost of a period, with tenants' names."""
    if as_csv and as_json:
        raise ConfigurationError("--csv and --json both print: choose one of them")
    made = read_report(settings_from(config, data), first, end, wall_clock())
    if html is not None:
        try:
            html.write_text(render_page(made), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {html}: {error.strerror}") from error
    if as_csv:
        typer.echo(render_sheet(made), nl=False)
    elif as_json:
        typer.echo(made.model_dump_json(indent=1))
    elif html is not None:
        typer.echo(f"wrote {html}")
    else:
        _show(made)


def read_report(settings: Settings, first: str | None, end: str | None, now: float) -> CostReport:
    """
    The report from `first` (default: the first of this month) to before `end` (default: the end of today).

    Days are those of `limits.time_zone`; `now` is Unix time.
    """
    zone = ZoneInfo(settings.limits.time_zone)
    today = datetime.fromtimestamp(now, UTC).astimezone(zone).date()
    first_day = today.replace(day=1) if first is None else parse_day(first)
    end_day = today + timedelta(days=1) if end is None else parse_day(end)
    if first_day >= end_day:
        raise ConfigurationError(f"--from must be before --to: {first_day} is not before {end_day}")
    installation = locate(settings)
    if not has_log(settings):
        message = f"there is no database in {installation.directory}: name its directory with --data"
        raise ConfigurationError(message)
    query = UsageQuery(
        database_url=installation.database_url,
        first=first_day,
        end=end_day,
        time_zone=settings.limits.time_zone,
        settings=settings.cost,
        now=now,
    )
    return read_usage(query).report


def _show(made: CostReport) -> None:
    end = made.end - timedelta(days=1)
    table = Table(title=f"Cost of serving, {made.begin.date()} to {end.date()}, in {escape(made.currency)}")
    table.add_column("tenant", overflow="fold", min_width=len(UNATTRIBUTED))
    table.add_column("model", overflow="fold")
    for column in ("delivered", "engine h", "kWh", "cost", "per 1M"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in (*made.lines, made.total):
        if line is made.total:
            for name, rest in ((IDLE, made.idle), (UNATTRIBUTED, made.unattributed)):
                table.add_row(name, "", "", *_amounts(rest.seconds, rest.joules, rest.cost.total))
            table.add_section()
        per_million = "" if line.cost_per_million is None else f"{line.cost_per_million:,.2f}"
        amounts = _amounts(line.engine_seconds, line.joules, line.cost.total)
        name, delivered = escape(line.tenant or TOTAL), f"{line.delivered_tokens:,}"
        table.add_row(name, escape(line.model), delivered, *amounts, per_million)
    console = Console()
    console.print(table)
    if made.total.draft_tokens:
        console.print(
            f"{made.total.wasted_tokens:,} of {made.total.draft_tokens:,} draft tokens were rejected.",
            soft_wrap=True,
        )
    saving = made.saving
    if saving.compared_tokens:
        console.print(
            f"Drafting saved {_hours(saving.seconds)} engine hours "
            f"({_hours(saving.seconds_low)} to {_hours(saving.seconds_high)} with 95 % confidence), worth "
            f"{saving.money:,.2f} {escape(made.currency)}.",
            soft_wrap=True,
        )
    for gap in made.missing:
        console.print(
            f"Missing: {gap.begin:%Y-%m-%d %H:%M:%S} to {gap.end:%Y-%m-%d %H:%M:%S} UTC, "
            f"{gap.kind.replace('_', ' ')}{f' by {gap.gateway}' if gap.gateway else ''}.",
            soft_wrap=True,
        )
    for note in made.notes:
        console.print(escape(note), soft_wrap=True)


def _amounts(seconds: float, joules: float, cost: float) -> tuple[str, str, str]:
    return _hours(seconds), f"{joules / JOULES_PER_KWH:,.3f}", f"{cost:,.2f}"


def _hours(seconds: float) -> str:
    return f"{seconds / SECONDS_PER_HOUR:,.3f}"
