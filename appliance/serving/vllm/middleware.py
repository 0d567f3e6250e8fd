"""
ASGI middleware in front of vLLM's routes: lets only gateways through, and answers for the plugin.

    GET  /appliance/speculation   table in force, measurements, and digests of the weights
    PUT  /appliance/speculation   apply a table, a probe, or both; answers like GET
    POST /appliance/restart       restart the worker, with its draft, with another, or without
    GET  /appliance/usage/ID      tokens of a request that the gateway cut off, by its `X-Request-Id`

A worker that receives SIGTERM refuses new requests at once, so that gateways send them to others, and its
server ends when the running ones are finished.  vLLM by itself would answer 500 from there on.

Every route, vLLM's too, needs the control token; `/health` needs none, and `/metrics` also accepts the
scrape token.  In a worker that others route to (`APPLIANCE_OPEN_ROUTES=1`) only the plugin's routes need the
token.  Tokens are read from files, which may change.  Fails closed: without a token the server does not
start.  The tokens of requests to vLLM's routes are counted.
"""

import asyncio
import hmac
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from appliance.infra.settings import process_environment
from appliance.serving.nvml import EnergyMeter, open_meter
from appliance.serving.restart_request import RestartRequest, parse_restart_request
from appliance.serving.vllm.redaction import LOGGER, redact_logs
from appliance.serving.vllm.token_counts import TokenCounts
from appliance.serving.worker_protocol import (
    DRAFT_DIGEST,
    DRAIN_SECONDS,
    LEAVING_HEADER,
    OPEN_ROUTES,
    RESTART_FILE,
    RESTART_PATH,
    RPC,
    SCRAPE_TOKEN_FILE,
    SPECULATION_PATH,
    TARGET_DIGEST,
    TOKEN_FILE,
    USAGE_PATH,
)
from appliance.tenancy.identity.files import stamp

HEALTH_PATH, METRICS_PATH = "/health", "/metrics"
PLUGIN_PATHS = "/appliance/"
UNAUTHORISED = {"error": "unauthorized"}
SILENT_SECONDS = 60.0
"""Time between two log lines about refused requests."""
LEAVING = {"error": "the worker is stopping", "leaving": True}
LARGEST_BODY = 2**16
RPC_SECONDS = 5.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class TokenFile:
    """
    The tokens in a file, one a line: two while they are being rotated.

    Raises OSError if it cannot be read, ValueError if it is empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = stamp([path])
        self._expected = self._read()

    def accepts(self, authorization: bytes) -> bool:
        self._renew()
        # All of them, so that the time does not depend on which one it is.
        return sum(hmac.compare_digest(authorization, expected) for expected in self._expected) > 0

    def _renew(self) -> None:
        now = stamp([self._path])
        if now == self._stamp:
            return
        self._stamp = now
        with suppress(OSError, ValueError):  # half-written: the tokens that were read stay valid
            self._expected = self._read()

    def _read(self) -> list[bytes]:
        lines = self._path.read_bytes().splitlines()
        expected = [b"Bearer " + line.strip() for line in lines if line.strip()]
        if not expected:
            message = f"the token file {self._path} is empty: put a random word in it"
            raise ValueError(message)
        return expected


class Refusals:
    """Logs how many requests were refused, at most once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._last: float | None = None

    def add(self) -> None:
        self._count += 1
        now = self._clock()
        if self._last is None or now - self._last >= SILENT_SECONDS:
            logger = logging.getLogger(LOGGER)  # noqa: TID251 - the worker's log
            logger.warning("refused %d requests without a valid token", self._count)
            self._count, self._last = 0, now


class GatewayMiddleware:
    """ASGI middleware; vLLM constructs it with the application only."""

    def __init__(self, app: App) -> None:
        self._app = app
        environment = process_environment()
        self._is_open = _are_routes_open(environment)
        self._control = TokenFile(Path(environment[TOKEN_FILE]))
        scrape = environment.get(SCRAPE_TOKEN_FILE)
        self._scrape = TokenFile(Path(scrape)) if scrape else None
        self._refusals = Refusals(time.monotonic)
        self._restart_file = environment.get(RESTART_FILE)
        self._serves = _served_digests(environment)
        self._gpus = environment.get("CUDA_VISIBLE_DEVICES")
        self._meters: list[EnergyMeter | None] = []
        """Empty until the first reading; [None] if nothing measures energy."""
        self._is_leaving = False
        self._drain_seconds = float(environment.get(DRAIN_SECONDS, "30"))
        self._running = 0  # requests to vLLM's own routes
        self._is_idle = asyncio.Event()
        self._drained: asyncio.Task[None] | None = None
        self._counts = TokenCounts()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            # The server starts, and has set its own handler: SIGINT ends it in the same way.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave)
            await self._app(scope, receive, send)
            return
        redact_logs()
        path = scope["path"]
        if not self._is_admitted(path, scope):
            self._refusals.add()
            await _refuse(scope, send)
        elif scope["type"] == "http" and (
            path in {SPECULATION_PATH, RESTART_PATH} or path.startswith(USAGE_PATH)
        ):
            await self._answer_plugin(scope, receive, send)
        elif self._is_leaving and scope.get("method") == "POST":
            await _answer(send, 503, LEAVING, ((LEAVING_HEADER.encode(), b"true"), (b"connection", b"close")))
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        self._running += 1
        try:
            with self._counts.counting(_header(scope, b"x-request-id").decode("latin-1")):
                await self._app(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    def _leave(self) -> None:
        self._is_leaving = True
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """End the server once no request is running, or after the drain time; vLLM then ends the others."""
        if self._running:
            self._is_idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._drain_seconds):
                    await self._is_idle.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def _is_admitted(self, path: str, scope: Message) -> bool:
        if path == HEALTH_PATH or (self._is_open and not path.startswith(PLUGIN_PATHS)):
            return True
        given = _header(scope, b"authorization")
        if path == METRICS_PATH and self._scrape is not None and self._scrape.accepts(given):
            return True
        return self._control.accepts(given)

    async def _answer_plugin(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"]
        route = (scope["method"], path)
        if route == ("GET", SPECULATION_PATH):
            await self._command(scope, send, "{}")
        elif route == ("PUT", SPECULATION_PATH):
            await self._command(scope, send, await _read(receive))
        elif route == ("POST", RESTART_PATH):
            await self._restart(await _read(receive), send)
        elif scope["method"] == "GET" and path.startswith(USAGE_PATH):
            usage = await self._counts.read(path.removeprefix(USAGE_PATH))
            await _answer(send, 404 if usage is None else 200, usage or {"error": "it was not counted"})
        else:
            await _answer(send, 405, {"error": f"{path} does not accept {scope['method']}"})

    async def _command(self, scope: Message, send: Send, text: str) -> None:
        if self._is_leaving:
            await _answer(send, 503, LEAVING)
            return
        try:
            core = scope["app"].state.engine_client.engine_core
            # An engine that has died never answers, and a call that waits for it would keep the server
            # from ending.
            async with asyncio.timeout(RPC_SECONDS):
                answer = json.loads(await core.call_utility_async(RPC, text))
        except TimeoutError:
            await _answer(send, 503, {"error": f"the engine did not answer within {RPC_SECONDS:g} s"})
            return
        except Exception as error:  # noqa: BLE001 - an engine of another structure; reported, not raised
            problem = f"the engine does not take commands: {type(error).__name__}"
            answer = {"controllable": False, "problems": [problem], "engine": "", "epoch": ""}
        answer |= self._serves
        if (energy := self._read_energy(scope)) is not None:
            answer["energy"] = energy
        await _answer(send, 400 if "error" in answer else 200, answer)

    def _read_energy(self, scope: Message) -> dict[str, int] | None:
        if not self._meters:
            try:
                config = scope["app"].state.engine_client.vllm_config
                self._meters = [open_meter(self._gpus, config.parallel_config.world_size_across_dp)]
            except AttributeError:  # an engine of another structure
                self._meters = [None]
        meter = self._meters[0]
        millijoules = meter.read() if meter is not None else None
        if meter is None or millijoules is None:
            return None
        return {"gpus": meter.gpus, "millijoules": millijoules}

    async def _restart(self, text: str, send: Send) -> None:
        request = _parse_request(text)
        if request is None:
            await _answer(send, 400, {"error": 'send {"with_draft": true} or false'})
            return
        if self._restart_file is None:
            await _answer(send, 409, {"error": "this worker has no supervisor, so it would not come back"})
            return
        path = Path(self._restart_file)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(request.body()), encoding="utf-8")
        temporary.replace(path)
        self._is_leaving = True
        await _answer(send, 202, request.body())
        # After the answer, because from here on the server drains and refuses connections.
        os.kill(os.getpid(), signal.SIGTERM)


def _header(scope: Message, wanted: bytes) -> bytes:
    return next((bytes(value) for name, value in scope["headers"] if name.lower() == wanted), b"")


async def _refuse(scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, 401, UNAUTHORISED)


def _are_routes_open(environment: Mapping[str, str]) -> bool:
    chosen = environment.get(OPEN_ROUTES, "")
    if chosen not in {"", "1"}:
        message = f"{OPEN_ROUTES} is {chosen!r}: set it to 1, or leave it out"
        raise ValueError(message)
    return chosen == "1"


def _parse_request(text: str) -> RestartRequest | None:
    try:
        return parse_restart_request(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _served_digests(environment: Mapping[str, str]) -> dict[str, str]:
    """The digests that the supervisor computed before the start; empty without a supervisor."""
    target = environment.get(TARGET_DIGEST)
    return {"target": target, "draft": environment.get(DRAFT_DIGEST, "")} if target else {}


async def _read(receive: Receive) -> str:
    body = b""
    while len(body) <= LARGEST_BODY:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body.decode("utf-8", "replace")
    return ""  # longer than any command: refused as malformed


async def _answer(
    send: Send, status: int, content: dict[str, Any], more: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
