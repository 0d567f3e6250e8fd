"""The paired benchmark and that of reactions, from the start to the file, on an engine that only sleeps."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from appliance.infra.settings import MonitorSettings
from appliance.serving.vllm.scheduler_control import SchedulerControl
from appliance.serving.worker_protocol import SPECULATION_PATH
from benchmarks.speculation import __main__ as paired
from benchmarks.speculation import bench, reaction
from benchmarks.speculation.paired import parse_round
from benchmarks.speculation.plan import Cell, Kind
from benchmarks.speculation.records import Records
from demo.training.corpus import Corpus
from tests.fake_engine import FakeScheduler
from tests.fakes import serving_pair

STEP_SECONDS = 0.003
CODE, NOISE = (Cell(kind=kind, concurrency=2) for kind in (Kind.CODE, Kind.BASE64))


class Engine:
    """Gateway and worker in one; drafts of code are accepted, others are not, and each draft token costs."""

    def __init__(self) -> None:
        self.scheduler = FakeScheduler((0, *[3] * 8, *[1] * 8, *[0] * 8))
        self.control = SchedulerControl(self.scheduler, time.perf_counter)
        self.answers: dict[str, asyncio.Queue[int]] = {}
        self.code: dict[str, bool] = {}
        self.numbers = count()
        self.largest = 0

    async def decode(self) -> None:
        while True:
            if not self.answers:
                await asyncio.sleep(STEP_SECONDS)
                continue
            names = list(self.answers)
            self.largest = max(self.largest, len(names))
            step = self.scheduler.schedule()
            await asyncio.sleep(STEP_SECONDS * (1 + 0.3 * step.num_spec_tokens_to_schedule))
            is_code = sum(self.code.get(name, False) for name in names) > len(names) / 2
            for outputs in self.scheduler.update_from_output(step, 3 if is_code else 0).values():
                for name, item in zip(step.num_scheduled_tokens, outputs.outputs, strict=True):
                    if name in self.answers:
                        self.answers[name].put_nowait(len(item.new_token_ids))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body, name = await request.json(), str(next(self.numbers))
        self.code[name], self.answers[name] = "def f" in body["prompt"], asyncio.Queue()
        self.scheduler.add(name)
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            tokens = 0
            while tokens < body["max_tokens"]:
                tokens = min(body["max_tokens"], tokens + await self.answers[name].get())
                frame = {"choices": [{"text": "x"}], "usage": {"completion_tokens": tokens}}
                await response.write(f"data: {json.dumps(frame)}\n\n".encode())
        finally:
            del self.answers[name], self.code[name]
            self.scheduler.finish(name)
        return response

    async def speculation(self, request: web.Request) -> web.Response:
        text = await request.text() or "{}"
        return web.json_response(text=self.control.command(text, "fake"))

    def app(self, own: dict[str, str]) -> web.Application:
        async def status(_request: web.Request) -> web.Response:
            return web.json_response({"workers": [{"worker": "w", "url": own["url"], "engine": "fake 1"}]})

        async def models(_request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "m", "max_model_len": 2048}]})

        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/admin/v1/status", status)
        return app

    def control_app(self) -> web.Application:
        control = web.Application()
        control.router.add_get(SPECULATION_PATH, self.speculation)
        control.router.add_put(SPECULATION_PATH, self.speculation)
        return control


@pytest.fixture
async def appliance(tmp_path: Path, monkeypatch) -> AsyncIterator[SimpleNamespace]:
    monkeypatch.setattr(bench, "SETTLE_SECONDS", 0.03)
    settings = SimpleNamespace(monitor=MonitorSettings(interval_seconds=0.1))
    monkeypatch.setattr(bench, "load_settings", lambda **_named: settings)
    code = "".join(f"def f{number}():\n    return {number}\n" for number in range(3000))
    monkeypatch.setattr(bench, "load_corpus", lambda: Corpus(training=[], held_out=[code], dialogues=[]))
    for name in ("admin.key", "control.token"):
        (tmp_path / name).write_text("secret")
    engine, own = Engine(), {}
    async with serving_pair(engine.app(own), engine.control_app()) as own["url"]:
        decoding = asyncio.create_task(engine.decode())
        yield SimpleNamespace(url=own["url"], admin_url=own["url"], key="k", data=tmp_path, engine=engine)
        decoding.cancel()


async def test_pairs_are_measured_kept_and_resumed(appliance, tmp_path: Path, capsys):
    words = ["--kinds", "code", "base64", "--concurrency", "3", "--learn", "0.3", "--seconds", "0.2"]
    records = Records(tmp_path / "rounds", {}, parse_round)
    records.load()
    await paired.measure(appliance, paired.parse([*words, "--pairs", "2"]), records, "abc1234")
    code, noise = ([each for each in records.rows if each.cell.kind == kind] for kind in ("code", "base64"))
    assert len(code) == len(noise) == 2
    assert appliance.engine.largest >= 3
    # Speeds are the machine's; which drafts were made and accepted is the engine's.
    segments = [segment for each in records.rows for segment in each.segments]
    assert {segment.mode for segment in segments} == {"adaptive", "K=0", "K=1", "K=3"}
    assert {segment.draft_tokens for segment in segments if segment.mode == "K=3"} <= {0, 3}
    assert not any(segment.drafts for segment in segments if segment.mode == "K=0")
    assert sum(segment.accepted_tokens for each in code for segment in each.segments) > 0
    assert sum(segment.tokens for segment in segments) > 0
    await paired.measure(appliance, paired.parse([*words, "--pairs", "3"]), records, "abc1234")
    assert len(records.rows) == 6
    assert len({each.sitting for each in records.rows}) <= 2
    before = len(records.rows)
    await paired.measure(appliance, paired.parse([*words, "--pairs", "9", "--minutes", "0"]), records, "abc")
    assert len(records.rows) == before
    assert "code c=3: pair 1 of 2" in capsys.readouterr().out


async def test_reactions_are_followed_from_the_change_to_the_right_table(appliance, tmp_path, monkeypatch):
    monkeypatch.setattr(reaction, "SETTLED_SECONDS", 0.5)
    monkeypatch.setattr(reaction, "courses", lambda _concurrency: [(CODE, NOISE, CODE)])
    options = reaction.parse(
        ["--repeats", "1", "--limit", "2", "--rounds", "2", "--learn", "0.3", "--seconds", "0.1"]
    )
    records = Records(tmp_path / "changes", {}, reaction.parse_change)
    records.load()
    await reaction.measure(appliance, options, records, "abc1234")
    assert [(each.before, each.after) for each in records.rows] == [(CODE, NOISE), (NOISE, CODE)]
    for each in records.rows:
        assert each.trace[0][0] == 0
        assert each.trace[-1][0] > 0.3
        assert all(earlier[0] <= later[0] for earlier, later in zip(each.trace, each.trace[1:], strict=False))
        assert each.lost >= 0
        assert each.speeds.keys() == {0, 1, 3}
