"""A drill passes only if every stage happened and was recorded."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.cli import cli
from appliance.cli.common.admin_client import open_admin
from appliance.cli.drill import drill_command
from appliance.cli.drill.drill import (
    Drill,
    DrillStage,
    ModeChange,
    Timeline,
    Traffic,
    find_stages,
    parse_changes,
    prepare,
)
from appliance.cli.drill.drill_command import (
    PIECE_CHARACTERS,
    code_prompts,
    collapse_seconds,
    cut,
    describe,
    file_prompts,
    in_turn,
    judge,
    noise,
    problems_of,
    report,
    summary,
    unrecorded,
)
from appliance.errors import ConfigurationError
from appliance.infra.settings import AuditSettings, Settings, load_settings
from tests.fakes import until

LIMITS = {"warm_seconds": 2.0, "collapse_seconds": 2.0, "total_seconds": 6.0, "poll_seconds": 0.01}
NOISE = re.compile(r"[0-9a-f]{600}")
KEY = "sk-tenant"


def now() -> float:
    return time.time()  # noqa: TID251 - the gateway's clock


class FakeGateway:
    """
    A gateway whose only worker falls back after some noise, and recovers without noise.

    Each step and its audit entry can be switched off.
    """

    def __init__(self, audit: AuditLog) -> None:
        self.audit = audit
        self.changes: list[dict[str, Any]] = []
        self.mode, self.length = "speculative", 2.6
        self.warms_up = self.falls_back = self.recovers = True
        self.recovers_in_noise = False
        self.unrecorded: set[str] = set()
        """Reasons of changes that do not reach the audit log."""
        self.status = 200
        self.override: dict[str, Any] | None = None
        self.controllable = True
        self.noisy = self.good = 0
        """Requests of either kind since the last change."""
        self.largest_concurrency = self.running = 0
        self.unfinished = 0
        self.url = ""

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.headers["Authorization"] != f"Bearer {KEY}":
            return web.json_response({"error": {"code": "permission_denied"}}, status=403)
        assert (body["model"], body["temperature"]) == ("demo", 0)
        self.running += 1
        self.largest_concurrency = max(self.largest_concurrency, self.running)
        try:
            await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.unfinished += 1
            raise
        finally:
            self.running -= 1
        is_noise = NOISE.fullmatch(body["prompt"]) is not None
        if self.status != 200 and is_noise:
            return web.json_response({"error": {"code": "no_worker_available"}}, status=self.status)
        await self.react(is_noise=is_noise)
        counts = {"num_spec_steps": 20, "num_accepted_draft_tokens": 2 if is_noise else 30}
        return web.json_response({"choices": [], "metrics": {"speculative_decoding": counts}})

    async def react(self, *, is_noise: bool) -> None:
        self.noisy, self.good = (self.noisy + 1, 0) if is_noise else (0, self.good + 1)
        tried = {change["reason"] for change in self.changes}
        if is_noise and self.mode == "speculative" and self.noisy == 5 and self.falls_back:
            await self.change("target_only", "collapsed", 1.07)
        elif is_noise and self.noisy == 15 and self.recovers_in_noise:
            await self.change("speculative", "recovered", 2.0)
        elif not is_noise and self.good == 10 and "collapsed" in tried and self.recovers:
            await self.change("speculative", "recovered", 2.5)

    async def change(self, mode: str, reason: str, length: float | None) -> None:
        self.changes.append(
            {
                "sequence": len(self.changes) + 8,
                "time": datetime.fromtimestamp(now(), UTC).isoformat(timespec="milliseconds"),
                "worker": "w1",
                "model": "demo",
                "mode": mode,
                "previous_mode": self.mode,
                "reason": reason,
                "table": ["1-64: 3" if mode == "speculative" else "1-64: 0"],
                "acceptance_length": length,
            }
        )
        self.mode = mode
        if reason not in self.unrecorded:
            await self.audit.append(
                EntryType.SPECULATION_CHANGED, worker="w1", model="demo", mode=mode, reason=reason
            )

    async def speculation(self, _request: web.Request) -> web.Response:
        worker = {
            "worker": "w1",
            "models": ["demo"],
            "healthy": True,
            "speculates": True,
            "controllable": self.controllable,
            "problems": [] if self.controllable else ["no plugin"],
            "mode": self.mode,
            "acceptance_length": self.length if self.warms_up else 1.2,
            "override": self.override,
        }
        return web.json_response({"now": now(), "workers": [worker]})

    async def events(self, request: web.Request) -> web.Response:
        after = int(request.query.get("after", "0"))
        found = [change for change in self.changes if change["sequence"] > after]
        return web.json_response({"now": now(), "events": found})

    async def state(self, _request: web.Request) -> web.Response:
        return web.json_response({"audit": {"size": self.audit.state().size}})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/admin/v1/speculation", self.speculation)
        app.router.add_get("/admin/v1/speculation/events", self.events)
        app.router.add_get("/admin/v1/status", self.state)
        return app


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "admin.key").write_text("sk-admin\n")
    monkeypatch.setattr(drill_command, "PAUSE_SECONDS", 0.005)
    return load_settings(environment={}, overrides={"data": {"directory": str(tmp_path)}})


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[FakeGateway]:
    create_signing_key(tmp_path / "audit.key")
    audit_settings = AuditSettings()
    async with AsyncExitStack() as stack:
        store = stack.enter_context(closing(SqlAuditStore(f"sqlite:///{tmp_path / 'audit.db'}")))
        audit = await stack.enter_async_context(
            AuditLog.open(
                store=store,
                signer=load_signing_key(tmp_path / "audit.key", audit_settings.origin),
                settings=audit_settings,
                sealed_head_path=tmp_path / "audit.head",
                clock=now,
                version="test",
            )
        )
        fake = FakeGateway(audit)
        # A drill ignores changes before it, here and in the log.
        await fake.change("target_only", "below_break_even", 1.3)
        await fake.change("speculative", "recovered", 2.6)
        runner = web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        fake.url = f"http://{host}:{port}"
        yield fake


async def drill(
    gateway: FakeGateway, settings: Settings, *, key: str = KEY, **limits: float
) -> tuple[Drill, list[tuple[DrillStage, Timeline]]]:
    reported: list[tuple[DrillStage, Timeline]] = []
    async with open_admin(settings, gateway.url) as admin, aiohttp.ClientSession() as session:
        start = await prepare(admin, None)
        traffic = Traffic(
            session=session,
            base=gateway.url,
            key=key,
            model=start.model,
            concurrency=2,
            prompt=in_turn(["def add(a, b):"]),
        )
        trial = Drill(
            gateway=admin,
            traffic=traffic,
            noise=noise,
            start=start,
            on_stage=lambda stage, found: reported.append((stage, found)),
            **LIMITS | limits,
        )
        await trial.run()
        return trial, reported


async def judged(gateway: FakeGateway, settings: Settings, **limits: float) -> tuple[str, ...]:
    """The problems of a drill."""
    done, _ = await drill(gateway, settings, **limits)
    return await asyncio.to_thread(judge, settings, done)


async def test_drill_passes_when_every_stage_happened_and_was_recorded(gateway, settings):
    done, reported = await drill(gateway, settings)
    assert [stage for stage, _ in reported] == list(DrillStage)
    assert await asyncio.to_thread(judge, settings, done) == ()
    reasons = [change.reason for change in done.changes]
    assert reasons == ["collapsed", "recovered"]
    assert done.timeline.fallback.worker == "w1"
    assert done.warm_length == 2.6
    assert done.drafts_to_fallback is not None
    assert 20 * 3 <= done.drafts_to_fallback <= 20 * 20
    assert 0 < done.timeline.seconds_to_fallback < 2
    assert 0 < done.timeline.seconds_to_recovery < 2
    assert done.traffic.failures == []
    # It kept to its concurrency and cancelled nothing.
    assert gateway.largest_concurrency == 2
    assert gateway.unfinished == 0
    assert done.traffic.requests > 20


async def test_cancelled_drill_stops_sending(gateway, settings):
    gateway.recovers = False
    task = asyncio.create_task(drill(gateway, settings))
    await until(lambda: bool(gateway.changes))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.02)
    assert gateway.running == 0


@pytest.mark.parametrize(
    ("missing", "stage"),
    [
        ("warms_up", "warm"),
        ("falls_back", "fallback"),
        ("recovers", "recovered"),
    ],
)
async def test_drill_names_the_first_missing_stage_and_stops_by_itself(gateway, settings, missing, stage):
    setattr(gateway, missing, False)
    limits = {"warm_seconds": 0.3, "collapse_seconds": 0.3, "total_seconds": 1.5}
    began = time.monotonic()
    assert await judged(gateway, settings, **limits) == (f"the stage {stage} was not reached",)
    assert time.monotonic() - began < 4


async def test_no_noise_is_sent_before_a_worker_speculates(gateway, settings):
    gateway.warms_up = False
    await drill(gateway, settings, warm_seconds=0.1)
    assert gateway.noisy == 0


async def test_worker_that_speculates_again_during_the_noise_has_not_recovered(gateway, settings):
    gateway.recovers_in_noise, gateway.recovers = True, False
    problems = await judged(gateway, settings, collapse_seconds=0.3, total_seconds=1.0)
    assert problems == ("the stage recovered was not reached",)


async def test_drill_fails_when_a_request_fails(gateway, settings):
    gateway.status = 503
    problems = await judged(gateway, settings, collapse_seconds=0.3)
    assert problems[0] == "the stage fallback was not reached"
    assert re.fullmatch(r"\d requests failed, the first with: 503 no_worker_available", problems[1])


async def test_drill_fails_when_the_audit_log_lacks_a_change(gateway, settings):
    gateway.unrecorded.add("recovered")
    (problem,) = await judged(gateway, settings)
    assert "(recovered)" in problem


async def test_drill_fails_without_the_audit_log(gateway, settings, tmp_path):
    done, _ = await drill(gateway, settings)
    elsewhere = load_settings(environment={}, overrides={"data": {"directory": str(tmp_path / "else")}})
    (problem,) = judge(elsewhere, done)
    assert problem.startswith("the audit log was not checked: there is no audit log in")
    done.start = replace(done.start, audit_size=10**6)
    (problem,) = judge(settings, done)
    assert "give its directory with --data" in problem


async def test_drill_does_not_start_where_it_could_prove_nothing(gateway, settings):
    async with open_admin(settings, gateway.url) as admin:
        with pytest.raises(ConfigurationError, match="no healthy worker serves other"):
            await prepare(admin, "other")
        gateway.override = {"mode": "target_only"}
        with pytest.raises(ConfigurationError, match="appliance speculation auto"):
            await prepare(admin, None)
        gateway.override, gateway.controllable = None, False
        with pytest.raises(ConfigurationError, match="no plugin"):
            await prepare(admin, "demo")


async def test_a_refused_key_ends_the_drill_at_once(gateway, settings):
    with pytest.raises(ConfigurationError, match=r"403 permission_denied.*tenant's key with --key-file"):
        await drill(gateway, settings, key="sk-admin", warm_seconds=60.0)


async def command(gateway: FakeGateway, tmp_path: Path, *words: str) -> Result:
    """Run the command in a thread; the gateway answers in this loop."""
    arguments = ["speculation", "drill", "--url", gateway.url, "--data", str(tmp_path), *words]
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


async def test_command_prints_a_line_per_stage_and_exits_with_the_verdict(gateway, settings, tmp_path):
    (tmp_path / "tenant.key").write_text(f"{KEY}\n")
    result = await command(gateway, tmp_path, "--key-file", str(tmp_path / "tenant.key"))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"drill of demo at {gateway.url}, 2 requests at a time"
    assert [line.split()[2] for line in lines[1:4]] == [str(stage) for stage in DrillStage]
    assert "w1 is target_only (collapsed), acceptance length 1.07" in lines[2]
    assert lines[-1] == "verdict: passed"


async def test_command_prints_one_json_object(gateway, settings, tmp_path):
    gateway.unrecorded.add("recovered")
    result = await command(gateway, tmp_path, "--key", KEY, "--json", "--concurrency", "1")
    shown = json.loads(result.output)
    assert result.exit_code == 1
    assert (shown["verdict"], shown["worker"], shown["failures"]) == ("failed", "w1", [])
    assert all(shown["stages"].values())
    assert shown["changes"][0]["reason"] == "collapsed"
    assert len(shown["problems"]) == 1


async def test_repeated_drills_report_each_and_fail_if_one_failed(gateway, settings, tmp_path, monkeypatch):
    words = ("--key", KEY, "--repeat", "2")
    result = await command(gateway, tmp_path, *words)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line for line in lines if line.startswith("drill ")][::2] == ["drill 1 of 2", "drill 2 of 2"]
    assert lines.count("verdict: passed") == 3  # two drills, and both together
    assert lines[-4] == "2 of 2 drills passed"
    assert re.fullmatch(r"fallback: median \d\.\d s, \d\.\d to \d\.\d s", lines[-3])

    judged = iter([("the log is wrong",), ()])
    monkeypatch.setattr(drill_command, "judge", lambda _settings, _done: next(judged))
    result = await command(gateway, tmp_path, *words, "--json")
    shown = json.loads(result.output)
    assert result.exit_code == 1
    assert [drill["verdict"] for drill in shown["drills"]] == ["failed", "passed"]
    assert (shown["failed"], shown["verdict"]) == ([1], "failed")


async def test_an_error_between_repeated_drills_fails_one_drill_only(
    gateway, settings, tmp_path, monkeypatch
):
    fails = iter([False, True, False])

    async def sometimes(admin, model):
        if next(fails):
            raise ConfigurationError("no healthy worker serves demo")
        return await prepare(admin, model)

    monkeypatch.setattr(drill_command, "prepare", sometimes)
    result = await command(gateway, tmp_path, "--key", KEY, "--repeat", "3")
    assert result.exit_code == 1
    assert "verdict: failed: no healthy worker serves demo" in result.output
    assert result.output.splitlines()[-4] == "2 of 3 drills passed"
    assert result.output.splitlines()[-1] == "verdict: failed: drills 2"


async def test_invalid_arguments_send_nothing(gateway, settings, tmp_path):
    for words, what in (
        ([], "tenant's key"),
        (["--key", KEY, "--key-file", "x"], "tenant's key"),
        (["--key-file", "/nowhere/key"], "cannot read the key"),
        (["--key", KEY, "--collapse-for", "1h"], "10s to 180s"),
        (["--key", KEY, "--collapse-for", "9s"], "10s to 180s"),
        (["--key", KEY, "--prompts", "/nowhere/prompts"], "cannot read the prompts"),
    ):
        result = await command(gateway, tmp_path, *words)
        assert isinstance(result.exception, ConfigurationError), words
        assert what in str(result.exception)
    assert gateway.good == 0


# The timeline, from changes alone.


def change(sequence: int, mode: str, reason: str, *, worker: str = "w1", previous: str = "speculative"):
    return ModeChange(
        sequence=sequence,
        time=100.0 + sequence,
        worker=worker,
        mode=mode,
        previous_mode=previous,
        reason=reason,
        acceptance_length=1.5,
    )


FALLBACK = change(5, "target_only", "collapsed")
OTHER = change(7, "target_only", "below_break_even", previous="target_only")
RECOVERED = change(12, "speculative", "recovered", previous="target_only")
TIMES = Timeline(began=100.0, warm=102.0, noise=102.5, back=110.0)


def test_stages_are_found_among_other_changes():
    others = [
        change(1, "target_only", "collapsed"),  # before the noise
        change(4, "target_only", "operator_override"),
        FALLBACK,
        change(6, "target_only", "collapsed", worker="w2"),
        OTHER,
        change(11, "speculative", "recovered", worker="w2", previous="target_only"),
        RECOVERED,
    ]
    found = find_stages(others, TIMES)
    assert (found.fallback, found.recovered) == (FALLBACK, RECOVERED)
    assert found.missing == ()
    assert (found.seconds_to_fallback, found.seconds_to_recovery) == (2.5, 2.0)


@pytest.mark.parametrize(
    ("changes", "times", "missing"),
    [
        (
            [],
            Timeline(began=100.0),
            (DrillStage.WARM, DrillStage.FALLBACK, DrillStage.RECOVERED),
        ),
        (
            [FALLBACK],
            Timeline(began=100.0, warm=102.0),
            (DrillStage.FALLBACK, DrillStage.RECOVERED),
        ),
        ([OTHER], TIMES, (DrillStage.FALLBACK, DrillStage.RECOVERED)),
        ([OTHER, RECOVERED], TIMES, (DrillStage.FALLBACK, DrillStage.RECOVERED)),
        ([FALLBACK, OTHER], TIMES, (DrillStage.RECOVERED,)),
        ([FALLBACK, RECOVERED], replace(TIMES, back=113.0), (DrillStage.RECOVERED,)),
        ([FALLBACK, RECOVERED], replace(TIMES, back=None), (DrillStage.RECOVERED,)),
        ([replace(FALLBACK, previous_mode="target_only"), OTHER], TIMES, (*DrillStage,)[1:]),
    ],
)
def test_stage_without_a_change_is_missing(changes, times, missing):
    assert find_stages(changes, times).missing == missing


def test_changes_are_parsed_from_the_admin_api():
    row = {
        "sequence": 3, "time": "2027-01-15T08:00:00.250+00:00", "worker": "w1", "model": "demo",
        "mode": "target_only", "previous_mode": "speculative", "reason": "collapsed",
        "table": ["1-64: 0"], "acceptance_length": None, "drafts": 32, "avoided": False,
    }  # fmt: skip
    (read,) = parse_changes([row])
    assert (read.time, read.table, read.acceptance_length) == (1_800_000_000.25, ("1-64: 0",), None)


entries_of = st.lists(
    st.tuples(st.sampled_from(["w1", "w2"]), st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]))
)


@given(entries_of, st.data())
def test_changes_with_entries_in_order_are_recorded(entries, data):
    kept = [entry for entry in entries if data.draw(st.booleans())]
    changes = [change(number, mode, reason, worker=who) for number, (who, mode, reason) in enumerate(kept)]
    assert unrecorded(changes, entries) == []


@given(entries_of, entries_of)
def test_more_changes_than_entries_leave_some_unrecorded(entries, more):
    rows = [*entries, *more, ("w1", "a", "x")]
    changes = [change(number, mode, reason, worker=who) for number, (who, mode, reason) in enumerate(rows)]
    assert len(unrecorded(changes, entries)) >= len(rows) - len(entries)


def test_entry_out_of_order_or_with_another_reason_does_not_count():
    keys = [(each.worker, each.mode, each.reason) for each in (FALLBACK, OTHER)]
    assert unrecorded([FALLBACK, OTHER], keys) == []
    assert unrecorded([FALLBACK, OTHER], keys[::-1]) == [OTHER]
    assert unrecorded([FALLBACK], [("w1", "target_only", "below_break_even")]) == [FALLBACK]


def test_problems_name_everything_that_was_wrong():
    whole = find_stages([FALLBACK, OTHER, RECOVERED], TIMES)
    assert problems_of(whole, []) == ()
    worst = problems_of(Timeline(began=0.0), ["503 x", "y"], (FALLBACK,))
    assert len(worst) == 3
    assert problems_of(whole, [], unread="no log") != ()


def test_line_shows_time_stage_and_duration():
    found = find_stages([FALLBACK, OTHER, RECOVERED], TIMES)
    assert describe(DrillStage.WARM, found).startswith("    2.0 s  warm")
    assert describe(DrillStage.FALLBACK, found) == (
        "    5.0 s  fallback      w1 is target_only (collapsed), acceptance length 1.50, "
        "2.5 s after the noise began"
    )
    assert describe(DrillStage.RECOVERED, found).endswith("2.0 s after the noise ended")


async def test_summary_of_a_failed_drill_has_its_reasons(gateway, settings):
    gateway.falls_back = False
    done, _ = await drill(gateway, settings, collapse_seconds=0.1)
    problems = await asyncio.to_thread(judge, settings, done)
    assert summary(done, problems).endswith("verdict: failed: the stage fallback was not reached")
    assert report(done, problems)["stages"] == {
        "warm": True,
        "fallback": False,
        "recovered": False,
    }


# What it sends.


def test_default_prompts_are_pieces_of_source_code():
    prompts = code_prompts()
    assert len(prompts) > 200
    assert len(set(prompts)) == len(prompts)
    assert all(PIECE_CHARACTERS <= len(prompt) < 2 * PIECE_CHARACTERS for prompt in prompts)
    assert sum("def " in prompt for prompt in prompts) > 100


@given(st.lists(st.text("ab \n", max_size=300)))
def test_text_is_cut_between_lines_and_only_its_end_is_dropped(parts):
    text = "\n".join(parts)
    pieces = tuple(cut(text))
    assert text.startswith("".join(pieces))
    assert all(len(piece) >= PIECE_CHARACTERS for piece in pieces)


def test_noise_never_repeats():
    assert NOISE.fullmatch(noise())
    assert noise() != noise()


def test_prompt_files_hold_lines_or_json_strings(tmp_path: Path):
    file = tmp_path / "prompts"
    file.write_text('plain\n\n"two\\nlines"\n"not json\n  \n[1]\n', encoding="utf-8")
    assert file_prompts(file) == ("plain", "two\nlines", '"not json', "[1]")
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match="has no prompts"):
        file_prompts(file)


def test_prompts_are_sent_in_turn():
    give = in_turn(["a", "b"])
    assert [give() for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_noise_time_is_bounded():
    assert (collapse_seconds("10s"), collapse_seconds("3m")) == (10, 180)
