"""The endpoint picker behind a real Envoy, in front of scripted workers."""

import asyncio
import json
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.certificates import Authority
from tests.fakes import SPECULATIVE_METRICS, FakeWorker
from tests.integration.envoy_proxy import EnvoyProxy
from tests.integration.picker_process import PickerProcess

START_SECONDS = 60.0
UP, IN_FALLBACK = "appliance_picker_endpoint_up", "appliance_picker_endpoint_in_fallback"
READY = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
OF_CLIENT = {"X-Request-Id": "one"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def picking(
    directory: Path, workers: list[FakeWorker], *, answer: bool = True, **settings: Any
) -> AsyncIterator[PickerProcess]:
    """A picker that knows its workers; `answer` says whether they can be polled."""
    picker = PickerProcess(directory, [worker.url for worker in workers], **settings)
    try:
        await asyncio.to_thread(picker.wait_ready)
        for worker in workers:
            await picker.wait_for(UP, name_of(worker), float(answer))
        yield picker
    finally:
        await asyncio.to_thread(picker.stop)


def plugin(*, draft_tokens: int, speed: float, mode: str = "speculative") -> dict[str, Any]:
    """The answer of a plugin that has measured so many tokens per second at batch size 1."""
    step = {"batch": 1, "draft_tokens": draft_tokens, "steps": 100, "seconds": 10.0, "seconds_squared": 1.0}
    return {
        "controllable": True,
        "problems": [],
        "epoch": secrets.token_hex(4),
        "largest_batch": 64,
        "choices": [0, 3],
        "table": [[1, 64, draft_tokens]],
        "mode": mode,
        "reason": "healthy" if mode == "speculative" else "collapsed",
        "is_probing": False,
        "batch": 0,
        "step_count": 100,
        "steps": [{**step, "requests": 100, "tokens": round(10.0 * speed)}],
        "drafting": {
            "drafts": 0,
            "draft_tokens": 0,
            "accepted_tokens": 0,
            "accepted_per_position": [],
            "drafted_per_position": [],
        },
    }


def pays() -> dict[str, Any]:
    return plugin(draft_tokens=3, speed=30.0)


def is_in_fallback() -> dict[str, Any]:
    return plugin(draft_tokens=0, speed=10.0, mode="target_only")


Enter = Callable[[AbstractAsyncContextManager[Any]], Awaitable[Any]]


@pytest.fixture
async def enter() -> AsyncIterator[Enter]:
    """Enter a context until the end of the test."""
    async with AsyncExitStack() as stack:
        yield stack.enter_async_context


@pytest.fixture
async def workers(enter: Enter) -> list[FakeWorker]:
    """One whose drafts pay, and one in fallback."""
    made = [FakeWorker(metrics=SPECULATIVE_METRICS, plugin=plugin) for plugin in (pays(), is_in_fallback())]
    return [await enter(worker.serving()) for worker in made]


def urls_of(workers: list[FakeWorker]) -> list[str]:
    return [worker.url for worker in workers]


def name_of(worker: FakeWorker) -> str:
    return worker.url.removeprefix("http://")


async def ask(url: str, count: int = 1, body: dict[str, Any] = CHAT) -> list[int]:
    statuses = []
    async with aiohttp.ClientSession(headers=OF_CLIENT) as session:
        for _ in range(count):
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()
                statuses.append(response.status)
    return statuses


def served(workers: list[FakeWorker]) -> list[int]:
    """Requests that each worker has received since the last call."""
    counts = [len(worker.bodies) for worker in workers]
    for worker in workers:
        worker.bodies.clear()
    return counts


@pytest.mark.parametrize("body_mode", ["FULL_DUPLEX_STREAMED", "STREAMED", "BUFFERED", "NONE"])
async def test_requests_avoid_a_worker_in_fallback_while_another_pays(tmp_path, enter, workers, body_mode):
    picker = await enter(picking(tmp_path, workers))
    envoy = await enter(EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path, body_mode=body_mode))
    assert await ask(envoy.url, 12) == [200] * 12
    assert served(workers) == [12, 0]
    workers[0].plugin, workers[1].plugin = is_in_fallback(), pays()
    await picker.wait_for(IN_FALLBACK, name_of(workers[0]), 1.0)
    await picker.wait_for(IN_FALLBACK, name_of(workers[1]), 0.0)
    assert await ask(envoy.url, 12) == [200] * 12
    assert served(workers) == [0, 12]


@pytest.mark.parametrize("body_mode", ["FULL_DUPLEX_STREAMED", "STREAMED", "BUFFERED", "NONE"])
async def test_requests_go_on_when_the_picker_dies_and_are_picked_when_it_is_back(
    tmp_path, enter, workers, body_mode
):
    picker = await enter(picking(tmp_path, workers))
    envoy = await enter(EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path, body_mode=body_mode))
    assert await ask(envoy.url, 6) == [200] * 6
    assert served(workers) == [6, 0]
    picker.stop(signal.SIGKILL)
    while body_mode == "FULL_DUPLEX_STREAMED" and await ask(envoy.url) != [200]:
        served(workers)  # until the proxy knows that the picker is gone
    served(workers)
    assert await ask(envoy.url, 12) == [200] * 12
    assert served(workers) == [6, 6]
    port = int(picker.address.rpartition(":")[2])
    again = await enter(picking(tmp_path / "again", workers, port=port))
    while await again.metric("appliance_picker_picks_total", name_of(workers[0])) <= 0:
        assert await ask(envoy.url) == [200]
    served(workers)
    assert await ask(envoy.url, 6) == [200] * 6
    assert served(workers) == [6, 0]


@pytest.mark.parametrize("body_mode", ["FULL_DUPLEX_STREAMED", "STREAMED", "BUFFERED", "NONE"])
async def test_an_answer_in_flight_survives_the_death_of_the_picker(tmp_path, enter, workers, body_mode):
    workers[0].pause_seconds = 0.5
    picker = await enter(picking(tmp_path, workers))
    envoy = await enter(EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path, body_mode=body_mode))
    async with (
        aiohttp.ClientSession(headers=OF_CLIENT) as session,
        session.post(f"{envoy.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        first = await response.content.readany()
        picker.stop(signal.SIGKILL)
        rest = await response.content.read()
    assert (first + rest).endswith(b"data: [DONE]\n\n")


async def test_bodies_pass_through_the_picker_unchanged(tmp_path, enter, workers):
    body, answers = {**CHAT, "stream": True, "pad": secrets.token_hex(400_000)}, []
    # As a model takes: Envoy drops an answer that comes before it has seen the picker's stream end.
    workers[0].pause_seconds = 0.1
    picker = await enter(picking(tmp_path, workers))
    envoy = await enter(EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path))
    async with aiohttp.ClientSession(headers=OF_CLIENT) as session:
        for url in (envoy.url, workers[0].url):
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                answers.append(await response.read())
    assert workers[0].bodies[0] == workers[0].bodies[1] == json.dumps(body).encode()
    assert answers[0] == answers[1]


async def test_only_endpoints_that_the_proxy_allows_are_picked(tmp_path, enter, workers):
    picker = await enter(picking(tmp_path, workers))
    allowed, elsewhere = [name_of(workers[1])], ["10.0.0.9:8000"]
    envoy, none = [
        await enter(EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path, subset=subset))
        for subset in (allowed, elsewhere)
    ]
    assert await ask(envoy.url, 4) == [200] * 4
    assert served(workers) == [0, 4]
    assert await ask(none.url, 2) == [503] * 2


async def test_workers_that_cannot_be_polled_take_turns(tmp_path, enter, workers):
    for worker in workers:
        worker.metrics = "not a page of vLLM"
    picker = await enter(picking(tmp_path, workers, answer=False))
    envoy = await enter(EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path))
    assert await ask(envoy.url, 8) == [200] * 8
    assert served(workers) == [4, 4]
    assert await picker.metric("appliance_picker_picks_total", name_of(workers[0])) == 4.0


async def test_workers_without_the_plugin_get_requests_by_load(tmp_path, enter, workers):
    for worker in workers:
        worker.plugin = None
    idle, queued = (f'num_requests_waiting{{engine="0",model_name="demo"}} {count}.0' for count in (0, 9))
    workers[0].metrics = SPECULATIVE_METRICS.replace(idle, queued)
    picker = await enter(picking(tmp_path, workers))
    envoy = await enter(EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path))
    assert await ask(envoy.url, 4) == [200] * 4
    assert served(workers) == [0, 4]


async def test_proxies_without_a_client_certificate_are_refused_if_one_is_required(tmp_path, enter, workers):
    authority = Authority("site")
    (tmp_path / "ca.pem").write_text(authority.pem)
    own, client = authority.issue(tmp_path, "picker"), authority.issue(tmp_path, "envoy")
    tls = {
        "certificate_file": str(own.certificate),
        "key_file": str(own.key),
        "client_ca_file": str(tmp_path / "ca.pem"),
    }
    picker = await enter(picking(tmp_path, workers, tls=tls))

    async def ask_through(certificate: tuple[Path, Path] | None) -> list[int]:
        proxy = EnvoyProxy(
            *(urls_of(workers), picker.address),
            directory=tmp_path,
            certificate=certificate,
            fails_open=False,
        )
        return await ask((await enter(proxy)).url)

    files = (client.certificate, client.key)
    assert await ask_through(files) == [200]
    assert await ask_through(None) == [500]
    authority.issue(tmp_path, "picker")  # renewed
    assert await ask_through(files) == [200]


async def test_plaintext_serves_proxies_without_tls(tmp_path, enter, workers):
    picker = await enter(picking(tmp_path, workers, picker={"plaintext": True}))
    envoy = await enter(
        EnvoyProxy(urls_of(workers), picker.address, directory=tmp_path, plaintext=True, fails_open=False)
    )
    assert await ask(envoy.url, 4) == [200] * 4
    assert served(workers) == [4, 0]


async def test_health_is_live_at_once_and_ready_after_the_first_poll(tmp_path, enter, workers):
    for worker in workers:
        worker.metrics_seconds = 60.0
    picker = PickerProcess(tmp_path, urls_of(workers), monitor={"scrape_timeout_seconds": 120.0})
    try:
        while not await picker.is_serving("liveness"):  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.05)
        assert not any([await picker.is_serving(service) for service in READY])
    finally:
        assert await asyncio.to_thread(picker.stop) == 0
    for worker in workers:
        worker.metrics_seconds = 0.0
    ready = await enter(picking(tmp_path, workers))
    assert all([await ready.is_serving(service) for service in READY])
