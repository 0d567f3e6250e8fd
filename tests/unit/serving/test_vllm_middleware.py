"""Which calls are answered, and how a worker is restarted."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.serving.vllm import middleware
from appliance.serving.vllm.middleware import LARGEST_BODY, GatewayMiddleware
from appliance.serving.vllm.token_counts import count_sequences
from appliance.serving.worker_protocol import (
    DRAIN_SECONDS,
    OPEN_ROUTES,
    RESTART_FILE,
    RESTART_PATH,
    RPC,
    SCRAPE_TOKEN_FILE,
    SPECULATION_PATH,
    TOKEN_FILE,
    USAGE_PATH,
)
from tests.fakes import until

TOKEN, SCRAPE = "0123456789abcdef", "fedcba9876543210"
OURS = ((b"authorization", b"Bearer " + TOKEN.encode()),)
READING = {"controllable": True, "problems": [], "engine": "vllm 0.32.0", "epoch": "0f"}
ROUTES = [
    ("GET", SPECULATION_PATH),
    ("PUT", SPECULATION_PATH),
    ("POST", RESTART_PATH),
    ("GET", f"{USAGE_PATH}one"),
]


class Core:
    """vLLM's engine core as the server has it: commands go to it and answers come back."""

    def __init__(self, answer: str | Exception | None = None) -> None:
        self.answer = json.dumps(READING) if answer is None else answer
        self.asked: list[tuple[str, str]] = []

    async def call_utility_async(self, name: str, text: str) -> str:
        self.asked.append((name, text))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Reply:
    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.status = sent[0]["status"]
        self.headers = dict(sent[0]["headers"])
        self.body = b"".join(message["body"] for message in sent[1:])

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.body)


class Worker:
    """A vLLM server with our middleware in front."""

    def __init__(self, core: Core | None = None) -> None:
        self.core = core or Core()
        self.app = SimpleNamespace(
            state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=self.core))
        )
        self.passed: list[tuple[Any, Any, Any]] = []
        self.middleware = GatewayMiddleware(self.serve)

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append((scope, receive, send))

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: tuple[tuple[bytes, bytes], ...] = OURS,
        piece: int = 7,
        sent: list[dict[str, Any]] | None = None,
    ) -> Reply:
        """Send a request in small pieces and read the answer."""
        pieces = [body[start : start + piece] for start in range(0, len(body), piece)] or [b""]
        messages = iter(
            {"type": "http.request", "body": part, "more_body": number < len(pieces)}
            for number, part in enumerate(pieces, start=1)
        )
        answer = [] if sent is None else sent

        async def receive() -> dict[str, Any]:
            return next(messages)

        async def send(message: Any) -> None:
            answer.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": self.app}
        await self.middleware(scope, receive, send)
        return Reply(answer)


class Meter:
    """An energy meter that can stop answering."""

    gpus = 2

    def __init__(self) -> None:
        self.counted: int | None = 5000

    def read(self) -> int | None:
        return self.counted


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start workers, by default supervised and with a token."""

    def make(
        core: Core | None = None,
        *,
        token: str | None = TOKEN,
        scrape: str | None = None,
        supervised: bool = True,
    ) -> Worker:
        monkeypatch.delenv(TOKEN_FILE, raising=False)
        if scrape is not None:
            (tmp_path / "scrape.token").write_text(scrape)
            monkeypatch.setenv(SCRAPE_TOKEN_FILE, str(tmp_path / "scrape.token"))
        monkeypatch.delenv(RESTART_FILE, raising=False)
        if token is not None:
            (tmp_path / "control.token").write_text(token)
            monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "control.token"))
        if supervised:
            monkeypatch.setenv(RESTART_FILE, str(tmp_path / "restart.json"))
        return Worker(core)

    return make


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Records signals instead of sending them."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    return sent


def test_server_does_not_start_without_a_token(start, tmp_path):
    """Otherwise it would answer every caller, or, with an empty token, callers who send none."""
    for token in ("", " \n"):
        with pytest.raises(ValueError, match=r"control\.token is empty: put a random word in it"):
            start(token=token)
    with pytest.raises(KeyError, match=TOKEN_FILE):
        start(token=None)


EVERY_ROUTE = [
    *ROUTES,
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/"),
    ("POST", "/health/"),
    ("GET", "//health"),
    ("GET", SPECULATION_PATH + "/"),
]


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Bearer " + TOKEN[:-1].encode()),),
        ((b"authorization", b"bearer " + TOKEN.encode()),),
        ((b"authorization", TOKEN.encode()),),
        ((b"authorization", b"Bearer \xff\xfe"),),
        ((b"x-authorization", b"Bearer " + TOKEN.encode()),),
        ((b"authorization", b"Bearer " + SCRAPE.encode()),),
    ],
)
@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
async def test_every_route_but_health_needs_the_control_token(
    start, signals, tmp_path, method, path, headers
):
    """Before the body is read; the scrape token opens the metrics alone."""
    worker = start(scrape=SCRAPE)
    if path == "/metrics" and SCRAPE.encode() in b"".join(value for _, value in headers):
        await passes(worker, {"type": "http", "method": method, "path": path, "headers": headers})
        return
    reply = await worker.ask(method, path, b'{"with_draft": true}', headers=headers)
    assert (reply.status, reply.content) == (401, {"error": "unauthorized"})
    assert (worker.core.asked, worker.passed, signals) == ([], [], [])
    assert not (tmp_path / "restart.json").exists()


async def passes(worker, scope):
    """It passes through untouched: the same objects, and no call of the engine."""
    before, receive, send = dict(scope), object(), object()
    await worker.middleware(scope, receive, send)
    ((passed, *channels),) = worker.passed
    assert passed is scope
    assert channels == [receive, send]
    assert (scope, worker.core.asked) == (before, [])


@pytest.mark.parametrize(
    "scope",
    [
        *(
            {"type": "http", "method": method, "path": path, "headers": OURS}
            for method, path in EVERY_ROUTE[len(ROUTES) :]
        ),
        {"type": "http", "method": "GET", "path": "/health", "headers": ()},
        {"type": "websocket", "path": "/v1/realtime", "headers": OURS},
        {"type": "lifespan"},
    ],
)
async def test_requests_of_a_gateway_pass_through_untouched(start, scope):
    await passes(start(), scope)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/metrics", "/health", "/appliance"])
async def test_behind_a_router_of_others_its_requests_need_no_token(start, monkeypatch, path):
    monkeypatch.setenv(OPEN_ROUTES, "1")
    worker = start()
    await worker.middleware({"type": "http", "method": "POST", "path": path, "headers": ()}, None, None)
    assert len(worker.passed) == 1


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/appliance/other")])
async def test_behind_a_router_of_others_the_plugin_still_needs_the_token(start, monkeypatch, method, path):
    monkeypatch.setenv(OPEN_ROUTES, "1")
    worker = start()
    assert (await worker.ask(method, path, headers=())).status == 401
    assert worker.passed == []
    assert worker.core.asked == []


@pytest.mark.parametrize("chosen", ["true", "0", "yes", " 1"])
def test_server_does_not_start_if_open_routes_is_misspelt(start, monkeypatch, chosen):
    monkeypatch.setenv(OPEN_ROUTES, chosen)
    with pytest.raises(ValueError, match=OPEN_ROUTES):
        start()


async def test_a_websocket_without_the_token_is_closed(start):
    worker, sent = start(), []

    async def send(message):
        sent.append(message)

    await worker.middleware({"type": "websocket", "path": "/v1/realtime", "headers": ()}, None, send)
    assert (sent, worker.passed) == ([{"type": "websocket.close", "code": 1008}], [])


async def test_tokens_are_rotated_without_a_restart(start, tmp_path):
    """Both are accepted while the file has both; a file that is being written changes nothing."""
    worker, path = start(), tmp_path / "control.token"

    async def answers(token: str) -> int:
        headers = ((b"authorization", b"Bearer " + token.encode()),)
        return (await worker.ask("GET", SPECULATION_PATH, headers=headers)).status

    assert [await answers(TOKEN), await answers("next")] == [200, 401]
    path.write_text(f"{TOKEN}\nnext\n")
    assert [await answers(TOKEN), await answers("next")] == [200, 200]
    path.write_text("")
    assert [await answers(TOKEN), await answers("next")] == [200, 200]
    path.write_text("next\n")
    assert [await answers(TOKEN), await answers("next")] == [401, 200]


async def test_refusals_are_counted_in_a_line_a_minute(start, caplog):
    worker = start()
    times = [0.0, 1.0, 59.0, 61.0, 62.0]
    worker.middleware._refusals = middleware.Refusals(iter(times).__next__)
    for _ in times:
        await worker.ask("GET", "/metrics", headers=())
    written = [record.getMessage() for record in caplog.records if record.name == "vllm.appliance"]
    assert written == [f"refused {count} requests without a valid token" for count in (1, 3)]


async def test_api_server_withholds_content_from_its_first_request_on(start, redactions):
    worker = start()
    await worker.middleware({"type": "lifespan"}, None, None)
    assert redactions == []
    await worker.ask("GET", "/metrics", headers=())
    assert len(redactions) == 1


async def test_a_token_file_may_end_with_a_newline(start):
    """As the appliance writes it."""
    assert (await start(token=TOKEN + "\n").ask("GET", SPECULATION_PATH)).status == 200


async def test_a_question_is_passed_to_the_engine(start):
    """As an empty command; the answer is returned unchanged."""
    worker = start()
    reply = await worker.ask("GET", SPECULATION_PATH)
    assert (reply.status, reply.content) == (200, READING)
    assert reply.headers[b"content-type"] == b"application/json"
    assert int(reply.headers[b"content-length"]) == len(reply.body)
    assert worker.core.asked == [(RPC, "{}")]


async def test_a_command_is_passed_to_the_engine(start):
    """Unchanged, in one part or several."""
    worker, text = start(), json.dumps({"table": [[1, 64, 0]], "mode": "target_only"})
    for piece in (1, 9, len(text)):
        reply = await worker.ask("PUT", SPECULATION_PATH, text.encode(), piece=piece)
        assert (reply.status, reply.content) == (200, READING)
    assert worker.core.asked == [(RPC, text)] * 3


async def test_a_command_the_engine_refuses_is_a_bad_request(start):
    """With the engine's reason."""
    refusal = {"error": "not a command: [2] draft tokens are not among [0, 3]"}
    reply = await start(Core(json.dumps(refusal))).ask("PUT", SPECULATION_PATH, b"{}")
    assert (reply.status, reply.content) == (400, refusal)


@pytest.mark.parametrize(
    "core",
    [
        Core(RuntimeError("Call to appliance_speculation method failed: private")),
        Core(ConnectionResetError()),
        Core("no JSON"),
        SimpleNamespace(),
        None,
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_engine_without_commands_is_reported_uncontrollable(start, core, method):
    """An engine of another structure, or one that fails at it, still serves; no detail leaks."""
    worker = start()
    worker.app.state.engine_client.engine_core = core
    reply = await worker.ask(method, SPECULATION_PATH, b"{}")
    assert (reply.status, reply.content["controllable"], reply.content["epoch"]) == (200, False, "")
    (problem,) = reply.content["problems"]
    assert problem.startswith("the engine does not take commands: ")
    assert "private" not in problem


async def test_engine_that_does_not_answer_times_out(start, monkeypatch):
    """A server that waits for a dead engine could not end."""
    monkeypatch.setattr(middleware, "RPC_SECONDS", 0.01)
    worker = start()
    worker.core.call_utility_async = lambda _name, _text: asyncio.Event().wait()
    reply = await worker.ask("GET", SPECULATION_PATH)
    assert (reply.status, reply.content) == (503, {"error": "the engine did not answer within 0.01 s"})


async def test_ending_worker_refuses_commands(start, signals):
    """Its engine may have ended already."""
    worker = start()
    await worker.ask("POST", RESTART_PATH, b'{"with_draft": true}')
    reply = await worker.ask("GET", SPECULATION_PATH)
    assert (reply.status, worker.core.asked) == (503, [])


async def test_a_body_too_long_is_never_a_command(start):
    """It is not even read to its end."""
    worker = start(Core(json.dumps({"error": "not a command"})))
    body = b" " * (LARGEST_BODY + 1) + b"{}" + b" " * LARGEST_BODY
    assert (await worker.ask("PUT", SPECULATION_PATH, body, piece=2**12)).status == 400
    assert worker.core.asked == [(RPC, "")]


async def test_body_that_is_not_utf8_is_refused_by_the_engine(start):
    worker = start()
    await worker.ask("PUT", SPECULATION_PATH, b"\xff{}")
    assert worker.core.asked == [(RPC, "\ufffd{}")]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", SPECULATION_PATH), ("DELETE", SPECULATION_PATH), ("GET", RESTART_PATH), ("PUT", RESTART_PATH)],
)
async def test_no_other_method_does_anything(start, signals, method, path):
    """The answer names the method."""
    worker = start()
    reply = await worker.ask(method, path, b'{"with_draft": true}')
    assert (reply.status, reply.content) == (405, {"error": f"{path} does not accept {method}"})
    assert (worker.core.asked, worker.passed, signals) == ([], [], [])


@pytest.mark.parametrize("with_draft", [True, False])
async def test_restart_stores_its_request_and_ends_the_server(start, signals, tmp_path, with_draft):
    """The supervisor finds a complete request, and no other file."""
    request = {"with_draft": with_draft}
    reply = await start().ask("POST", RESTART_PATH, json.dumps(request).encode())
    assert (reply.status, reply.content) == (202, request)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert json.loads((tmp_path / "restart.json").read_text()) == request
    assert {path.name for path in tmp_path.iterdir()} == {"restart.json", "control.token"}


async def test_a_restart_is_answered_before_the_server_ends(start, monkeypatch, tmp_path):
    """Afterwards it refuses connections; the request is on disk by then."""
    sent: list[dict[str, Any]] = []
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(os, "kill", lambda *_: seen.append((len(sent), (tmp_path / "restart.json").exists())))
    await start().ask("POST", RESTART_PATH, b'{"with_draft": false}', sent=sent)
    assert seen == [(2, True)]


async def test_restart_replaces_an_older_request(start, signals, tmp_path):
    """The last one counts."""
    (tmp_path / "restart.json").write_text('{"with_draft": true} and something longer')
    await start().ask("POST", RESTART_PATH, b'{"with_draft": false}')
    assert json.loads((tmp_path / "restart.json").read_text()) == {"with_draft": False}


async def test_worker_without_a_supervisor_does_not_end_itself(start, signals):
    """It would not come back."""
    reply = await start(supervised=False).ask("POST", RESTART_PATH, b'{"with_draft": true}')
    assert reply.status == 409
    assert "this worker has no supervisor" in reply.content["error"]
    assert signals == []


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"7", b'"with_draft"', b"{", b"\xff", b'{"with_draft": "false"}']
)
async def test_restart_needs_with_draft(start, signals, tmp_path, body):
    """A request without it is refused, and the server continues."""
    reply = await start().ask("POST", RESTART_PATH, body)
    assert (reply.status, reply.content) == (400, {"error": 'send {"with_draft": true} or false'})
    assert signals == []
    assert not (tmp_path / "restart.json").exists()


async def test_tokens_of_a_request_that_was_cut_off_are_answered_by_its_id(start):
    """Whatever its route."""

    class Processor:
        def __init__(self) -> None:
            self.request_states: dict[str, Any] = {}

        def add_request(self, request: Any) -> None:
            self.request_states[request.request_id] = request

    count_sequences(Processor)
    worker = start()

    async def serve(*_: Any) -> None:
        detokenizer = SimpleNamespace(num_output_tokens=lambda: 5)
        sequence = SimpleNamespace(
            request_id="a", external_req_id="resp_one", prompt_len=7, detokenizer=detokenizer
        )
        Processor().add_request(sequence)
        raise asyncio.CancelledError

    worker.middleware._app = serve
    headers = ((b"X-Request-Id", b"one"), *OURS)
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": headers}
    with pytest.raises(asyncio.CancelledError):
        await worker.middleware(scope, None, None)
    reply = await worker.ask("GET", f"{USAGE_PATH}one")
    assert (reply.status, reply.content) == (200, {"prompt_tokens": 7, "completion_tokens": 5})
    assert (await worker.ask("GET", f"{USAGE_PATH}two")).status == 404


async def test_reading_includes_energy(start, monkeypatch):
    """Of as many GPUs as the engine uses, opened once; absent if none measures it."""
    meter, asked = Meter(), []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(middleware, "open_meter", lambda *found: asked.append(found) or meter)
    worker = start()
    worker.app.state.engine_client.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1, world_size_across_dp=2)
    )
    for counted in (5000, 6000):
        meter.counted = counted
        reply = await worker.ask("GET", SPECULATION_PATH)
        assert reply.content == READING | {"energy": {"gpus": 2, "millijoules": counted}}
    meter.counted = None
    assert (await worker.ask("GET", SPECULATION_PATH)).content == READING
    assert asked == [("4,5,6", 2)]


# Its end.


async def leave(worker: Worker) -> None:
    """Start the server, and stop it as its supervisor does."""
    await worker.middleware({"type": "lifespan"}, None, None)
    signal.raise_signal(signal.SIGTERM)
    await until(lambda: worker.middleware._is_leaving)


async def test_stopping_worker_refuses_requests_and_ends_with_the_last_one(start, signals):
    """The header tells gateways that nothing was computed; reads of metrics and health are still answered."""
    worker, release = start(), asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        worker.passed.append((scope, receive, send))
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    worker.middleware = GatewayMiddleware(stream)
    running = asyncio.ensure_future(worker.ask("POST", "/v1/completions"))
    await asyncio.sleep(0)
    worker.middleware._app = worker.serve
    await leave(worker)
    for _ in range(2):
        refused = await worker.ask("POST", "/v1/completions")
        assert (refused.status, refused.headers[b"x-appliance-leaving"]) == (503, b"true")
    assert (await worker.ask("GET", SPECULATION_PATH)).content["leaving"] is True
    await worker.ask("GET", "/metrics", sent=[{"status": 0, "headers": []}])
    assert [scope["path"] for scope, *_ in worker.passed[-1:]] == ["/metrics"]
    assert not signals, "it ended while a request was running"
    release.set()
    assert (await running).status == 200
    await until(lambda: signals == [(os.getpid(), signal.SIGINT)])


async def test_idle_worker_ends_at_once(start, signals):
    worker = start()
    await leave(worker)
    await until(lambda: signals == [(os.getpid(), signal.SIGINT)])


async def test_worker_ends_after_its_drain_time_whatever_runs(start, signals, monkeypatch):
    monkeypatch.setenv(DRAIN_SECONDS, "0")
    worker = start()

    async def hang(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.Event().wait()

    worker.middleware = GatewayMiddleware(hang)
    running = asyncio.ensure_future(worker.ask("POST", "/v1/completions"))
    await asyncio.sleep(0)
    worker.middleware._app = worker.serve
    await leave(worker)
    await until(lambda: signals)
    running.cancel()
