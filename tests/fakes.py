"""
Stand-ins that can misbehave on request: a worker that speaks vLLM's HTTP, a store that stalls.

The worker is real HTTP on loopback, so disconnects, half-sent frames and dead sockets are real too.
"""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy
from prometheus_client import CollectorRegistry

from appliance.api.refusals import RefusedCallers
from appliance.audit.entry import Entry, encode, format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.store import (
    AuditStore,
    Behind,
    Disposal,
    Head,
    KeptLeaf,
    Leaf,
    OpenRequest,
    StoredCheckpoint,
)
from appliance.control.changes import SpeculationChange
from appliance.errors import AuditUnavailableError, ControlRefusedError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LogSettings
from appliance.serving.dialects.routes import ROUTES
from appliance.serving.vllm.scheduler_control import SchedulerControl
from appliance.serving.worker_protocol import LEAVING, LEAVING_HEADER, SPECULATION_PATH, USAGE_PATH
from appliance.speculation.values import Reason
from tests.leaks import COMPLETION, PROMPT

MODEL = "demo"
CONTROL_TOKEN = "the token"
SPECULATION = {
    "speculative_decoding": {
        "mean_acceptance_length": 2.5,
        "num_spec_steps": 4,
        "num_draft_tokens": 12,
        "num_accepted_draft_tokens": 6,
    }
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17}
ERROR = {"error": {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}}
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="demo"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="demo"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="demo"} 10.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="demo"} 7.0
"""
"""The page of a worker that was started without a draft."""
SPECULATIVE_METRICS = (
    METRICS
    + """\
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 4.0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="demo"} 6.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="2"} 1.0
"""
)
"""The page of a worker that drafts three tokens at a time."""


@dataclass
class FakeWorker:
    """One scripted worker; tests set its fields between requests."""

    pieces: list[str] = field(default_factory=lambda: ["def ", COMPLETION, "(a, b):", "\n"])
    models: list[str] = field(default_factory=lambda: [MODEL])
    lacks: tuple[str, ...] = ()
    """Routes that it was not started for."""
    parents: dict[str, str] = field(default_factory=dict)
    """What the adapters among them adapt."""
    status: int = 200
    error_body: bytes = field(default_factory=lambda: json.dumps(ERROR).encode())
    leaving: bool = False
    """It refuses new requests and finishes the others, as after SIGTERM."""
    breaks_before_answer: bool = False
    """The connection is cut once the request was read, as when the process dies at once."""
    breaks_after: int | None = None
    """Frames after which the connection is cut, as when the process dies."""
    pause_seconds: float = 0.0
    """Silence before each frame."""
    head_seconds: float = 0.0
    """Silence before the head of the answer."""
    freed: asyncio.Event | None = None
    """No head before it is set, where there is one."""
    says_usage: bool = True
    error_frame: bool = False
    write_bytes: int | None = None
    """Cut the stream into network writes of this size, in the middle of frames and characters."""
    script: list[bytes] | None = None
    """The frames of a stream, instead of those made of `pieces`."""
    answer: bytes | None = None
    """The body of a plain answer, instead of the one made of `pieces`."""
    metrics: str = METRICS
    metrics_seconds: float = 0.0
    """Silence before the metrics page."""
    plugin: dict[str, Any] | None = None
    """The status of the speculation plugin; None without the plugin."""
    plugin_token: str = CONTROL_TOKEN
    token: str | None = None
    """What every route but the health check needs, as in a worker of ours; None: as a plain vLLM, none."""
    tls: ssl.SSLContext | None = None
    puts: list[dict[str, Any]] = field(default_factory=list)
    """Commands to the plugin; members of `plugin` take effect at once."""
    steering: SchedulerControl | None = None
    """The real plugin's hooks, which then answer in place of `plugin`."""
    put_status: int = 200
    """Any status but 200 refuses commands."""
    piece_tokens: int = 1
    """Tokens of each piece, as with drafts."""
    counts: bool = False
    """Whether its plugin counts the tokens of requests that were cut off."""
    generated: dict[str, int] = field(default_factory=dict)
    """Tokens so far by request id."""
    serving_ids: set[str] = field(default_factory=set)
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[CIMultiDictProxy[str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Paths of requests without the token."""
    aborted: int = 0
    """Requests whose connection was closed before they were answered."""
    completed: int = 0
    url: str = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, or cut its connection."""
        body = await request.read()
        self.bodies.append(body)
        self.paths.append(request.path)
        self.headers.append(request.headers)
        request_id = request.headers.get("X-Request-Id", "")
        self.serving_ids.add(request_id)
        try:
            return await self.answered(request, json.loads(body))
        finally:
            self.serving_ids.discard(request_id)

    async def answered(self, request: web.Request, asked: dict) -> web.StreamResponse:
        """Answer as the fields say."""
        if self.leaving:
            return web.json_response(LEAVING, status=503, headers={LEAVING_HEADER: "true"})
        if request.path in self.lacks:
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.breaks_before_answer:
            request.transport.abort()
            return web.Response()
        try:
            await asyncio.sleep(self.head_seconds)
            if self.freed is not None:
                await self.freed.wait()
            if self.status != 200:
                return web.Response(status=self.status, body=self.error_body, content_type="application/json")
            if not asked.get("stream"):
                return await self.plain(request)
            return await self.stream(request, asked)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise

    async def plain(self, request: web.Request) -> web.StreamResponse:
        """Answer in one piece, after the time a stream would have taken."""
        for _ in self.pieces if self.pause_seconds else ():
            await asyncio.sleep(self.pause_seconds)
            self.count(request)
        body = self.answer or json.dumps(self.whole(request.path), separators=(",", ":")).encode()
        if self.breaks_after is not None:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(0.03)
            request.transport.abort()
            return response
        self.completed += 1
        return web.Response(body=body, content_type="application/json")

    async def stream(self, request: web.Request, asked: dict) -> web.StreamResponse:
        """Answer frame by frame."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for count, frame in enumerate(self.script or self.frames(request.path, asked)):
            if self.breaks_after is not None and count >= self.breaks_after:
                break
            await asyncio.sleep(self.pause_seconds)
            self.count(request)
            step = self.write_bytes or len(frame)
            for start in range(0, len(frame), step):
                await response.write(frame[start : start + step])
                if self.write_bytes:
                    await asyncio.sleep(0.0005)
        if self.breaks_after is None:
            self.completed += 1
        else:
            await asyncio.sleep(0.03)  # a reset also throws away what the other side has not read yet
            request.transport.abort()
        return response

    def count(self, request: web.Request) -> None:
        """Another piece is generated."""
        request_id = request.headers["X-Request-Id"]
        self.generated[request_id] = self.generated.get(request_id, 0) + self.piece_tokens

    def frames(self, path: str, asked: dict) -> list[bytes]:
        """Return the frames of a stream as the worker sends them."""
        frames: list[dict[str, Any]] = [self.choice(path, piece, None) for piece in self.pieces]
        if self.error_frame:
            frames.append({"error": {"message": "engine died", "type": "x", "param": None, "code": 500}})
        else:
            frames.append(self.choice(path, "", "stop"))
            if self.says_usage and (asked.get("stream_options") or {}).get("include_usage"):
                frames.append({"id": "c", "choices": [], "usage": USAGE, "metrics": SPECULATION})
        return [*(frame_of(frame) for frame in frames), b"data: [DONE]\n\n"]

    def choice(self, path: str, text: str, finish: str | None) -> dict:
        """Return one frame of content."""
        content = {"delta": {"content": text}} if "chat" in path else {"text": text}
        return {
            "id": "c",
            "object": "chat.completion.chunk" if "chat" in path else "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, **content, "finish_reason": finish}],
        }

    def whole(self, path: str) -> dict:
        """Return a plain answer."""
        text = "".join(self.pieces)
        content = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, **content, "finish_reason": "stop"}],
            "usage": USAGE,
            "metrics": SPECULATION,
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeWorker"]:
        """Listen on a free port of loopback for as long as the context lasts."""
        app = web.Application(client_max_size=2**30, middlewares=[self.admit])
        for path in {route.worker_path for route in ROUTES.values()}:
            app.router.add_post(path, self.completions)
        app.router.add_get("/health", _answer(web.Response))
        app.router.add_get("/version", _answer(lambda: web.json_response({"version": "0.32.0"})))
        app.router.add_get("/metrics", self.metrics_page)
        app.router.add_get(USAGE_PATH + "{request_id}", self.usage)
        app.router.add_get("/v1/models", _answer(lambda: web.json_response({"data": self.listed()})))
        control = web.Application(middlewares=[self.admit])
        control.router.add_get(SPECULATION_PATH, self.speculation)
        control.router.add_put(SPECULATION_PATH, self.speculation)
        async with serving_pair(app, control, tls=self.tls) as self.url:
            yield self

    @web.middleware
    async def admit(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        """Refuse callers without the token, if there is one."""
        given = request.headers.get("Authorization")
        if self.token is not None and request.path != "/health" and given != f"Bearer {self.token}":
            self.refused.append(request.path)
            return web.json_response({"error": "unauthorized"}, status=401)
        return await handler(request)

    async def metrics_page(self, _request: web.Request) -> web.Response:
        """The metrics page, after `metrics_seconds`."""
        await asyncio.sleep(self.metrics_seconds)
        return web.Response(text=self.metrics)

    async def speculation(self, request: web.Request) -> web.Response:
        """Answer as the plugin does, to callers with the token."""
        if self.plugin is None and self.steering is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.headers.get("Authorization") != f"Bearer {self.plugin_token}":
            return web.json_response({"error": "the control token is missing or wrong"}, status=401)
        if self.leaving:
            return web.json_response(LEAVING, status=503)
        told = await request.json() if request.method == "PUT" else {}
        self.puts += [told] if told else []
        if told and self.put_status != 200:
            return web.json_response({"error": "not now"}, status=self.put_status)
        if self.steering is not None:
            answer = json.loads(self.steering.command(json.dumps(told), "vllm 0.32.0"))
            return web.json_response(answer, status=400 if "error" in answer else 200)
        self.plugin |= {name: told[name] for name in told if name in self.plugin}
        return web.json_response(self.plugin)

    async def usage(self, request: web.Request) -> web.Response:
        """Answer as the plugin does, once the request has ended."""
        if not self.counts or request.headers.get("Authorization") != f"Bearer {self.plugin_token}":
            return web.json_response({"error": "not counted"}, status=404)
        request_id = request.match_info["request_id"]
        await until(lambda: request_id not in self.serving_ids)
        tokens = self.generated.get(request_id, 0)
        return web.json_response({"prompt_tokens": USAGE["prompt_tokens"], "completion_tokens": tokens})

    def listed(self) -> list[dict[str, Any]]:
        """Return the list of models."""
        return [
            {"id": name, "created": 1, "max_model_len": 2048, "parent": self.parents.get(name)}
            for name in self.models
        ]


@asynccontextmanager
async def serving_pair(
    app: web.Application, control: web.Application, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """A worker's two listeners, on two free ports of loopback that follow each other; yields its URL."""
    host = "127.0.0.1"
    runners = [
        web.AppRunner(each, handler_cancellation=True, shutdown_timeout=0.1) for each in (app, control)
    ]
    try:
        for runner in runners:
            await runner.setup()
        bound = _two_sockets(host)
        for runner, listening in zip(runners, bound, strict=True):
            await web.SockSite(runner, listening, ssl_context=tls).start()
        yield f"{'http' if tls is None else 'https'}://{host}:{bound[0].getsockname()[1]}"
    finally:
        for runner in runners:
            await runner.cleanup()


def _two_sockets(host: str) -> tuple[socket.socket, socket.socket]:
    while True:
        first = socket.create_server((host, 0))
        try:
            return first, socket.create_server((host, first.getsockname()[1] + 1))
        except (OSError, OverflowError):
            first.close()


def uncounted_refusals() -> RefusedCallers:
    """For services whose refused callers no test reads."""
    nothing: Any = None
    return RefusedCallers(
        audit=nothing,
        metrics=Metrics(CollectorRegistry()),
        logger=configure_logs(LogSettings(level="error"), terminal=False),
        clock=lambda: 0.0,
    )


class StallingStore:
    """A real store in front of which entries can be held up or refused, by their type."""

    def __init__(self, store: AuditStore) -> None:
        self.store = store
        self.held: set[str] = set()
        """Types whose commit waits until `release`."""
        self.refused: set[str] = set()
        """Types whose commit fails."""
        self.waiting = threading.Event()
        """Set while a commit is held up."""
        self._released = threading.Event()

    def release(self) -> None:
        """Commit all entries from now on."""
        self.held.clear()
        self.refused.clear()
        self._released.set()

    def append(self, leaves: Sequence[Leaf], *, expected: Head, new: Head) -> None:
        """Commit, late or never."""
        self._let_through(leaves)
        self.store.append(leaves, expected=expected, new=new)

    def append_behind(self, size: int, make: Behind) -> None:
        """Commit behind what others added, late or never."""

        def made(head: Head, newer: Sequence[Leaf]) -> tuple[Sequence[Leaf], Head]:
            leaves, new = make(head, newer)
            self._let_through(leaves)
            return leaves, new

        self.store.append_behind(size, made)

    def _let_through(self, leaves: Sequence[Leaf]) -> None:
        types = {leaf.type for leaf in leaves}
        if types & self.held:
            self.waiting.set()
            self._released.wait(10)
            self.waiting.clear()
        if types & self.refused:
            message = "the disk is full"
            raise AuditUnavailableError(message)

    @property
    def shared(self) -> bool:
        """Whether others may write it."""
        return self.store.shared

    def open_requests(self) -> list[OpenRequest]:
        """Return requests without an end, with their gateways."""
        return self.store.open_requests()

    def beat(self, gateway: str, now: float) -> dict[str, float]:
        """Note that a gateway is alive."""
        return self.store.beat(gateway, now)

    def writers(self) -> dict[str, float]:
        """Return when gateways were last alive."""
        return self.store.writers()

    def head(self) -> Head:
        """Return the current head."""
        return self.store.head()

    def leaves(self, start: int, end: int) -> list[Leaf]:
        """Return leaves by index."""
        return self.store.leaves(start, end)

    def hashes(self, level: int, start: int, end: int) -> list[bytes]:
        """Return hashes of a level."""
        return self.store.hashes(level, start, end)

    def disposal(self) -> Disposal:
        """Return how far entries were disposed of."""
        return self.store.disposal()

    def kept(self, start: int, end: int) -> list[KeptLeaf]:
        """Return leaves that outlived a disposal."""
        return self.store.kept(start, end)

    def leaf_by_request(self, request_id: str) -> list[Leaf]:
        """Return everything about one request."""
        return self.store.leaf_by_request(request_id)

    def open_intents(self) -> list[str]:
        """Return requests without an end."""
        return self.store.open_intents()

    def save_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Keep a checkpoint."""
        self.store.save_checkpoint(checkpoint)

    def latest_checkpoint(self) -> StoredCheckpoint | None:
        """Return the newest checkpoint."""
        return self.store.latest_checkpoint()


def audit_fields(entry_type: EntryType, fields: dict[str, Any]) -> dict[str, Any]:
    """
    Return the fields that an entry would have in the log.

    Raises:
        AuditEntryError: the log would refuse the entry.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    encode(
        Entry(log="x/y", id=new_entry_id(0, bytes(10)), type=entry_type, time=format_time(0), fields=given)
    )
    return given


@dataclass(frozen=True, kw_only=True)
class FakeBucket:
    """The control view of one batch bucket."""

    bucket: int = 1
    draft_tokens: int = 3
    reason: Reason = Reason.HEALTHY
    break_even: float | None = 1.31
    break_evens: dict[int, float] = field(default_factory=lambda: {3: 1.31})
    payoff: float | None = 0.25
    tokens_per_second: dict[int, float] = field(default_factory=lambda: {3: 118.04, 0: 78.0})


@dataclass(frozen=True, kw_only=True)
class FakeView:
    """The control view of one worker."""

    since: float = 1_800_000_000.0
    buckets: tuple[FakeBucket, ...] = (FakeBucket(), FakeBucket(bucket=2, break_even=None, payoff=None))
    exploration_share: float = 0.004
    controllable: bool = True
    problems: tuple[str, ...] = ()


class FakeControl:
    """A control loop that records requests, and can refuse them."""

    def __init__(self) -> None:
        self.views: dict[str, FakeView] = {}
        self.changes: list[SpeculationChange] = []
        self.refusal: str | None = None
        self.recycles: list[dict[str, Any]] = []

    def view(self, worker_id: str) -> FakeView | None:
        """Its view of a worker."""
        return self.views.get(worker_id)

    def events(self, after: int) -> tuple[SpeculationChange, ...]:
        """The changes after a number."""
        return tuple(change for change in self.changes if change.sequence > after)

    def request_recycle(self, worker_id: str, *, with_draft: bool, note: str, actor: str) -> None:
        """Record a requested recycle."""
        if self.refusal is not None:
            raise ControlRefusedError(self.refusal)
        self.recycles.append({"worker": worker_id, "with_draft": with_draft, "note": note, "actor": actor})


def chat(**more: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], **more}


def text(**more: Any) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"model": MODEL, "prompt": PROMPT, **more}


async def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for is in another process or thread
            await asyncio.sleep(0.01)


def frame_of(content: dict[str, Any]) -> bytes:
    """Return one frame as vLLM spells it."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _answer(make):
    async def handler(_request: web.Request) -> web.Response:
        return make()

    return handler
