"""`appliance speculation drill`: runs a drill, prints its timeline and compares it with the audit log."""

import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from itertools import cycle
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
from appliance.cli.drill.drill import Drill, DrillStage, ModeChange, Timeline, Traffic, prepare
from appliance.errors import ApplianceError, ConfigurationError
from appliance.infra.settings import Settings

PIECE_CHARACTERS = 600
MODULES = (
    *("argparse", "configparser", "csv", "difflib", "fractions"),
    *("shutil", "statistics", "textwrap", "zipfile"),
)
"""Modules of the standard library whose source is read, not imported."""
MAX_CONCURRENCY = 8
MIN_COLLAPSE_SECONDS, MAX_COLLAPSE_SECONDS = 10, 180
PASSED, FAILED = "passed", "failed"
ATTEMPTS, PAUSE_SECONDS = 20, 0.25
"""Reads of the audit log: an entry is written a moment after its change."""


def drill(
    key: Annotated[str | None, typer.Option("--key", help="API key of a tenant.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the API key of a tenant.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model to drill; default: the first.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Concurrent requests.")] = 2,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts the draft predicts well; default: Python code.")
    ] = None,
    collapse_for: Annotated[str, typer.Option(help="Maximum time to send noise, such as 60s.")] = "60s",
    repeat: Annotated[int, typer.Option(min=1, help="Number of drills, one after the other.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
    url: UrlOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Cause a real collapse of acceptance with noise, and check how the appliance reacts.

    Sends prompts the draft predicts well, then random digits until speculation stops, then the first kind
    until it recovers: at most five minutes.  The exit code is 0 only if all of that happened, no request
    failed, and the audit log has every change; with --repeat, only if every drill passed.
    """
    settings = settings_from(config, data)
    noise_seconds, tenant_key = collapse_seconds(collapse_for), _key(key, key_file)
    good = in_turn(code_prompts() if prompts is None else file_prompts(prompts))

    say: Callable[[str], None] = (lambda _: None) if as_json else typer.echo

    async def conduct() -> Drill:
        async with open_admin(settings, url) as gateway, aiohttp.ClientSession(trust_env=False) as session:
            start = await prepare(gateway, model)
            say(f"drill of {start.model} at {gateway.base}, {concurrency} requests at a time")
            traffic = Traffic(
                session=session,
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
                on_stage=lambda stage, found: say(describe(stage, found)),
                collapse_seconds=noise_seconds,
            )
            await trial.run()
            return trial

    reports: list[dict[str, Any]] = []
    for number in range(1, repeat + 1):
        if repeat > 1:
            say(f"drill {number} of {repeat}")
        try:
            done = asyncio.run(conduct())
        except ApplianceError as error:
            if number == 1:
                raise
            reports.append({"problems": [str(error)], "verdict": FAILED})
            say(f"verdict: {FAILED}: {error}")
            continue
        problems = judge(settings, done)
        reports.append(report(done, problems))
        say(summary(done, problems))
    if as_json:
        typer.echo(json.dumps(reports[0] if repeat == 1 else repeat_report(reports), indent=2))
    elif repeat > 1:
        typer.echo(repeat_summary(reports))
    raise typer.Exit(0 if all(each["verdict"] == PASSED for each in reports) else 1)


def code_prompts() -> tuple[str, ...]:
    """Pieces of the standard library's source, each from the start of a line."""
    pieces = tuple(piece for name in MODULES for piece in cut(_source(name)))
    if not pieces:
        raise ConfigurationError("this Python has no source of its standard library: use --prompts")
    return pieces


def file_prompts(path: Path) -> tuple[str, ...]:
    """Prompts from a file, one per line: a JSON string, or the line as it is."""
    lines = _read(path, "prompts").splitlines()
    prompts = tuple(prompt for line in lines if (prompt := _line(line)).strip())
    if not prompts:
        raise ConfigurationError(f"the file {path} has no prompts: write one per line")
    return prompts


def cut(text: str) -> Iterator[str]:
    """Cut a text into pieces of whole lines, each at least `PIECE_CHARACTERS` long; the rest is dropped."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE_CHARACTERS:
            yield piece
            piece = ""


def in_turn(prompts: Sequence[str]) -> Callable[[], str]:
    return partial(next, cycle(prompts))


def noise() -> str:
    """Random hexadecimal digits: unpredictable, and without a prefix that could be cached."""
    return secrets.token_hex(PIECE_CHARACTERS // 2)


def collapse_seconds(text: str) -> int:
    seconds = parse_duration(text)
    if not MIN_COLLAPSE_SECONDS <= seconds <= MAX_COLLAPSE_SECONDS:
        bounds = f"{MIN_COLLAPSE_SECONDS}s to {MAX_COLLAPSE_SECONDS}s"
        raise ConfigurationError(f"--collapse-for must be from {bounds}, not {text}")
    return seconds


def judge(settings: Settings, done: Drill) -> tuple[str, ...]:
    """What was wrong with a drill, in one line each; compares it with this machine's audit log."""
    try:
        missing = unrecorded(done.changes, _recorded(settings, done.start.audit_size))
        for _ in range(ATTEMPTS if missing else 0):
            time.sleep(PAUSE_SECONDS)
            missing = unrecorded(done.changes, _recorded(settings, done.start.audit_size))
            if not missing:
                break
    except ApplianceError as error:
        return problems_of(done.timeline, done.traffic.failures, unread=str(error))
    return problems_of(done.timeline, done.traffic.failures, missing)


def problems_of(
    found: Timeline, failures: list[str], missing: Sequence[ModeChange] = (), *, unread: str | None = None
) -> tuple[str, ...]:
    """`missing` are changes without an audit entry; `unread` says why the log could not be read."""
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


def unrecorded(changes: Sequence[ModeChange], entries: Sequence[tuple[str, str, str]]) -> list[ModeChange]:
    """The changes without an audit entry of their own; `entries` are worker, mode and reason in order."""
    missing, position = [], 0
    for change in changes:
        try:
            position = entries.index((change.worker, change.mode, change.reason), position) + 1
        except ValueError:
            missing.append(change)
    return missing


def _recorded(settings: Settings, audit_size: int) -> tuple[tuple[str, str, str], ...]:
    """Worker, mode and reason of each `speculation.changed` from index `audit_size` on, in order."""
    with open_store(settings) as store:
        size = store.head().size
        if size < audit_size:
            raise ConfigurationError(
                f"the log here has {size} entries, the gateway's {audit_size}: give its directory with --data"
            )
        pages = (store.leaves(start, min(size, start + PAGE)) for start in range(audit_size, size, PAGE))
        leaves = (leaf for page in pages for leaf in page if leaf.type == EntryType.SPECULATION_CHANGED)
        entries = [decode(leaf.leaf).fields for leaf in leaves]
    return tuple((str(each["worker"]), str(each["mode"]), str(each["reason"])) for each in entries)


def report(done: Drill, problems: tuple[str, ...]) -> dict[str, Any]:
    found, traffic = done.timeline, done.traffic
    return {
        "model": done.start.model,
        "worker": None if found.fallback is None else found.fallback.worker,
        "stages": {stage: stage not in found.missing for stage in DrillStage},
        "marks": {"began": found.began, "warm": found.warm, "noise": found.noise, "back": found.back},
        "seconds_to_fallback": found.seconds_to_fallback,
        "drafts_to_fallback": done.drafts_to_fallback,
        "seconds_to_recovery": found.seconds_to_recovery,
        "warm_acceptance_length": done.warm_length,
        "changes": [asdict(change) for change in done.changes],
        "requests": traffic.requests,
        "failures": traffic.failures,
        "problems": list(problems),
        "verdict": FAILED if problems else PASSED,
    }


def summary(done: Drill, problems: tuple[str, ...]) -> str:
    requests, failed = done.traffic.requests, len(done.traffic.failures) or "none"
    lines = [f"{requests} requests, {failed} failed; {len(done.changes)} changes"]
    if done.drafts_to_fallback is not None:
        lines.append(f"about {done.drafts_to_fallback} drafts were answered before the fallback")
    if not problems:
        lines.append("every change is in the audit log, with the same reason and in the same order")
    verdict = f"verdict: {FAILED}: {'; '.join(problems)}" if problems else f"verdict: {PASSED}"
    return "\n".join([*lines, verdict])


def repeat_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several drills in one object; `reports` are those of the single drills, in order."""
    failed = [number for number, each in enumerate(reports, start=1) if each["verdict"] != PASSED]
    return {"drills": list(reports), "failed": failed, "verdict": FAILED if failed else PASSED}


def repeat_summary(reports: Sequence[dict[str, Any]]) -> str:
    failed = repeat_report(reports)["failed"]
    lines = [f"{len(reports) - len(failed)} of {len(reports)} drills passed"]
    for name in ("fallback", "recovery"):
        seconds = [s for each in reports if (s := each.get(f"seconds_to_{name}")) is not None]
        if seconds:
            middle = statistics.median(seconds)
            lines.append(f"{name}: median {middle:.1f} s, {min(seconds):.1f} to {max(seconds):.1f} s")
    names = ", ".join(map(str, failed))
    return "\n".join([*lines, f"verdict: {FAILED}: drills {names}" if failed else f"verdict: {PASSED}"])


def describe(stage: DrillStage, found: Timeline) -> str:
    """One line of the timeline, for a stage that was reached."""
    at, text = found.warm, "speculates; from here on noise"
    if stage is not DrillStage.WARM:
        change: ModeChange = getattr(found, stage)
        at, text = change.time, f"{change.worker} is {change.mode} ({change.reason})"
        if change.acceptance_length is not None:
            text += f", acceptance length {change.acceptance_length:.2f}"
    if stage is DrillStage.FALLBACK:
        text += f", {found.seconds_to_fallback:.1f} s after the noise began"
    elif stage is DrillStage.RECOVERED:
        text += f", {found.seconds_to_recovery:.1f} s after the noise ended"
    return f"{(at or found.began) - found.began:7.1f} s  {stage:<13} {text}"


def _key(key: str | None, key_file: Path | None) -> str:
    if (key is None) == (key_file is None):
        message = "give a tenant's key by --key-file or --key; `appliance key create` makes one"
        raise ConfigurationError(message)
    return key or "" if key_file is None else _read(key_file, "key in").strip()


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the {what} {file}: {error}") from error


def _line(line: str) -> str:
    try:
        return str(json.loads(line)) if line.startswith('"') else line
    except ValueError:
        return line


def _source(name: str) -> str:
    loader = getattr(find_spec(name), "loader", None)
    return (loader.get_source(name) if isinstance(loader, SourceFileLoader) else None) or ""
