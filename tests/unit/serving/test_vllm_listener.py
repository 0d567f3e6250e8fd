"""The control listener in the engine process: who is answered, with what, and that no step waits for it."""

import asyncio
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import Counter

from appliance.errors import WorkerFailedError
from appliance.infra.settings import PoolSettings
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient, SpeculationCommand
from appliance.serving.pool import WorkerPool
from appliance.serving.scraper import WorkerScraper
from appliance.serving.supervise import free_port
from appliance.serving.vllm import listener
from appliance.serving.vllm.listener import (
    LARGEST_BODY,
    MAX_CONNECTIONS,
    ControlledEngine,
    ControlListener,
    start_listener,
)
from appliance.serving.vllm.scheduler_control import SchedulerControl
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_protocol import (
    CONTROL_ADDRESS,
    CONTROL_CERTIFICATE_FILE,
    CONTROL_CLIENT_CA_FILE,
    CONTROL_KEY_FILE,
    LEAVING,
    LEAVING_HEADER,
    RESTART_FILE,
    RESTART_PATH,
    SPECULATION_PATH,
    TOKEN_FILE,
)
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import Reason, SpeculationMode
from tests.certificates import LOOPBACK, Authority
from tests.fake_engine import LOOKUP, FakeClock, FakeScheduler, work
from tests.fakes import METRICS, serving_pair, until

pytestmark = pytest.mark.usefixtures("loopback")
TOKEN = "0123456789abcdef"
OURS = {"Authorization": f"Bearer {TOKEN}"}
READING = {"controllable": True, "problems": [], "engine": "vllm 0.32.0", "epoch": "0f"}
SERVER = 4711
HOST = "127.0.0.1"
ROUTES = [("GET", SPECULATION_PATH), ("PUT", SPECULATION_PATH), ("POST", RESTART_PATH)]


class Listening:
    """An engine, its control listener, and a caller."""

    def __init__(self, environment: dict[str, str], *, server: int | None = SERVER) -> None:
        self.answer: str | Exception = json.dumps(READING)
        self.asked: list[str] = []
        self.engine = ControlledEngine(command=self.command, gpus=2, server=server)
        self.listener = ControlListener(self.engine, environment)
        self.port = 0

    def command(self, text: str) -> str:
        self.asked.append(text)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                *(method, f"http://{HOST}:{self.port}{path}"),
                data=body,
                headers=OURS if headers is None else headers,
            ) as response,
        ):
            assert response.content_type == "application/json"
            return response.status, await response.json()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Listening"]:
        with closing(socket.create_server((HOST, 0))) as bound:
            self.port = bound.getsockname()[1]
            task = asyncio.create_task(self._serve(bound))
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _serve(self, bound: socket.socket) -> None:
        await self.listener.serve(bound)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a supervised worker with a token."""
    (tmp_path / "control.token").write_text(TOKEN)
    return {TOKEN_FILE: str(tmp_path / "control.token"), RESTART_FILE: str(tmp_path / "restart.json")}


@pytest.fixture
async def worker(environment: dict[str, str]) -> AsyncIterator[Listening]:
    async with Listening(environment).serving() as made:
        yield made


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Records signals instead of sending them."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    return sent


def test_engine_does_not_start_without_a_token(environment, tmp_path):
    """Otherwise it would answer every caller, or, with an empty token, callers who send none."""
    engine = ControlledEngine(command=str, gpus=None, server=None)
    environment[CONTROL_ADDRESS] = f"{HOST}:{free_port(HOST)}"
    (tmp_path / "control.token").write_text(" \n")
    with pytest.raises(ValueError, match=r"control\.token is empty: put a random word in it"):
        start_listener(engine, environment)
    del environment[TOKEN_FILE]
    with pytest.raises(KeyError, match=TOKEN_FILE):
        start_listener(engine, environment)


def test_nothing_listens_without_an_address():
    assert start_listener(ControlledEngine(command=str, gpus=None, server=None), {}) is None


async def test_engine_serves_while_the_port_is_in_use(environment, caplog, monkeypatch):
    """Gateways report meanwhile that it cannot be controlled."""
    monkeypatch.setattr(listener, "BIND_SECONDS", 0.01)
    with closing(socket.create_server((HOST, 0))) as taken:
        port = taken.getsockname()[1]
        engine = ControlledEngine(command=lambda _text: json.dumps(READING), gpus=None, server=None)
        start_listener(engine, environment | {CONTROL_ADDRESS: f"{HOST}:{port}"})
        await until(lambda: "cannot listen on port" in caplog.text)
    await until(lambda: is_open(port))
    made = Listening(environment)
    made.port = port
    assert await made.ask("GET", SPECULATION_PATH) == (200, READING)


def is_open(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((HOST, port)) == 0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"bearer {TOKEN}"},
        {"Authorization": TOKEN},
        {"X-Authorization": f"Bearer {TOKEN}"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/health"), ("GET", "/v1/models")])
async def test_every_route_needs_the_control_token(worker, signals, tmp_path, method, path, headers):
    reply = await worker.ask(method, path, b'{"with_draft": true}', headers)
    assert reply == (401, {"error": "unauthorized"})
    assert (worker.asked, signals) == ([], [])
    assert not (tmp_path / "restart.json").exists()


async def test_tokens_are_rotated_without_a_restart(worker, tmp_path):
    """Both are accepted while the file has both; a file that is being written changes nothing."""
    path = tmp_path / "control.token"

    async def answers() -> list[int]:
        asked = [{"Authorization": f"Bearer {token}"} for token in (TOKEN, "next")]
        return [(await worker.ask("GET", SPECULATION_PATH, headers=headers))[0] for headers in asked]

    assert await answers() == [200, 401]
    path.write_text(f"{TOKEN}\nnext\n")
    assert await answers() == [200, 200]
    path.write_text("")
    assert await answers() == [200, 200]
    path.write_text("next\n")
    assert await answers() == [401, 200]


async def test_a_reading_is_an_empty_command(worker):
    assert await worker.ask("GET", SPECULATION_PATH) == (200, READING)
    assert worker.asked == ["{}"]


async def test_a_command_is_passed_to_the_engine(worker):
    text = json.dumps({"table": [[1, 64, 0]], "mode": "target_only"})
    assert await worker.ask("PUT", SPECULATION_PATH, text.encode()) == (200, READING)
    assert await worker.ask("PUT", SPECULATION_PATH, b"\xff{}") == (200, READING)
    assert worker.asked == [text, "\ufffd{}"]


async def test_a_command_the_engine_refuses_is_a_bad_request(worker):
    refusal = {"error": "not a command: [2] draft tokens are not among [0, 3]"}
    worker.answer = json.dumps(refusal)
    assert await worker.ask("PUT", SPECULATION_PATH, b"{}") == (400, refusal)


@pytest.mark.parametrize("answer", [RuntimeError("private"), "no JSON"])
async def test_engine_without_commands_is_reported_uncontrollable(worker, answer):
    """An engine of another structure, or one that fails at it, still serves; no detail leaks."""
    worker.answer = answer
    status, content = await worker.ask("GET", SPECULATION_PATH)
    assert (status, content["controllable"], content["epoch"]) == (200, False, "")
    (problem,) = content["problems"]
    assert problem.startswith("the engine does not take commands: ")
    assert "private" not in problem


async def test_stuck_scheduler_is_reported(worker):
    worker.answer = TimeoutError("the engine did not answer within 5 s")
    assert await worker.ask("GET", SPECULATION_PATH) == (503, {"error": str(worker.answer)})


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", SPECULATION_PATH), ("DELETE", SPECULATION_PATH), ("GET", RESTART_PATH), ("PUT", RESTART_PATH)],
)
async def test_no_other_method_does_anything(worker, signals, method, path):
    reply = await worker.ask(method, path, b'{"with_draft": true}')
    assert reply == (405, {"error": f"{path} does not accept {method}"})
    assert (worker.asked, signals) == ([], [])


@pytest.mark.parametrize("path", ["/", "/health", f"{SPECULATION_PATH}/", f"{SPECULATION_PATH}?a=b"])
async def test_there_are_no_other_routes(worker, path):
    assert (await worker.ask("GET", path))[0] == 404


async def test_a_body_too_long_is_never_a_command(worker):
    """It is not even read."""
    assert (await raw(worker, f"PUT {SPECULATION_PATH} HTTP/1.1\r\nContent-Length: {LARGEST_BODY + 1}"))[
        0
    ] == 413
    assert worker.asked == []


async def raw(worker: Listening, head: str) -> tuple[int, bytes]:
    """Send a head without a body; the status is 0 if the connection is closed without an answer."""
    reader, writer = await asyncio.open_connection(HOST, worker.port)
    with closing(writer):
        writer.write(f"{head}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
    return int(answer.split()[1]) if answer else 0, answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"PUT {SPECULATION_PATH} HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
        (f"PUT {SPECULATION_PATH} HTTP/1.1\r\nContent-Length: x", 411),
        (f"PUT {SPECULATION_PATH} HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 0),
        (f"GET {SPECULATION_PATH} HTTP/1.1\r\nA : b", 0),
        (f"GET {SPECULATION_PATH}", 0),
        ("\x16\x03\x01", 0),
        (f"GET {SPECULATION_PATH} HTTP/1.1\r\nA: {'b' * 2**17}", 0),
        (f"GET {SPECULATION_PATH} HTTP/1.0", 200),
    ],
)
async def test_malformed_requests_are_closed(worker, head, status):
    assert (await raw(worker, head))[0] == status
    assert await worker.ask("GET", SPECULATION_PATH) == (200, READING)


async def test_reading_includes_energy_and_digests(environment, monkeypatch):
    """Of as many GPUs as the engine uses, opened once; absent if none measures it."""

    class Meter:
        gpus = 2
        counted: int | None = 5000

        def read(self) -> int | None:
            return self.counted

    meter, opened = Meter(), []
    monkeypatch.setattr(listener, "open_meter", lambda *found: opened.append(found) or meter)
    async with Listening(environment | {"CUDA_VISIBLE_DEVICES": "4,5,6"}).serving() as worker:
        for counted in (5000, 6000):
            meter.counted = counted
            energy = {"energy": {"gpus": 2, "millijoules": counted}}
            assert await worker.ask("GET", SPECULATION_PATH) == (200, READING | energy)
        meter.counted = None
        assert await worker.ask("GET", SPECULATION_PATH) == (200, READING)
    assert opened == [("4,5,6", 2)]


# Restarts.


@pytest.mark.parametrize("with_draft", [True, False])
async def test_restart_stores_its_request_and_ends_the_server(worker, signals, tmp_path, with_draft):
    """The supervisor finds a complete request, the last one counts, and readings say that it is leaving."""
    (tmp_path / "restart.json").write_text('{"with_draft": true} and something longer')
    request = {"with_draft": with_draft}
    assert await worker.ask("POST", RESTART_PATH, json.dumps(request).encode()) == (202, request)
    assert await worker.ask("GET", SPECULATION_PATH) == (503, LEAVING)
    assert signals == [(SERVER, signal.SIGTERM)]
    assert json.loads((tmp_path / "restart.json").read_text()) == request
    assert {path.name for path in tmp_path.iterdir()} == {"restart.json", "control.token"}
    assert worker.asked == []


@pytest.mark.parametrize("lacks", ["supervisor", "server"])
async def test_worker_that_would_not_come_back_does_not_end_itself(environment, signals, lacks):
    if lacks == "supervisor":
        del environment[RESTART_FILE]
    async with Listening(environment, server=None if lacks == "server" else SERVER).serving() as worker:
        status, content = await worker.ask("POST", RESTART_PATH, b'{"with_draft": true}')
    assert (status, signals) == (409, [])
    assert "this worker has no supervisor" in content["error"]


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"7", b"{", b"\xff", b'{"with_draft": "false"}'])
async def test_restart_needs_with_draft(worker, signals, tmp_path, body):
    reply = await worker.ask("POST", RESTART_PATH, body)
    assert reply == (400, {"error": 'send {"with_draft": true} or false'})
    assert signals == []
    assert not (tmp_path / "restart.json").exists()


# TLS.

SITE, ANOTHER = Authority("the site"), Authority("another")


def with_tls(environment: dict[str, str], directory: Path, authority: Authority = SITE) -> dict[str, str]:
    files = authority.issue(directory, "worker", *LOOPBACK)
    (directory / "site.pem").write_text(SITE.pem)
    return environment | {
        CONTROL_CERTIFICATE_FILE: str(files.certificate),
        CONTROL_KEY_FILE: str(files.key),
        CONTROL_CLIENT_CA_FILE: str(directory / "site.pem"),
    }


def gateway(directory: Path, authority: Authority = SITE, trusts: Authority = SITE) -> ssl.SSLContext:
    files = authority.issue(directory, "gateway")
    context = ssl.create_default_context(cadata=trusts.pem)
    context.load_cert_chain(files.certificate, files.key)
    return context


async def status_with(worker: Listening, tls: ssl.SSLContext | bool) -> int:
    """0 if the connection fails."""
    url = f"https://{HOST}:{worker.port}{SPECULATION_PATH}"
    try:
        async with aiohttp.ClientSession() as session, session.get(url, headers=OURS, ssl=tls) as response:
            return response.status
    except (aiohttp.ClientError, ConnectionError):
        return 0


async def test_listener_serves_gateways_of_the_site_only(environment, tmp_path):
    """With the worker's certificate; a client without one of the site's is refused, and so is plain HTTP."""
    async with Listening(with_tls(environment, tmp_path)).serving() as worker:
        assert await status_with(worker, gateway(tmp_path)) == 200
        assert await status_with(worker, gateway(tmp_path, ANOTHER)) == 0
        assert await status_with(worker, ssl.create_default_context(cadata=SITE.pem)) == 0
        with pytest.raises(aiohttp.ClientError):
            await worker.ask("GET", SPECULATION_PATH)
        assert worker.asked == ["{}"]


async def test_changed_certificate_is_presented(environment, tmp_path):
    """Files that do not belong together change nothing."""
    async with Listening(with_tls(environment, tmp_path)).serving() as worker:
        before = (tmp_path / "worker.key").read_text()
        with_tls(environment, tmp_path, ANOTHER)
        after = (tmp_path / "worker.key").read_text()
        (tmp_path / "worker.key").write_text(before)
        worker.listener._tls.renew()
        assert await status_with(worker, gateway(tmp_path)) == 200
        (tmp_path / "worker.key").write_text(after)
        worker.listener._tls.renew()
        assert await status_with(worker, gateway(tmp_path)) == 0
        assert await status_with(worker, gateway(tmp_path, trusts=ANOTHER)) == 200


# Other clients, and the engine.


async def test_silent_clients_do_not_keep_a_gateway_out(worker):
    """The oldest connection makes room."""
    silent = [await asyncio.open_connection(HOST, worker.port) for _ in range(MAX_CONNECTIONS + 4)]
    try:
        assert await worker.ask("GET", SPECULATION_PATH) == (200, READING)
        with suppress(ConnectionResetError):
            assert await silent[0][0].read() == b""
        assert len(worker.listener._open) <= MAX_CONNECTIONS
    finally:
        for _, writer in silent:
            writer.close()


async def test_silent_client_is_closed(environment, monkeypatch):
    """Also in the middle of a head or a body."""
    monkeypatch.setattr(listener, "IO_SECONDS", 0.05)
    begun = (b"", b"GET / HTTP/1.1\r\n", b"PUT / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    async with Listening(environment).serving() as worker:
        for part in begun:
            reader, writer = await asyncio.open_connection(HOST, worker.port)
            with closing(writer):
                writer.write(part)
                assert await reader.read() == b""


async def test_one_connection_carries_several_requests(worker):
    reader, writer = await asyncio.open_connection(HOST, worker.port)
    request = f"GET {SPECULATION_PATH} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with closing(writer):
        writer.write(request * 2)
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"HTTP/1.1 200 OK" in head
            assert json.loads(await reader.readexactly(len(json.dumps(READING)))) == READING


@contextmanager
def listening_thread(command: Callable[[str], str], environment: dict[str, str]) -> Iterator[int]:
    """A listener in its own thread, as in an engine."""
    port = free_port(HOST)
    engine = ControlledEngine(command=command, gpus=None, server=None)
    assert start_listener(engine, environment | {CONTROL_ADDRESS: f"{HOST}:{port}"}) is not None
    while not is_open(port):
        pass
    yield port


def test_steps_do_not_wait_for_clients(environment):
    """One is silent, another asks thousands of times and reads nothing; a third one is answered."""
    clock, scheduler = FakeClock(), FakeScheduler()
    control = SchedulerControl(scheduler, clock, {})
    scheduler.add("a")
    request = f"GET {SPECULATION_PATH} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with (
        listening_thread(lambda text: control.command(text, "vllm"), environment) as port,
        closing(socket.create_connection((HOST, port))),
        closing(socket.create_connection((HOST, port))) as deaf,
    ):
        deaf.settimeout(0)
        sent = 0
        while sent < 2**20:
            try:
                sent += deaf.send(request * 100)
            except BlockingIOError:
                break
        for step in range(1, 51):
            work(scheduler, clock, 1)
            assert json.loads(control.command("{}", "vllm"))["step_count"] == step
        with closing(HTTPConnection(HOST, port, timeout=30)) as third:
            third.request("PUT", SPECULATION_PATH, json.dumps({"table": [[1, 8, 0]]}), OURS)
            assert json.loads(third.getresponse().read())["table"] == [[1, 8, 0]]
    assert scheduler.dynamic_sd_lookup == [0] * len(LOOKUP)


async def test_the_gateway_controls_an_engine_through_its_listener(environment):
    """At the port after the worker's own."""
    control = SchedulerControl(FakeScheduler(), FakeClock(), {})
    with listening_thread(lambda text: control.command(text, "vllm"), environment) as port:
        worker = Worker(worker_id=WorkerId("w1"), url=f"http://{HOST}:{port - 1}")
        command = SpeculationCommand(
            table=((1, 8, 0),), mode=SpeculationMode.TARGET_ONLY, reason=Reason.COLLAPSED
        )
        async with SpeculationClient.open(token=TOKEN, tls=WorkerTls(PoolSettings())) as client:
            assert (await client.read(worker, 5.0)).controllable
            assert (await client.apply(worker, command, 5.0)).table == ((1, 8, 0),)


async def test_a_worker_without_the_listener_cannot_be_controlled_and_is_no_failure():
    """One that is silent has failed: a firewall may drop the port."""
    port = free_port(HOST)
    worker = Worker(worker_id=WorkerId("w1"), url=f"http://{HOST}:{port}")
    command = SpeculationCommand(
        table=((1, 8, 0),), mode=SpeculationMode.TARGET_ONLY, reason=Reason.COLLAPSED
    )
    async with SpeculationClient.open(token=TOKEN, tls=WorkerTls(PoolSettings())) as client:
        for reading in (await client.read(worker, 5.0), await client.apply(worker, command, 5.0)):
            (problem,) = reading.problems
            assert f"nothing listens on the worker's control port {port + 1}: " in problem
            assert not reading.controllable
        with (
            closing(socket.create_server((HOST, port + 1))),
            pytest.raises(WorkerFailedError, match=r"could not be reached: .*Timeout"),
        ):
            await client.read(worker, 0.05)


async def test_a_draining_server_tells_the_gateway_that_scrapes_it():
    """Its engine does not know."""
    control = SchedulerControl(FakeScheduler(), FakeClock(), {})

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=METRICS, headers={LEAVING_HEADER: "true"})

    app, controlled = web.Application(), web.Application()
    app.router.add_get("/metrics", metrics)
    reading = control.command("{}", "vllm")

    async def read(_request: web.Request) -> web.Response:
        return web.Response(text=reading, content_type="application/json")

    controlled.router.add_get(SPECULATION_PATH, read)
    tls, failures = WorkerTls(PoolSettings()), Counter("failed", "", ["worker"], registry=None)
    async with (
        serving_pair(app, controlled) as url,
        WorkerClient.open(token=TOKEN, tls=tls, connect_seconds=1.0) as client,
        SpeculationClient.open(token=TOKEN, tls=tls) as speculation,
    ):
        pool = WorkerPool()
        scraper = WorkerScraper(
            pool=pool,
            client=client,
            speculation=speculation,
            timeout_seconds=5.0,
            failures=failures,
            clock=lambda: 0.0,
        )
        worker = Worker(worker_id=WorkerId("w1"), url=url)
        seen = await scraper.scrape(WorkerSnapshot(worker=worker, healthy=True))
    assert (seen.healthy, seen.missed) == (False, 1)
    assert failures.labels("w1")._value.get() == 0
