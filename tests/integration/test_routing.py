"""
Queueing, refusals, and the effects of a dead worker.
"""

import asyncio
import json
import signal
import time
from dataclasses import dataclass, replace

import aiohttp
import pytest

from appliance.infra.settings import AdmissionSettings
from appliance.serving.breaker import BreakerPolicy
from appliance.serving.worker import WorkerId
from demo.process import ApplianceProcess
from tests.fakes import FakeWorker, chat, until
from tests.integration.scripted_worker import ScriptedProcess

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
PIECES = [f"token {number} " for number in range(80)]
STREAMS = 50


@dataclass
class Ended:
    """How a request ended for its client."""

    request_id: str
    status: int
    body: bytes

    @property
    def error(self) -> str | None:
        """The code of the error it ended with, if it did."""
        if self.status == 200 and self.body.startswith((b"data:", b": ")):
            last = self.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2].removeprefix(b"data: ")
            return json.loads(last)["error"]["code"] if b'"error"' in last else None
        return None if self.status == 200 else json.loads(self.body)["error"]["code"]


async def client(running, **more) -> Ended:
    """Ask, and read to the end."""
    async with running.asking(chat(**more)) as response:
        return Ended(response.headers["x-request-id"], response.status, await response.read())


async def stream_of(running, began: list[None]) -> Ended:
    """Ask for a stream, note its first frame, and read to the end."""
    async with running.asking(chat(stream=True)) as response:
        first = await response.content.readuntil(b"\n\n")
        began.append(None)
        rest = await response.read()
        return Ended(response.headers["x-request-id"], response.status, first + rest)


async def test_one_of_two_workers_dies_under_load_without_losing_others(serve):
    """Only streams that had begun on it fail, each with an error event; everything else succeeds."""
    script = {"pieces": PIECES, "pause_seconds": 0.05}
    doomed, survivor = ScriptedProcess(**script), ScriptedProcess(**script)
    running = await serve(doomed, survivor, admission=AdmissionSettings(worker_requests=30))
    began: list[None] = []
    streams = [asyncio.ensure_future(stream_of(running, began)) for _ in range(STREAMS)]
    held = [
        asyncio.ensure_future(client(running, stream=number % 2 == 0, hold_seconds=0.8))
        for number in range(20)
    ]
    await until(lambda: sum(running.pool.in_flight.values()) == 60, 10)
    assert running.metrics.registry.get_sample_value("appliance_queue_requests", {"priority": "standard"}) > 0
    await until(lambda: len(began) == STREAMS, 20)
    await doomed.kill()
    late = [asyncio.ensure_future(client(running, stream=number % 2 == 0)) for number in range(20)]
    async with asyncio.timeout(60):
        ended = await asyncio.gather(*streams, *held, *late)
    outcomes = await until_recorded(running, len(ended))
    failed = [each for each in ended if each.error is not None]
    begun = FakeWorker(pieces=PIECES).frames(CHAT, {})[0]
    assert failed
    for each in failed:
        outcome = outcomes[each.request_id]
        assert (outcome["worker"], outcome["outcome"], each.error) == ("w1", "worker_failed", "worker_failed")
        assert each.status == 200
        assert each.body.startswith(begun)
        assert DONE not in each.body
    for each in ended:
        if each not in failed:
            assert each.status == 200
            assert outcomes[each.request_id]["outcome"] == "completed"
    whole = b"".join(FakeWorker(pieces=PIECES).frames(CHAT, {}))
    complete = [each for each in ended[:STREAMS] if each.error is None]
    assert {each.body for each in complete} == {whole}
    assert len(failed) < STREAMS
    assert any(outcomes[each.request_id]["retries"] for each in ended[STREAMS : STREAMS + 20])
    assert running.pool.in_flight == {"w1": 0, "w2": 0}


async def until_recorded(running, count: int) -> dict[str, dict]:
    """Wait until so many requests have ended; how each did."""
    await until(lambda: len(running.entries("request.outcome")) >= count)
    return {entry["request_id"]: entry for entry in running.entries("request.outcome")}


# Queueing.


async def waiting(running) -> None:
    """Return once a request waits."""
    value = running.metrics.registry.get_sample_value
    await until(lambda: value("appliance_queue_requests", {"priority": "standard"}))


async def occupy(running, *workers: FakeWorker) -> "list[asyncio.Future[Ended]]":
    """Have each worker hold a request until it is freed; by default the first."""
    for worker in workers or running.workers[:1]:
        worker.freed = asyncio.Event()
    firsts = [asyncio.ensure_future(client(running)) for _ in workers or running.workers[:1]]
    await until(lambda: all(worker.bodies for worker in workers or running.workers[:1]))
    return firsts


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_waits_until_a_worker_has_room(serve, stream):
    """It is answered as usual, and the log has its waiting time."""
    running = await serve(FakeWorker(), admission=AdmissionSettings(worker_requests=1))
    (first,) = await occupy(running)
    second = asyncio.ensure_future(client(running, stream=stream))
    await waiting(running)
    assert len(running.worker.bodies) == 1
    running.worker.freed.set()
    assert ((await first).status, (await second).status) == (200, 200)
    outcomes = await until_recorded(running, 2)
    assert "queued_ms" not in outcomes[first.result().request_id]
    assert outcomes[second.result().request_id]["queued_ms"] > 0
    assert outcomes[second.result().request_id]["outcome"] == "completed"


async def test_excess_requests_are_refused_before_they_start(serve):
    """429 with `Retry-After`; the log has one entry, and no worker is called."""
    running = await serve(FakeWorker(), admission=AdmissionSettings(worker_requests=1, queue_requests=0))
    (first,) = await occupy(running)
    reply = await running.post(chat(stream=True))
    assert (reply.status, reply.error["code"]) == (429, "at_capacity")
    assert 0 < int(reply.headers["Retry-After"]) <= 120
    assert reply.headers["x-should-retry"] == "true"
    running.worker.freed.set()
    assert (await first).status == 200
    await until(lambda: running.entries("request.denied"))
    (denied,) = running.entries("request.denied")
    assert (denied["reason"], denied["status"]) == ("at_capacity", 429)
    assert len(running.entries("request.intent")) == len(running.worker.bodies) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_request_that_waits_too_long_gets_429(serve, stream):
    """429 while nothing was sent."""
    running = await serve(FakeWorker(), admission=AdmissionSettings(worker_requests=1, wait_seconds=0.2))
    (first,) = await occupy(running)
    reply = await running.post(chat(stream=stream))
    assert (reply.status, reply.error["code"]) == (429, "at_capacity")
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("not_admitted", 429)
    running.worker.freed.set()
    assert (await first).status == 200


async def test_a_stream_that_waits_long_is_kept_alive(serve):
    """Comments until there is room, then the stream as the worker sends it."""
    running = await serve(
        FakeWorker(), admission=AdmissionSettings(worker_requests=1), keep_alive_seconds=0.1
    )
    (first,) = await occupy(running)
    async with running.asking(chat(stream=True)) as response:
        assert response.status == 200
        assert response.headers["x-appliance-audit"]
        assert await response.content.readuntil(b"\n\n") == KEEP_ALIVE
        running.worker.freed.set()
        body = await response.read()
    frames = [frame + b"\n\n" for frame in body.split(b"\n\n")[:-1]]
    assert b"".join(frame for frame in frames if frame != KEEP_ALIVE) == b"".join(
        running.worker.frames(CHAT, {})
    )
    assert (await first).status == 200


async def test_a_kept_alive_stream_that_waits_too_long_ends_with_an_error(serve):
    """Its head was sent, so the last frame has the error."""
    running = await serve(
        FakeWorker(), admission=AdmissionSettings(worker_requests=1, wait_seconds=0.4), keep_alive_seconds=0.1
    )
    (first,) = await occupy(running)
    ended = await client(running, stream=True)
    assert (ended.status, ended.error) == (200, "at_capacity")
    assert ended.body.startswith(KEEP_ALIVE)
    assert DONE not in ended.body
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("not_admitted", 429)
    running.worker.freed.set()
    assert (await first).status == 200


async def test_a_kept_alive_stream_that_the_worker_refuses_ends_with_its_words(serve):
    """The worker's status cannot be sent any more; its message can."""
    running = await serve(
        FakeWorker(), admission=AdmissionSettings(worker_requests=1), keep_alive_seconds=0.1
    )
    (first,) = await occupy(running)
    async with running.asking(chat(stream=True)) as response:
        assert response.status == 200
        assert await response.content.readuntil(b"\n\n") == KEEP_ALIVE
        running.worker.status = 400
        running.worker.freed.set()
        body = await response.read()
    last = body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "bad"
    outcomes = await until_recorded(running, 2)
    assert outcomes[response.headers["x-request-id"]]["outcome"] == "worker_refused"
    assert (await first).status == 400


async def test_a_kept_alive_stream_whose_worker_dies_before_its_answer_goes_to_another(serve):
    """Comments are no part of an answer: another worker can still write all of it."""
    dying, other = FakeWorker(), FakeWorker()
    running = await serve(
        dying, other, admission=AdmissionSettings(worker_requests=1), keep_alive_seconds=0.1
    )
    firsts = await occupy(running, dying, other)
    async with running.asking(chat(stream=True)) as response:
        assert response.status == 200
        assert await response.content.readuntil(b"\n\n") == KEEP_ALIVE
        dying.breaks_before_answer = True
        dying.freed.set()
        await until(lambda: len(dying.bodies) > 1)
        other.freed.set()
        body = await response.read()
    assert body.endswith(b"".join(other.frames(CHAT, {})))
    outcome = (await until_recorded(running, 3))[response.headers["x-request-id"]]
    assert (outcome["outcome"], outcome["worker"], outcome["retries"]) == ("completed", "w2", 1)
    assert [each.status for each in await asyncio.gather(*firsts)] == [200, 200]


async def test_a_client_that_leaves_while_it_waits_is_out_of_the_queue(serve):
    """It uses no slot, and the log says that it left."""
    running = await serve(FakeWorker(), admission=AdmissionSettings(worker_requests=1))
    (first,) = await occupy(running)
    gone = asyncio.ensure_future(client(running))
    await waiting(running)
    gone.cancel()
    outcome = await running.outcome()
    assert (outcome["outcome"], outcome["status"]) == ("client_gone", 499)
    assert "worker" not in outcome
    running.worker.freed.set()
    assert (await first).status == 200
    assert len(running.worker.bodies) == 1
    assert running.pool.in_flight == {"w1": 0}


async def test_request_with_lower_priority_waits_longer(serve):
    """The header lowers a tenant's class, and never raises it."""
    running = await serve(FakeWorker(), admission=AdmissionSettings(worker_requests=1, batch_share=0.0))
    (first,) = await occupy(running)
    order: list[str] = []

    async def ask(priority: str) -> None:
        reply = await running.post(chat(seed=len(order)), x_appliance_priority=priority)
        assert reply.status == 200
        order.append(priority)

    value = running.metrics.registry.get_sample_value
    batch = asyncio.ensure_future(ask("batch"))
    await until(lambda: value("appliance_queue_requests", {"priority": "batch"}))
    others = asyncio.gather(*(ask(priority) for priority in ("interactive", "standard")))
    await until(lambda: value("appliance_queue_requests", {"priority": "standard"}) == 2)
    running.worker.freed.set()
    await asyncio.gather(first, batch, others)
    assert order[-1] == "batch"
    assert (await running.post(chat(), x_appliance_priority="urgent")).status == 400


# Which worker.


async def test_circuit_opens_for_a_worker_that_keeps_failing(serve, monkeypatch):
    """Its health page is fine, its answers are not: after a few it gets none."""
    monkeypatch.setattr(
        "appliance.gateway.admission.admission.BREAKER", BreakerPolicy(failures=3, seconds=60.0)
    )
    running = await serve(FakeWorker(status=500), FakeWorker())
    for _ in range(8):
        assert (await running.post(chat())).status == 200
    bad, good = running.workers
    assert (len(bad.bodies), len(good.bodies)) == (3, 8)
    value = running.metrics.registry.get_sample_value
    assert value("appliance_worker_breaker_open", {"worker": "w1"}) == 1


async def test_request_that_crashes_workers_crashes_two_at_most(serve):
    """One retry if the worker may have received it."""
    running = await serve(*(FakeWorker(breaks_before_answer=True) for _ in range(3)))
    reply = await running.post(chat())
    assert (reply.status, reply.error["code"]) == (502, "worker_failed")
    assert sum(len(worker.bodies) for worker in running.workers) == 2


async def test_workers_that_cannot_be_reached_cost_nothing_to_pass_over(serve):
    """Any number of them, since none has received the request."""
    running = await serve(*(FakeWorker() for _ in range(4)))
    for number in (1, 2, 3):
        running.move(f"w{number}", "http://127.0.0.1:9")
    reply = await running.post(chat())
    assert reply.status == 200
    assert (await running.outcome())["retries"] == 3


SHUT_DOWN = b'{"error":{"message":"cannot schedule new futures after shutdown","type":"x","code":500}}'
"""What a stopping vLLM without our middleware answers, with 500."""


@pytest.mark.parametrize("stopping", [{"leaving": True}, {"status": 500, "error_body": SHUT_DOWN}])
async def test_a_worker_that_shuts_down_loses_no_request(serve, stopping):
    """Its refusals are retried elsewhere, however many, and its streams end as they began."""
    running = await serve(FakeWorker(pieces=["x"] * 20, pause_seconds=0.05), FakeWorker())
    stream = asyncio.ensure_future(client(running, stream=True))
    await until(lambda: running.worker.bodies)
    vars(running.worker).update(stopping)
    running.worker.pieces = []
    for _ in range(3):
        running.pool.update(replace(running.pool.snapshot(WorkerId("w1")), healthy=True))
        ended = await asyncio.gather(*(client(running) for _ in range(20)))
        assert {each.status for each in ended} == {200}
    assert len(running.worker.bodies) > 1, "the worker that stops was never chosen"
    assert (await stream).body.endswith(DONE)
    value = running.metrics.registry.get_sample_value
    assert not value("appliance_worker_breaker_open", {"worker": "w1"})


async def test_a_worker_that_shuts_down_gets_no_new_request(serve):
    """From the next poll on, though it still answers them."""
    stopping = FakeWorker(plugin={"controllable": False, "problems": [], "engine": "", "epoch": ""})
    running = await serve(stopping, FakeWorker())
    stopping.leaving = True
    await running.control.tick()
    assert not running.pool.snapshot(WorkerId("w1")).healthy
    for _ in range(5):
        assert (await running.post(chat())).status == 200
    assert not stopping.bodies


@pytest.mark.parametrize("how", ["leaving", "unreachable", "cut"])
async def test_requests_wait_while_the_only_worker_is_replaced(serve, how):
    """Streams and others; none is refused, and none gets another status than 200."""
    settings = AdmissionSettings(worker_requests=30, worker_wait_seconds=60)
    running = await serve(FakeWorker(), admission=settings, keep_alive_seconds=0.1)
    seen, worker = running.pool.snapshot(WorkerId("w1")), running.worker
    if how == "unreachable":
        running.move("w1", "http://127.0.0.1:9")
    else:
        worker.leaving, worker.breaks_before_answer = how == "leaving", how == "cut"
    asked = [asyncio.ensure_future(client(running, stream=bool(number % 2))) for number in range(6)]
    value = running.metrics.registry.get_sample_value
    await until(lambda: value("appliance_queue_requests", {"priority": "standard"}) == 6)
    worker.leaving = worker.breaks_before_answer = False
    running.pool.add(seen.worker)
    running.pool.update(replace(seen, seen_at=time.monotonic()))
    ended = await asyncio.gather(*asked)
    assert [(each.status, each.error) for each in ended] == [(200, None)] * 6
    recorded = await until_recorded(running, 6)
    assert {entry["outcome"] for entry in recorded.values()} == {"completed"}


async def test_requests_get_503_with_retry_after_if_no_worker_returns(serve):
    """Never what the worker's shutdown answered; and after that time at once."""
    stopping = FakeWorker(status=500, error_body=SHUT_DOWN)
    running = await serve(stopping, admission=AdmissionSettings(worker_wait_seconds=0.3))
    seen = running.pool.snapshot(WorkerId("w1"))
    running.pool.update(replace(seen, seen_at=time.monotonic()))
    for _ in range(2):
        reply = await running.post(chat())
        assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
        assert int(reply.headers["Retry-After"]) >= 1
    assert len(stopping.bodies) == 1


async def test_a_drained_worker_finishes_its_streams_and_gets_no_more(serve):
    """By the admin API, with requests in flight."""
    running = await serve(FakeWorker(pieces=["x"] * 20, pause_seconds=0.05), FakeWorker())
    first = asyncio.ensure_future(client(running, stream=True))
    await until(lambda: running.worker.bodies)
    running.pool.set_drained(WorkerId("w1"), True)
    for _ in range(3):
        assert (await running.post(chat())).status == 200
    assert [len(worker.bodies) for worker in running.workers] == [1, 3]
    ended = await first
    assert (ended.status, ended.error) == (200, None)
    assert ended.body.endswith(DONE)


async def test_a_stopping_gateway_refuses_no_connection(serve):
    """It serves and closes connections, then answers 503, and is done when its last stream is."""
    running = await serve(FakeWorker(pieces=["x"] * 20, pause_seconds=0.05))
    stop, server = running.server.config.app.state.services.stop, running.server
    stream = asyncio.ensure_future(client(running, stream=True))
    await until(lambda: running.worker.bodies)
    leaving = asyncio.ensure_future(server.leave(stop, 0.2))
    await until(lambda: stop.has_begun)
    reply = await running.post(chat())
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    await until(lambda: stop.refuses)
    running.worker.pieces = []
    reply = await running.post(chat())
    assert (reply.status, reply.error["code"]) == (503, "gateway_stopping")
    assert (reply.headers["Retry-After"], reply.headers["connection"]) == ("2", "close")
    assert not stream.done(), "the stream was too short for this test"
    assert not leaving.done(), "it ended before its last stream"
    ended = await stream
    assert ended.body.endswith(DONE)
    await leaving


# Workers come and go.


async def test_running_gateway_reloads_the_list_of_workers(tmp_path):
    """At SIGHUP and on request; names are resolved; a mistake in the file changes nothing."""
    file = tmp_path / "settings.yaml"

    def write(pool: dict) -> None:
        # Its ports were not in the list at the start, where the wall was raised.
        port = int(second.url.rpartition(":")[2])
        later = {"connect_ports": [port, port + 1]}
        settings = {"pool": {"discover_seconds": 0.2, **pool}, "sovereignty": later}
        file.write_text(json.dumps(settings), encoding="utf-8")

    async with (
        FakeWorker().serving() as first,
        FakeWorker().serving() as second,
        aiohttp.ClientSession() as session,
    ):
        write({"urls": [first.url]})
        process = ApplianceProcess("gateway", "--config", str(file), data=tmp_path / "data")
        try:
            await asyncio.to_thread(process.wait_ready)
            admin = (tmp_path / "data" / "admin.key").read_text(encoding="utf-8").strip()

            async def ask(method: str, path: str) -> tuple[int, dict]:
                headers = {"Authorization": f"Bearer {admin}"}
                async with session.request(
                    method, f"{process.admin_url}/admin/v1/{path}", headers=headers
                ) as answer:
                    return answer.status, await answer.json()

            async def ready() -> set[str]:
                _, answer = await ask("GET", "workers")
                return {each["url"] for each in answer["workers"] if each["takes_requests"]}

            async def until_ready(*urls: str) -> None:
                async with asyncio.timeout(20):
                    while await ready() != set(urls):  # noqa: ASYNC110 - it is in another process
                        await asyncio.sleep(0.05)

            await until_ready(first.url)
            write({"urls": [first.url, second.url]})
            process.process.send_signal(signal.SIGHUP)
            await until_ready(first.url, second.url)
            write({"urls": [first.url], "discover": second.url.replace("127.0.0.1", "localhost")})
            status, answer = await ask("POST", "workers/reload")
            assert (status, answer) == (200, {"joined": [], "left": [second.url.removeprefix("http://")]})
            await until_ready(first.url, second.url)
            write({"urls": ["nonsense"]})
            status, answer = await ask("POST", "workers/reload")
            assert (status, answer["error"]["code"]) == (409, "control_refused")
            assert await ready() == {first.url, second.url}
            status, answer = await ask("POST", f"workers/{first.url.removeprefix('http://')}/drain")
            assert (status, answer["drained"]) == (202, True)
            async with session.post(
                process.url + CHAT, json=chat(), headers={"Authorization": f"Bearer {process.key}"}
            ) as reply:
                assert reply.status == 200
            assert (len(first.bodies), len(second.bodies)) == (0, 1)
        finally:
            assert await asyncio.to_thread(process.stop) == 0, "".join(process.output)
            assert process.process.stdout is not None
            process.process.stdout.close()
