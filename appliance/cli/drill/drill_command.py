"""`appliance speculation drill`: runs a drill, prints its timeline and compares it with the audit log."""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer

from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.cli.common.admin_client import open_admin
from appliance.cli.common.audit_log import PAGE, open_store
from appliance.cli.common.duration import parse_duration
from appliance.cli.common.options import ConfigOption, DataOption, UrlOption, settings_from
from appliance.cli.drill.drill import (
    MAX_COLLAPSE_SECONDS,
    MAX_CONCURRENCY,
    MIN_COLLAPSE_SECONDS,
    Drill,
    DrillPlan,
    DrillStage,
    ModeChange,
    Timeline,
    prepare,
    unrecorded,
)
from appliance.cli.drill.traffic import Traffic, code_prompts, file_prompts, in_turn, noise
from appliance.errors import ApplianceError, ConfigurationError
from appliance.infra.settings import Settings

ATTEMPTS, PAUSE_SECONDS = 20, 0.25
"""Reads of the audit log: an entry is written a moment after its change."""


def drill(
    key: Annotated[str | None, typer.Option("--key", help="API key of a tenant.")] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with the API key of a tenant.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model to drill; default: the first.")] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=MAX_CONCURRENCY, help="Concurrent requests.")
    ] = 2,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="File of prompts the draft predicts well; default: Python code."),
    ] = None,
    collapse_for: Annotated[
        str, typer.Option("--collapse-for", help="Maximum time to send noise, such as 60s.")
    ] = "60s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Cause a real collapse of acceptance with noise, and check how the appliance reacts.

    Sends prompts the draft predicts well, then random digits until speculation stops and a probe fails, then
    the first kind until it recovers: at most five minutes.  The exit code is 0 only if all of that happened,
    no request failed, and the audit log has every change.
    """
    settings = settings_from(config, data)
    plan = DrillPlan(collapse_seconds=collapse_seconds(collapse_for))
    tenant_key = _key(key, key_file)
    good = in_turn(code_prompts() if prompts is None else file_prompts(prompts))

    def show(stage: DrillStage, found: Timeline) -> None:
        if not as_json:
            typer.echo(describe(stage, found))

    async def conduct() -> Drill:
        async with open_admin(settings, url) as gateway, aiohttp.ClientSession(trust_env=False) as session:
            start = await prepare(gateway, model)
            if not as_json:
                typer.echo(f"drill of {start.model} at {gateway.base}, {concurrency} requests at a time")
            traffic = Traffic(
                session,
                base=gateway.base,
                key=tenant_key,
                model=start.model,
                concurrency=concurrency,
                prompt=good,
            )
            trial = Drill(
                gateway=gateway, traffic=traffic, noise=noise, start=start, plan=plan, on_stage=show
            )
            await trial.run()
            return trial

    done = asyncio.run(conduct())
    problems = judge(settings, done)
    typer.echo(json.dumps(report(done, problems), indent=2) if as_json else summary(done, problems))
    raise typer.Exit(1 if problems else 0)


def collapse_seconds(text: str) -> int:
    """
    Parse the maximum time for noise.

    Raises:
        ConfigurationError: it is not a duration, or out of bounds.
    """
    seconds = parse_duration(text)
    if not MIN_COLLAPSE_SECONDS <= seconds <= MAX_COLLAPSE_SECONDS:
        bounds = f"{MIN_COLLAPSE_SECONDS}s to {MAX_COLLAPSE_SECONDS}s"
        raise ConfigurationError(f"--collapse-for must be from {bounds}, not {text}")
    return seconds


def judge(settings: Settings, done: Drill) -> tuple[str, ...]:
    """What was wrong with a drill, in one line each; compares it with this machine's audit log."""
    try:
        missing = missing_entries(settings, done.changes, done.start.audit_size)
    except ApplianceError as error:
        return problems_of(done.timeline, done.traffic.tally.failures, unread=str(error))
    return problems_of(done.timeline, done.traffic.tally.failures, missing)


def problems_of(
    found: Timeline, failures: list[str], missing: tuple[ModeChange, ...] = (), *, unread: str | None = None
) -> tuple[str, ...]:
    """
    What was wrong: the first stage not reached, failed requests, changes without an audit entry.

    `unread` says why the log could not be read.
    """
    problems = [f"the stage {stage} was not reached" for stage in found.missing[:1]]
    if failures:
        problems.append(f"{len(failures)} requests failed, the first with: {failures[0]}")
    if unread is not None:
        problems.append(f"the audit log was not checked: {unread}")
    problems.extend(
        f"the audit log lacks the change of {change.worker} to {change.mode} ({change.reason}) in order"
        for change in missing
    )
    return tuple(problems)


def missing_entries(
    settings: Settings, changes: tuple[ModeChange, ...], audit_size: int
) -> tuple[ModeChange, ...]:
    """
    The changes without their entry among those from index `audit_size` on.

    Raises:
        ApplianceError: there is no audit log here, it cannot be read, or it is another one.
    """
    missing = unrecorded(changes, _recorded(settings, audit_size))
    for _ in range(ATTEMPTS):
        if not missing:
            break
        time.sleep(PAUSE_SECONDS)
        missing = unrecorded(changes, _recorded(settings, audit_size))
    return missing


def _recorded(settings: Settings, audit_size: int) -> tuple[tuple[str, str, str], ...]:
    """Worker, mode and reason of each `speculation.changed` from index `audit_size` on, in order."""
    found = []
    with open_store(settings) as store:
        size = store.head().size
        if size < audit_size:
            raise ConfigurationError(
                f"the log here has {size} entries, the gateway's {audit_size}: give its directory with --data"
            )
        for start in range(audit_size, size, PAGE):
            for leaf in store.leaves(start, min(size, start + PAGE)):
                if leaf.type == EntryType.SPECULATION_CHANGED:
                    fields = decode(leaf.leaf).fields
                    found.append((str(fields["worker"]), str(fields["mode"]), str(fields["reason"])))
    return tuple(found)


def report(done: Drill, problems: tuple[str, ...]) -> dict[str, Any]:
    """The JSON output."""
    found, tally = done.timeline, done.traffic.tally
    return {
        "model": done.start.model,
        "worker": found.worker,
        "stages": {stage: stage not in found.missing for stage in DrillStage},
        "marks": asdict(found.marks),
        "seconds_to_fallback": found.seconds_to_fallback,
        "drafts_to_fallback": done.drafts_to_fallback,
        "seconds_to_recovery": found.seconds_to_recovery,
        "warm_acceptance_length": done.warm_length,
        "changes": [asdict(change) for change in done.changes],
        "requests": tally.requests,
        "failures": tally.failures,
        "problems": list(problems),
        "verdict": "failed" if problems else "passed",
    }


def summary(done: Drill, problems: tuple[str, ...]) -> str:
    tally = done.traffic.tally
    lines = [
        f"{tally.requests} requests, {len(tally.failures) or 'none'} failed; {len(done.changes)} changes"
    ]
    if done.drafts_to_fallback is not None:
        lines.append(f"about {done.drafts_to_fallback} drafts were answered before the fallback")
    if not problems:
        lines.append("every change is in the audit log, with the same reason and in the same order")
    return "\n".join([*lines, f"verdict: failed: {'; '.join(problems)}" if problems else "verdict: passed"])


def describe(stage: DrillStage, found: Timeline) -> str:
    """One line of the timeline, for a stage that was reached."""
    at, text = found.marks.warm, "speculates; from here on noise"
    changes = {
        DrillStage.FALLBACK: (found.fallback, found.seconds_to_fallback, "after the noise began"),
        DrillStage.PROBE_FAILED: (found.probe_failed, None, ""),
        DrillStage.RECOVERED: (found.recovered, found.seconds_to_recovery, "after the noise ended"),
    }
    change, seconds, since = changes.get(stage, (None, None, ""))
    if change is not None:
        at, text = change.time, f"{change.worker} is {change.mode} ({change.reason})"
        if change.acceptance_length is not None:
            text += f", acceptance length {change.acceptance_length:.2f}"
        text += "" if seconds is None else f", {seconds:.1f} s {since}"
    return f"{(at or found.marks.began) - found.marks.began:7.1f} s  {stage:<13} {text}"


def _key(key: str | None, key_file: Path | None) -> str:
    if (key is None) == (key_file is None):
        raise ConfigurationError(
            "give a tenant's key by --key-file or --key; `appliance key create` makes one"
        )
    if key_file is None:
        return key or ""
    try:
        return key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the key in {key_file}: {error}") from error
