"""
HTTP to the plugin in a worker: ASGI middleware in front of vLLM's own routes.

    GET  /appliance/speculation   table in force, measurements, and digests of the weights
    PUT  /appliance/speculation   apply a table, a probe, or both; answers like GET
    POST /appliance/restart       restart the worker, with its draft, with another, or without
    GET  /appliance/usage/ID      tokens of a request that the gateway cut off, by its `X-Request-Id`

Every call needs the token that both sides read from a file; without such a file these routes do not exist.
Everything else passes through unchanged, and its tokens are counted.
"""

import asyncio
import hmac
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from appliance.infra.settings import process_environment
from appliance.serving.nvml import EnergyMeter, open_meter
from appliance.serving.restart_request import RestartRequest, parse_restart_request
from appliance.serving.vllm.token_counts import TokenCounts
from appliance.serving.worker_protocol import (
    DRAFT_DIGEST,
    RESTART_FILE,
    RESTART_PATH,
    RPC,
    SPECULATION_PATH,
    TARGET_DIGEST,
    TOKEN_FILE,
    USAGE_PATH,
)

LARGEST_BODY = 2**16
RPC_SECONDS = 5.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class SpeculationMiddleware:
    """ASGI middleware; vLLM constructs it with the application only."""

    def __init__(self, app: App) -> None:
        self._app = app
        environment = process_environment()
        self._token = _read_token(environment.get(TOKEN_FILE))
        self._restart_file = environment.get(RESTART_FILE)
        self._serves = _served_digests(environment)
        self._gpus = environment.get("CUDA_VISIBLE_DEVICES")
        self._meters: list[EnergyMeter | None] = []
        """Empty until the first reading; [None] if nothing measures energy."""
        self._is_leaving = False
        self._counts = TokenCounts()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "") if scope["type"] == "http" else ""
        if self._token is None or not path:
            await self._app(scope, receive, send)
            return
        if path not in {SPECULATION_PATH, RESTART_PATH} and not path.startswith(USAGE_PATH):
            with self._counts.counting(_header(scope, b"x-request-id").decode("latin-1")):
                await self._app(scope, receive, send)
            return
        if not self._is_ours(scope):
            await _answer(send, 401, {"error": "the control token is missing or wrong"})
            return
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

    def _is_ours(self, scope: Message) -> bool:
        return hmac.compare_digest(_header(scope, b"authorization"), b"Bearer " + (self._token or b""))

    async def _command(self, scope: Message, send: Send, text: str) -> None:
        if self._is_leaving:
            await _answer(send, 503, {"error": "the worker is restarting"})
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


def _read_token(name: str | None) -> bytes | None:
    if not name:
        return None
    token = Path(name).read_bytes().strip()
    return token or None


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


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
