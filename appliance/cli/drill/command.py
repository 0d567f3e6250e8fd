"""
`appliance speculation drill`: runs a drill, shows it, and compares it with the audit log.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer

from appliance.cli.common.admin import open_admin
from appliance.cli.common.duration import parse_duration
from appliance.cli.common.options import ConfigOption, DataOption, UrlOption, settings_from
from appliance.cli.drill.drill import (
    LARGEST_CONCURRENCY,
    LONGEST_COLLAPSE_SECONDS,
    SHORTEST_COLLAPSE_SECONDS,
    Drill,
    Findings,
    Plan,
    Start,
    look,
)
from appliance.cli.drill.prompts import code_prompts, file_prompts, in_turn, noise
from appliance.cli.drill.record import changes_lacking
from appliance.cli.drill.timeline import Change, Stage, Timeline, Verdict, verdict
from appliance.cli.drill.traffic import Traffic
from appliance.errors import ApplianceError, ConfigurationError
from appliance.infra.settings import Settings


def drill(
    key: Annotated[str | None, typer.Option("--key", help="API key of a tenant.")] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with the API key of a tenant.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model to drill; default: the first.")] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=LARGEST_CONCURRENCY, help="Requests at a time.")
    ] = 2,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="File of prompts the draft is good at; default: Python code."),
    ] = None,
    collapse_for: Annotated[
        str, typer.Option("--collapse-for", help="Most time to send noise, such as 60s.")
    ] = "60s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Cause a real collapse of acceptance with noise, and check what the appliance makes of it.

    Sends prompts the draft is good at, then random digits until speculation stops and a probe
    fails, then the first kind until it recovers: at most five minutes.  The exit code is 0 only if
    all of that happened, no request failed, and the audit log has every change.
    """
    settings = settings_from(config, data)
    plan = Plan(collapse_seconds=collapse_seconds(collapse_for))
    tenant_key = _key(key, key_file)
    good = in_turn(code_prompts() if prompts is None else file_prompts(prompts))
    tell = _say_nothing if as_json else _say

    async def conduct() -> tuple[Start, Findings]:
        async with open_admin(settings, url) as gateway, aiohttp.ClientSession(trust_env=False) as session:
            start = await look(gateway, model)
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
                gateway=gateway,
                traffic=traffic,
                noise=noise,
                start=start,
                plan=plan,
                tell=tell,
                clock=time.monotonic,
            )
            return start, await trial.run()

    start, findings = asyncio.run(conduct())
    judged = judge(settings, start, findings)
    typer.echo(
        json.dumps(report(start, findings, judged), indent=2) if as_json else summary(findings, judged)
    )
    raise typer.Exit(0 if judged.passed else 1)


def collapse_seconds(text: str) -> int:
    """
    Read how long noise may be sent.

    Raises:
        ConfigurationError: it is no length of time, or out of bounds.
    """
    seconds = parse_duration(text)
    if not SHORTEST_COLLAPSE_SECONDS <= seconds <= LONGEST_COLLAPSE_SECONDS:
        bounds = f"{SHORTEST_COLLAPSE_SECONDS}s to {LONGEST_COLLAPSE_SECONDS}s"
        message = f"--collapse-for must be from {bounds}, not {text}"
        raise ConfigurationError(message)
    return seconds


def judge(settings: Settings, start: Start, findings: Findings) -> Verdict:
    """Compare a drill with the audit log of this machine, and judge it."""
    lacking: tuple[Change, ...] | None = None
    unread = ""
    try:
        lacking = changes_lacking(settings, findings.changes, start.audit_size)
    except ApplianceError as error:
        unread = str(error)
    return verdict(findings.timeline, failures=findings.tally.failures, lacking=lacking, unread=unread)


def report(start: Start, findings: Findings, judged: Verdict) -> dict[str, Any]:
    """Everything about a drill, for programs."""
    found = findings.timeline
    return {
        "model": start.model,
        "worker": found.worker,
        "stages": {stage: stage not in found.missing for stage in Stage},
        "marks": asdict(found.marks),
        "seconds_to_fallback": found.seconds_to_fallback,
        "drafts_to_fallback": findings.drafts_to_fallback,
        "seconds_to_recovery": found.seconds_to_recovery,
        "warm_acceptance_length": findings.warm_length,
        "changes": [asdict(change) for change in findings.changes],
        "requests": findings.tally.requests,
        "failures": findings.tally.failures,
        "problems": list(judged.problems),
        "verdict": "passed" if judged.passed else "failed",
    }


def summary(findings: Findings, judged: Verdict) -> str:
    """The last lines for people: what it came to, and the verdict."""
    failed = len(findings.tally.failures) or "none"
    lines = [f"{findings.tally.requests} requests, {failed} failed; {len(findings.changes)} changes"]
    if findings.drafts_to_fallback is not None:
        lines.append(f"about {findings.drafts_to_fallback} drafts were answered before the fallback")
    if judged.passed:
        lines.append("every change is in the audit log, with the same reason and in the same order")
        return "\n".join([*lines, "verdict: passed"])
    return "\n".join([*lines, f"verdict: failed: {'; '.join(judged.problems)}"])


def describe(stage: Stage, found: Timeline) -> str:
    """One line of the timeline, when a stage is reached."""
    evidence: dict[Stage, Callable[[], tuple[float | None, str]]] = {
        Stage.WARM: lambda: (found.marks.warm, "speculates; from here on noise"),
        Stage.FALLBACK: lambda: _change(found.fallback, found.seconds_to_fallback, "after the noise began"),
        Stage.PROBE_FAILED: lambda: _change(found.probe_failed, None, ""),
        Stage.RECOVERED: lambda: _change(found.recovered, found.seconds_to_recovery, "after the noise ended"),
    }
    at, text = evidence[stage]()
    return f"{(at or found.marks.began) - found.marks.began:7.1f} s  {stage:<13} {text}"


def _change(change: Change | None, seconds: float | None, since: str) -> tuple[float | None, str]:
    if change is None:
        return None, ""
    text = f"{change.worker} is {change.mode} ({change.reason})"
    if change.acceptance_length is not None:
        text += f", acceptance length {change.acceptance_length:.2f}"
    return change.time, text if seconds is None else f"{text}, {seconds:.1f} s {since}"


def _say(stage: Stage, found: Timeline) -> None:
    typer.echo(describe(stage, found))


def _say_nothing(_stage: Stage, _found: Timeline) -> None:
    """JSON comes in one piece, at the end."""


def _key(key: str | None, key_file: Path | None) -> str:
    if (key is None) == (key_file is None):
        message = "a drill needs a tenant's key, by --key-file or --key; `appliance key create` makes one"
        raise ConfigurationError(message)
    if key_file is None:
        return key or ""
    try:
        return key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the key in {key_file}: {error}"
        raise ConfigurationError(message) from error
