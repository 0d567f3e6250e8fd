"""
ASGI middleware in front of vLLM's routes: lets only gateways through, and counts the tokens of requests.

    GET /appliance/usage/ID   tokens of a request that the gateway cut off, by its `X-Request-Id`

It controls nothing: the listener in the engine process does (`serving.vllm.listener`).

A worker that receives SIGTERM refuses new requests at once, so that gateways send them to others, and its
server ends when the running ones are finished.  vLLM by itself would answer 500 from there on.  Whatever
else it answers until then has a header that tells the gateways.

Every route, vLLM's too, needs the control token; `/health` needs none, and `/metrics` also accepts the
scrape token.  In a worker that others route to (`APPLIANCE_OPEN_ROUTES=1`) only the plugin's routes need the
token.  Tokens are read from files, which may change.  Fails closed: without a token the server does not
start.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from appliance.infra.settings import process_environment
from appliance.serving.vllm.redaction import redact_logs
from appliance.serving.vllm.token_counts import TokenCounts
from appliance.serving.vllm.token_file import Refusals, TokenFile
from appliance.serving.worker_protocol import (
    DRAIN_SECONDS,
    LEAVING,
    LEAVING_HEADER,
    OPEN_ROUTES,
    SCRAPE_TOKEN_FILE,
    TOKEN_FILE,
    USAGE_PATH,
)

HEALTH_PATH, METRICS_PATH = "/health", "/metrics"
PLUGIN_PATHS = "/appliance/"
UNAUTHORISED = {"error": "unauthorized"}
LEAVES = (LEAVING_HEADER.encode(), b"true")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


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
        elif scope["type"] == "http" and path.startswith(USAGE_PATH):
            await self._answer_usage(scope, send)
        elif self._is_leaving and scope.get("method") == "POST":
            await _answer(send, 503, LEAVING, (LEAVES, (b"connection", b"close")))
        else:
            await self._serve(scope, receive, _telling(send) if self._is_leaving else send)

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

    async def _answer_usage(self, scope: Message, send: Send) -> None:
        path = scope["path"]
        if scope["method"] != "GET":
            await _answer(send, 405, {"error": f"{path} does not accept {scope['method']}"})
            return
        usage = await self._counts.read(path.removeprefix(USAGE_PATH))
        await _answer(send, 404 if usage is None else 200, usage or {"error": "it was not counted"})


def _telling(send: Send) -> Send:
    """Add to an answer that the worker is stopping."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], LEAVES]
        await send(message)

    return tell


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


async def _answer(
    send: Send, status: int, content: dict[str, Any], more: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
