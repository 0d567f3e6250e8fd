"""Which calls reach vLLM, and how a worker ends."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.serving.vllm.middleware import GatewayMiddleware
from appliance.serving.vllm.token_counts import count_sequences
from appliance.serving.vllm.token_file import Refusals
from appliance.serving.worker_protocol import (
    DRAIN_SECONDS,
    OPEN_ROUTES,
    RESTART_PATH,
    SCRAPE_TOKEN_FILE,
    SPECULATION_PATH,
    TOKEN_FILE,
    USAGE_PATH,
)
from tests.fakes import until

TOKEN, SCRAPE = "0123456789abcdef", "fedcba9876543210"
OURS = ((b"authorization", b"Bearer " + TOKEN.encode()),)
USAGE = f"{USAGE_PATH}one"


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

    def __init__(self) -> None:
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

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await self.middleware(scope, receive, send)
        return Reply(answer)


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start workers, by default with a token."""

    def make(*, token: str | None = TOKEN, scrape: str | None = None) -> Worker:
        monkeypatch.delenv(TOKEN_FILE, raising=False)
        if scrape is not None:
            (tmp_path / "scrape.token").write_text(scrape)
            monkeypatch.setenv(SCRAPE_TOKEN_FILE, str(tmp_path / "scrape.token"))
        if token is not None:
            (tmp_path / "control.token").write_text(token)
            monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "control.token"))
        return Worker()

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
    ("GET", USAGE),
    ("GET", SPECULATION_PATH),
    ("PUT", SPECULATION_PATH),
    ("POST", RESTART_PATH),
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
async def test_every_route_but_health_needs_the_control_token(start, signals, method, path, headers):
    """Before the body is read; the scrape token opens the metrics alone."""
    worker = start(scrape=SCRAPE)
    if path == "/metrics" and SCRAPE.encode() in b"".join(value for _, value in headers):
        await passes(worker, {"type": "http", "method": method, "path": path, "headers": headers})
        return
    reply = await worker.ask(method, path, b'{"with_draft": true}', headers=headers)
    assert (reply.status, reply.content) == (401, {"error": "unauthorized"})
    assert (worker.passed, signals) == ([], [])


async def passes(worker, scope):
    """It passes through untouched: the same objects."""
    before, receive, send = dict(scope), object(), object()
    await worker.middleware(scope, receive, send)
    ((passed, *channels),) = worker.passed
    assert passed is scope
    assert channels == [receive, send]
    assert scope == before


@pytest.mark.parametrize(
    "scope",
    [
        *(
            {"type": "http", "method": method, "path": path, "headers": OURS}
            for method, path in EVERY_ROUTE[1:]
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


@pytest.mark.parametrize(
    ("method", "path"), [("GET", USAGE), ("GET", SPECULATION_PATH), ("GET", "/appliance/other")]
)
async def test_behind_a_router_of_others_the_plugin_still_needs_the_token(start, monkeypatch, method, path):
    monkeypatch.setenv(OPEN_ROUTES, "1")
    worker = start()
    assert (await worker.ask(method, path, headers=())).status == 401
    assert worker.passed == []


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
        return (await worker.ask("GET", USAGE, headers=headers)).status

    assert [await answers(TOKEN), await answers("next")] == [404, 401]
    path.write_text(f"{TOKEN}\nnext\n")
    assert [await answers(TOKEN), await answers("next")] == [404, 404]
    path.write_text("")
    assert [await answers(TOKEN), await answers("next")] == [404, 404]
    path.write_text("next\n")
    assert [await answers(TOKEN), await answers("next")] == [401, 404]


async def test_refusals_are_counted_in_a_line_a_minute(start, caplog):
    worker = start()
    times = [0.0, 1.0, 59.0, 61.0, 62.0]
    worker.middleware._refusals = Refusals(iter(times).__next__)
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
    assert (await start(token=TOKEN + "\n").ask("GET", USAGE)).status == 404


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
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    await worker.middleware(
        {"type": "http", "method": "GET", "path": "/metrics", "headers": OURS}, None, send
    )
    ((scope, _, answer),) = worker.passed[-1:]
    await answer({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    assert (scope["path"], told[0]["headers"]) == (
        "/metrics",
        [(b"a", b"b"), (b"x-appliance-leaving", b"true")],
    )
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
