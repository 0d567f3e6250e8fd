"""
`appliance audit dispose`: remove entries after their retention.

The command works on the database itself, as its owner: on PostgreSQL no gateway may delete an entry.  It
records the disposal in the log, waits until a checkpoint and every witness cover that, and then removes the
entries.  Interrupted at any point, the same command continues.
"""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Annotated

import typer

from appliance.audit.content.retention import parse_line, parse_moment
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.disposal.plan import Plan
from appliance.audit.store import SqlAuditStore
from appliance.audit.stored import Disposal
from appliance.cli.common.audit_log import has_log
from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.common.progress import progress_bar
from appliance.errors import AuditUnavailableError, ConfigurationError
from appliance.gateway.batch.store import SqlBatchStore
from appliance.infra.data_directory import locate
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings

POLL_SECONDS = 0.5


def dispose(
    before: Annotated[
        str | None,
        typer.Option(help="Entries before this time (RFC 3339) or date (UTC); default: by the settings."),
    ] = None,
    basis: Annotated[str, typer.Option(help="Legal basis or rule; recorded in the audit log.")] = "retention",
    yes: Annotated[bool, typer.Option("--yes", help="Remove entries; default: only print which.")] = False,  # noqa: FBT002
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a checkpoint and for witnesses.")
    ] = 120.0,
    url: Annotated[
        str | None, typer.Option(help="Database URL of its owner; default: `audit.database_url`.")
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Remove old entries permanently; without --yes, print what would be removed.

    Default for --before: `audit.dispose_after_days` ago.  No entry is removed within 183 days, before it is
    exported, cosigned by every witness and forwarded, or under a legal hold.
    """
    settings = settings_from(config, data)
    if url is None and not has_log(settings):
        raise ConfigurationError(f"there is no audit log in {locate(settings).directory}: pass --data")
    with closing(SqlAuditStore(url or locate(settings).database_url)) as store:
        disposing = Disposing.of(store, settings.audit)
        recorded = disposing.recorded()
        if recorded is not None:
            typer.echo(f"entry {recorded.index} disposes of the first {recorded.below} entries already")
        else:
            recorded = _record(settings, disposing, before, basis, yes=yes)
        if recorded is not None and yes:
            _carry_out(disposing, recorded, wait)
        else:
            typer.echo("nothing was removed" if yes else "nothing was removed: pass --yes to remove entries")


def _record(
    settings: Settings, disposing: Disposing, before: str | None, basis: str, *, yes: bool
) -> Disposal | None:
    """Show what may be disposed of, and record it if it is to be carried out."""
    legal_basis = parse_line({"basis": basis}, "basis")
    now_ms = int(wall_clock() * 1000)
    cutoff_ms = _cutoff(settings, disposing, before, now_ms)
    plan = disposing.plan(
        cutoff_ms, now_ms=now_ms, files=SqlBatchStore(disposing.store.database).stored_ids()
    )
    _show(plan)
    if not plan.entries or not yes:
        return None
    index = disposing.record(
        plan,
        legal_basis,
        actor=f"cli:{account_name()}",
        origin=settings.audit.origin,
        clock=wall_clock,
    )
    typer.echo(f"recorded as entry {index}")
    return Disposal(below=plan.below, index=index)


def _cutoff(settings: Settings, disposing: Disposing, before: str | None, now_ms: int) -> int:
    days = settings.audit.dispose_after_days
    by_settings = None if days is None else disposing.latest_cutoff(now_ms, days)
    if before is None:
        if by_settings is None:
            raise ConfigurationError("pass --before TIME, or set audit.dispose_after_days")
        return by_settings
    cutoff = parse_moment(before, "before")
    if settings.audit.two_person and (by_settings is None or cutoff > by_settings):
        raise ConfigurationError(
            "audit.two_person is on: entries are disposed of by the settings' age only, so set "
            "audit.dispose_after_days, and name no later time"
        )
    return cutoff


def _show(plan: Plan) -> None:
    if plan.entries:
        typer.echo(f"entries {plan.previous} to {plan.below - 1}, up to {plan.newest}, can be disposed of")
    else:
        typer.echo("no further entry can be disposed of: whole tiles of 256 entries go")
    for limit in plan.limits:
        typer.echo(f"{limit.size:>12}  {limit.rule}")


def _carry_out(disposing: Disposing, recorded: Disposal, wait: float) -> None:
    _wait_until(lambda: disposing.unseen(recorded), wait)
    with progress_bar("entries") as progress:
        for done in disposing.carry_out(recorded):
            progress(done, 2 * recorded.below)
    typer.echo(f"disposed of the first {recorded.below} entries")


def _wait_until(unseen: Callable[[], str | None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (reason := unseen()) is not None:
        if time.monotonic() >= deadline:
            raise AuditUnavailableError(f"{reason}; nothing was removed: run the same command again")
        time.sleep(POLL_SECONDS)
