"""A real vLLM worker on the CPU: started, watched, killed in every way, and never orphaned."""

import asyncio
import json
import os
import shutil
import signal
import ssl
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from appliance.app.worker_process import PLUGIN
from appliance.errors import WorkerStartError
from appliance.infra.settings import PoolSettings, WorkerSettings
from appliance.serving.client import WorkerClient
from appliance.serving.devices import choose_device, detect_hardware
from appliance.serving.launch import LaunchPlan, plan_launch
from appliance.serving.plugin_client import SpeculationClient, parse_reading
from appliance.serving.supervise import Supervisor, WorkerEvent, WorkerEventKind, free_port
from appliance.serving.weights import Weights, inspect_weights
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_metrics import parse_metrics
from appliance.serving.worker_protocol import LEAVING, SPECULATION_PATH
from appliance.serving.worker_tls import WorkerTls
from appliance.sovereignty.environment import offline_environment
from tests.certificates import LOOPBACK, Authority

pytestmark = [pytest.mark.worker, pytest.mark.asyncio(loop_scope="module")]
PATIENCE_SECONDS = 600
DRAIN_SECONDS = 300
TOKEN, SCRAPE = "the-token-of-its-gateway", "the-token-of-prometheus"
AUTHORITY = Authority("the site")
NO_TOKEN = Path("/dev/null")
"""For workers that fail before they read it."""


def plan_for(
    target: Weights,
    draft: Weights | None,
    *,
    port: int | None = None,
    token_file: Path = NO_TOKEN,
    **settings: Path,
) -> LaunchPlan:
    method = "eagle3" if draft else "none"
    return plan_launch(
        WorkerSettings(
            method=method,
            device="cpu",
            served_name="demo",
            max_num_seqs=8,
            drain_seconds=DRAIN_SECONDS,
            **settings,
        ),
        python=sys.executable,
        port=port or free_port("127.0.0.1"),
        device=choose_device("cpu", detect_hardware()),
        target=target,
        draft=draft,
        environment=offline_environment(
            {name: os.environ[name] for name in ("PATH", "HOME")}, plugins=[PLUGIN]
        ),
        control_token_file=token_file,
    )


def processes_of_session(session: int) -> dict[int, str]:
    """Command lines of all living processes of a session, by process id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                )
    return found


def environment_of(process: int) -> set[str]:
    return set(Path(f"/proc/{process}/environ").read_text().split("\0"))


@dataclass
class Running:
    """A supervised worker, and the output of its supervisor."""

    plan: LaunchPlan
    supervisor: Supervisor
    events: list[WorkerEvent]
    task: asyncio.Task[None] = field(init=False)

    @property
    def session(self) -> int:
        return self.supervisor._process.pid

    def process(self, name: str) -> int:
        """A process of the worker, not its guardian: that leads the session, and names the same command."""
        (found,) = (
            pid
            for pid, line in processes_of_session(self.session).items()
            if name in line and pid != self.session
        )
        return found

    async def is_healthy_again(self, after: int) -> list[WorkerEventKind]:
        """Events until the worker is healthy, from index `after` on."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.events[-1].kind is not WorkerEventKind.HEALTHY or len(self.events) == after:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return [event.kind for event in self.events[after:]]

    async def ask(
        self,
        path: str,
        body: dict | None = None,
        *,
        token: str = TOKEN,
        certificate: bool = True,
        url: str = "",
    ) -> tuple[int, str]:
        """Ask as a gateway of the site does, or as one without its token or certificate."""
        tls = ssl.create_default_context(cadata=AUTHORITY.pem)
        if certificate:
            tls.load_cert_chain(*self.plan.certificate)
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http,
            http.request(
                "POST" if body else "GET", (url or self.plan.url) + path, json=body, ssl=tls
            ) as response,
        ):
            return response.status, await response.text()

    async def stream(self, began: asyncio.Event) -> tuple[str, float]:
        """A long stream, read to its end; its last frame, and when that came by the loop's clock."""
        tls = ssl.create_default_context(cadata=AUTHORITY.pem)
        tls.load_cert_chain(*self.plan.certificate)
        body = {"model": "demo", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
            http.post(self.plan.url + "/v1/completions", json=body, ssl=tls) as response,
        ):
            await response.content.readline()
            began.set()
            text = await response.text()
            return text.strip().rpartition("\n")[2], asyncio.get_running_loop().time()

    async def complete(self) -> dict:
        body = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
        status, text = await self.ask("/v1/completions", body)
        assert status == 200, text
        return json.loads(text)


def supervise(plan: LaunchPlan, directory: Path, *, max_restarts: int) -> Running:
    events: list[WorkerEvent] = []
    supervisor = Supervisor(
        plan, worker="w1", log_directory=directory, max_restarts=max_restarts, observe=events.append
    )
    return Running(plan=plan, supervisor=supervisor, events=events)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(demo_models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("worker")
    draft = shutil.copytree(demo_models.draft, directory / "draft")
    record = json.loads((draft / "training.json").read_text())
    record["expected"] = {"all": {"acceptance_length": 3.0, "draft_tokens": 6}}
    (draft / "training.json").write_text(json.dumps(record))
    token_file = directory / "control.token"
    token_file.write_text(TOKEN)
    (directory / "scrape.token").write_text(SCRAPE)
    (directory / "site.pem").write_text(AUTHORITY.pem)
    files = AUTHORITY.issue(directory, "worker", *LOOPBACK)
    plan = plan_for(
        inspect_weights(demo_models.target),
        inspect_weights(draft),
        token_file=token_file,
        scrape_token_file=directory / "scrape.token",
        tls_certificate_file=files.certificate,
        tls_key_file=files.key,
        tls_client_ca_file=directory / "site.pem",
    )
    running = supervise(plan, directory / "logs", max_restarts=1)
    running.task = asyncio.create_task(running.supervisor.run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await running.supervisor.healthy()
    yield running
    await running.supervisor.stop()
    await running.task


async def test_answers_with_drafts_and_says_how_many_were_accepted(running):
    """A worker started from the plan serves, speculates, and reports it per request and in its metrics."""
    answer = await running.complete()
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    _, page = await running.ask("/metrics")
    metrics = parse_metrics(page)
    assert metrics.generation_tokens_total >= 8
    assert metrics.speculation.drafts > 0


async def test_only_a_caller_with_the_token_reaches_a_route_of_vllm(running):
    """Health is open, and the metrics also to Prometheus, whose token opens nothing else."""
    open_to = {"/health": (200, 200), "/metrics": (401, 200)}
    for path in (
        "/health",
        "/metrics",
        "/v1/models",
        "/version",
        "/openapi.json",
        "/tokenize",
        SPECULATION_PATH,
    ):
        asked = [(await running.ask(path, token=token))[0] for token in ("wrong", SCRAPE)]
        assert tuple(asked) == open_to.get(path, (401, 401)), path
    body = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 8}
    assert await running.ask("/v1/completions", body, token=SCRAPE) == (401, '{"error": "unauthorized"}')
    assert "without a valid token" in running.supervisor.log.read_text()


async def test_only_a_client_with_a_certificate_of_the_site_connects(running):
    with pytest.raises(aiohttp.ClientError):
        await running.ask("/health", certificate=False)


async def test_a_gateway_speaks_tls_to_a_real_worker(running):
    """With the files of its settings: models, metrics, a canary request and the plugin."""
    certificate, key = running.plan.certificate
    pool = PoolSettings(ca_file=certificate.with_name("site.pem"), certificate_file=certificate, key_file=key)
    worker, tls = Worker(worker_id=WorkerId("w1"), url=running.plan.url), WorkerTls(pool)
    async with (
        WorkerClient.open(token=TOKEN, tls=tls, connect_seconds=5.0) as client,
        SpeculationClient.open(token=TOKEN, tls=tls) as speculation,
    ):
        assert [model.name for model in await client.models(worker, 30.0)] == ["demo"]
        assert await client.canary(worker, "demo", 60.0) == 8
        assert (await speculation.read(worker, 30.0)).controllable


async def test_writes_no_prompt_to_its_log(running):
    await running.complete()
    assert "def add" not in running.supervisor.log.read_text()


async def test_worker_environment_has_no_egress(running):
    """The process that serves is offline in the kernel's own record of its environment."""
    # Its children overwrite theirs with the title they show in `ps`.
    variables = environment_of(running.process("vllm.server --model"))
    assert {
        "HF_HUB_OFFLINE=1",
        "VLLM_NO_USAGE_STATS=1",
        "DO_NOT_TRACK=1",
        f"VLLM_PLUGINS={PLUGIN}",
    } <= variables
    assert not any("proxy" in variable.lower() for variable in variables)


async def test_a_real_engine_repeats_what_the_record_of_its_draft_says(running):
    """It was measured with six draft tokens, and this worker has three: half of the promise is left."""
    control = f"https://127.0.0.1:{running.plan.control_port}"
    for token in (SCRAPE, "wrong"):
        assert (await running.ask(SPECULATION_PATH, token=token, url=control))[0] == 401
    with pytest.raises(aiohttp.ClientError):
        await running.ask(SPECULATION_PATH, url=control, certificate=False)
    reading = parse_reading(*await running.ask(SPECULATION_PATH, url=control))
    assert reading.controllable, reading.problems
    assert max(reading.choices) == 3
    assert reading.expected_length == 2.0


async def test_is_started_again_when_its_engine_is_killed(running):
    """The end of the engine process is detected, although the API server still listens."""
    before, session = len(running.events), running.session
    os.kill(running.process("VLLM::EngineCore"), signal.SIGKILL)
    kinds = await running.is_healthy_again(before)
    assert kinds == ["died", "restarting", "starting", "healthy"]
    assert "EngineCore" in running.events[before].detail
    assert processes_of_session(session) == {}
    await running.complete()


async def test_stops_after_its_last_stream_and_leaves_no_process(running):
    """From SIGTERM on it refuses others, as gateways understand it; its end is no failure."""
    session, before, began = running.session, len(running.events), asyncio.Event()
    stream = asyncio.create_task(running.stream(began))
    await began.wait()
    stopped = asyncio.create_task(running.supervisor.stop())
    status, refused = 200, ""
    while status == 200:
        status, refused = await running.ask("/v1/completions", {"model": "demo", "prompt": "x"})
    assert (status, json.loads(refused)) == (503, LEAVING)
    assert not stream.done(), "the stream was too short for this test"
    last, ended = await stream
    assert last == "data: [DONE]"
    await stopped
    assert asyncio.get_running_loop().time() - ended < DRAIN_SECONDS, "it waited for nothing"
    assert processes_of_session(session) == {}
    assert [event.kind for event in running.events[before:]] == ["stopped"]


async def _fails_with(plan: LaunchPlan, directory: Path) -> str:
    running = supervise(plan, directory, max_restarts=0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises(WorkerStartError) as failure:
            await running.supervisor.run()
    assert running.events[-1].kind is WorkerEventKind.GAVE_UP
    assert "\n" not in str(failure.value)
    return str(failure.value)


async def test_says_in_one_line_that_the_model_does_not_exist(demo_models, tmp_path):
    """vLLM's error about weights that vanished after our check reaches the operator."""
    target = replace(inspect_weights(demo_models.target), path=tmp_path / "gone")
    assert "/gone'" in await _fails_with(plan_for(target, None), tmp_path)


async def test_says_in_one_line_that_the_draft_does_not_fit(demo_models, tmp_path):
    """The root of three nested tracebacks is reported, not the last of them."""
    for file in demo_models.draft.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": config["hidden_size"] // 2}))
    plan = plan_for(inspect_weights(demo_models.target), inspect_weights(tmp_path))
    assert "Tried to load weights of size" in await _fails_with(plan, tmp_path)


async def test_says_in_one_line_that_the_port_is_taken(demo_models, tmp_path):
    """Another server on the port is never mistaken for the worker."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        plan = plan_for(inspect_weights(demo_models.target), None, port=port)
        assert f"port {port} on 127.0.0.1 is in use" in await _fails_with(plan, tmp_path)
