"""Canary requests, and restarts of a worker in another process."""

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from appliance.errors import ControlRefusedError, WorkerFailedError
from appliance.infra.settings import PoolSettings
from appliance.serving.client import WorkerClient
from appliance.serving.launch import LaunchPlan
from appliance.serving.plans import WorkerPlans
from appliance.serving.restart import RestartClient
from appliance.serving.restart_request import WITH_DRAFT, CandidateDraft, RestartRequest
from appliance.serving.vllm.listener import ControlledEngine, ControlListener
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_protocol import RESTART_FILE, RESTART_PATH, TOKEN_FILE
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import Reason
from tests.fakes import MODEL, FakeWorker
from tests.recorder import RECORDED_AT

pytestmark = pytest.mark.usefixtures("loopback")
NOWHERE = Worker(worker_id=WorkerId("w1"), url="http://127.0.0.1:9")


async def canary(fake: FakeWorker, seconds: float = 5.0) -> int:
    worker = Worker(worker_id=WorkerId("w1"), url=fake.url)
    async with WorkerClient.open(
        token="secret", tls=WorkerTls(PoolSettings()), connect_seconds=1.0
    ) as client:
        return await client.canary(worker, MODEL, seconds)


async def test_a_canary_is_a_small_greedy_completion():
    """Independent of sampler and chat template, and long enough to verify a draft."""
    async with FakeWorker().serving() as fake:
        assert await canary(fake) == 10
    (body,) = fake.bodies
    asked = json.loads(body)
    assert fake.paths == ["/v1/completions"]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == (MODEL, 0, 8)
    assert "stream" not in asked


@pytest.mark.parametrize(
    ("lacks", "recorded", "tokens"),
    [
        (("/v1/completions",), "embeddings.json", 8),
        (("/v1/completions", "/v1/embeddings"), "score.json", 17),
    ],
)
async def test_canary_uses_the_task_of_the_worker(lacks, recorded, tokens):
    """A worker lacks the routes of other tasks; without completion tokens the prompt's are counted."""
    answer = json.loads((RECORDED_AT / recorded).read_text(encoding="utf-8"))["body"]
    async with FakeWorker(lacks=lacks, answer=answer.encode()).serving() as fake:
        assert await canary(fake) == tokens
    assert fake.paths == [*lacks, "/v1/embeddings" if len(lacks) == 1 else "/score"]


@pytest.mark.parametrize(
    "fields",
    [
        {"status": 500},
        {"status": 404},
        {"answer": b"not JSON"},
        {"answer": b"{}"},
        {"answer": b'{"choices": [], "usage": {"completion_tokens": 0}}'},
        {"breaks_before_answer": True},
        {"breaks_after": 0},
    ],
    ids=str,
)
async def test_a_canary_that_is_not_answered_with_tokens_has_failed(fields):
    """Refused, malformed, empty, or broken off: such a worker must not serve."""
    async with FakeWorker(**fields).serving() as fake:
        with pytest.raises(WorkerFailedError):
            await canary(fake)


async def test_canary_times_out():
    async with FakeWorker(head_seconds=30.0).serving() as fake:
        with pytest.raises(WorkerFailedError, match="TimeoutError"):
            await canary(fake, seconds=0.05)


@asynccontextmanager
async def plugin(status: int):
    """A fake plugin: answers every restart with one status, and records the requests."""
    asked = []

    async def restart(request: web.Request) -> web.Response:
        asked.append((request.headers["Authorization"], await request.json()))
        return web.json_response({}, status=status)

    app = web.Application()
    app.router.add_post(RESTART_PATH, restart)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield Worker(worker_id=WorkerId("w1"), url=f"http://{host}:1", control_port=port), asked
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("with_draft", [True, False])
async def test_restart_sends_the_token(with_draft):
    """The plugin confirms the request before the worker ends."""
    async with (
        plugin(202) as (worker, asked),
        RestartClient.open(token="secret", tls=WorkerTls(PoolSettings())) as client,
    ):
        await client.restart(worker, request=RestartRequest(with_draft=with_draft), reason=Reason.COLLAPSED)
    assert asked == [("Bearer secret", {"with_draft": with_draft})]


async def test_restart_names_the_draft_under_test():
    """With its promotion; a plugin of an earlier version ignores both."""
    tried = CandidateDraft(draft=f"sha256:{'a' * 64}", promotion="01J")
    async with (
        plugin(202) as (worker, asked),
        RestartClient.open(token="secret", tls=WorkerTls(PoolSettings())) as client,
    ):
        request = RestartRequest(with_draft=True, candidate=tried)
        await client.restart(worker, request=request, reason=Reason.OPERATOR_OVERRIDE)
    body = {"with_draft": True, "draft": tried.draft, "promotion": "01J"}
    assert asked == [("Bearer secret", body)]


@pytest.mark.parametrize(
    ("status", "why"),
    [(404, "without the plugin"), (401, "does not accept this control token"), (409, "it has no supervisor")],
)
async def test_refused_restart_gives_the_reason(status, why):
    """It keeps running, which is not a failure of the worker."""
    async with (
        plugin(status) as (worker, _),
        RestartClient.open(token="secret", tls=WorkerTls(PoolSettings())) as client,
    ):
        with pytest.raises(ControlRefusedError, match=f"worker w1 cannot be restarted from here: .*{why}"):
            await client.restart(worker, request=WITH_DRAFT, reason=Reason.COLLAPSED)


@pytest.mark.parametrize("status", [200, 307, 400, 500])
async def test_any_other_answer_is_a_failure(status):
    """Only 202 means that it will restart."""
    async with (
        plugin(status) as (worker, _),
        RestartClient.open(token="secret", tls=WorkerTls(PoolSettings())) as client,
    ):
        with pytest.raises(WorkerFailedError, match=str(status)):
            await client.restart(worker, request=WITH_DRAFT, reason=Reason.COLLAPSED)


async def test_unreachable_worker_is_a_failure():
    async with RestartClient.open(token="secret", tls=WorkerTls(PoolSettings())) as client:
        with pytest.raises(WorkerFailedError, match="could not be reached"):
            await client.restart(NOWHERE, request=WITH_DRAFT, reason=Reason.COLLAPSED)


def plan(name: str) -> LaunchPlan:
    return LaunchPlan(
        argv=(name,),
        environment={},
        url="http://127.0.0.1:9",
        host="127.0.0.1",
        port=9,
        control_port=10,
        model=MODEL,
        drain_seconds=1,
        max_startup_seconds=10,
    )


@pytest.mark.parametrize(("with_draft", "expected"), [(True, "with"), (False, "without")])
def test_plugin_and_supervisor_exchange_the_restart_request(tmp_path, with_draft, expected):
    """They run in two processes, and share only the file."""
    (tmp_path / "token").write_text("secret\n")
    environment = {TOKEN_FILE: str(tmp_path / "token"), RESTART_FILE: str(tmp_path / "request")}
    engine = ControlledEngine(command=str, gpus=None, server=1)
    listener = ControlListener(engine, environment)
    assert listener.answer("POST", RESTART_PATH, json.dumps({"with_draft": with_draft}))[0] == 202
    plans = WorkerPlans(plan("with"), target_only=plan("without"), restart_file=tmp_path / "request")
    assert plans.accept_request()
    assert plans.current.argv == (expected,)
    assert not plans.accept_request()
