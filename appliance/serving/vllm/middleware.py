"""
HTTP to the plugin in a worker: middleware that vLLM puts in front of its own routes.

    GET  /appliance/speculation   what is in force, what was measured, and which weights do it
    PUT  /appliance/speculation   a table, a probe, or both; answers like GET
    POST /appliance/restart       start the worker anew, with its draft, with another, or without

Every call needs the token both sides read from a file; without such a file none of the routes
exists.  Everything else passes through untouched.
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
from appliance.serving.energy import EnergyMeter, open_meter
from appliance.serving.restart_request import Wish, parse_wish
from appliance.serving.worker_protocol import (
    DRAFT_DIGEST,
    RESTART_FILE,
    RESTART_PATH,
    RPC,
    SPECULATION_PATH,
    TARGET_DIGEST,
    TOKEN_FILE,
)

LARGEST_BODY = 2**16
RPC_SECONDS = 5.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class SpeculationMiddleware:
    """ASGI middleware; vLLM makes it with nothing but the application it goes in front of."""

    def __init__(self, app: App) -> None:
        self._app = app
        environment = process_environment()
        self._token = _read_token(environment.get(TOKEN_FILE))
        self._wish = environment.get(RESTART_FILE)
        self._serves = _what_is_served(environment)
        self._gpus = environment.get("CUDA_VISIBLE_DEVICES")
        self._meters: list[EnergyMeter | None] = []
        """One, once it was looked for; of no use where nothing measures energy."""
        self._is_leaving = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer our own routes, pass on all others."""
        path = scope.get("path", "") if scope["type"] == "http" else ""
        if self._token is None or path not in {SPECULATION_PATH, RESTART_PATH}:
            await self._app(scope, receive, send)
            return
        if not self._is_ours(scope):
            await _answer(send, 401, {"error": "the control token is missing or wrong"})
            return
        asked = (scope["method"], path)
        if asked == ("GET", SPECULATION_PATH):
            await self._command(scope, send, "{}")
        elif asked == ("PUT", SPECULATION_PATH):
            await self._command(scope, send, await _read(receive))
        elif asked == ("POST", RESTART_PATH):
            await self._restart(await _read(receive), send)
        else:
            await _answer(send, 405, {"error": f"{scope['method']} is not for {path}"})

    def _is_ours(self, scope: Message) -> bool:
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + (self._token or b""))

    async def _command(self, scope: Message, send: Send, text: str) -> None:
        if self._is_leaving:
            await _answer(send, 503, {"error": "the worker is ending, to be started anew"})
            return
        try:
            core = scope["app"].state.engine_client.engine_core
            # An engine that is gone never answers, and a call that waits for it would keep the server
            # from ending.
            async with asyncio.timeout(RPC_SECONDS):
                answer = json.loads(await core.call_utility_async(RPC, text))
        except TimeoutError:
            await _answer(send, 503, {"error": f"the engine did not answer within {RPC_SECONDS:g} s"})
            return
        except Exception as error:  # noqa: BLE001 - an engine made differently; said, not thrown
            problem = f"the engine does not take commands: {type(error).__name__}"
            answer = {"controllable": False, "problems": [problem], "engine": "", "epoch": ""}
        answer |= self._serves
        if (energy := self._read_energy(scope)) is not None:
            answer["energy"] = energy
        await _answer(send, 400 if "error" in answer else 200, answer)

    def _read_energy(self, scope: Message) -> dict[str, int] | None:
        """What the engine's GPUs have taken; None where nothing measures it."""
        if not self._meters:
            try:
                config = scope["app"].state.engine_client.vllm_config
                self._meters = [open_meter(self._gpus, config.parallel_config.world_size_across_dp)]
            except AttributeError:  # an engine made differently
                self._meters = [None]
        meter = self._meters[0]
        millijoules = meter.read() if meter is not None else None
        if meter is None or millijoules is None:
            return None
        return {"gpus": meter.gpus, "millijoules": millijoules}

    async def _restart(self, text: str, send: Send) -> None:
        wish = _parse_wish(text)
        if wish is None:
            await _answer(send, 400, {"error": 'send {"with_draft": true} or false'})
            return
        if self._wish is None:
            await _answer(send, 409, {"error": "nobody supervises this worker, so it would not come back"})
            return
        path = Path(self._wish)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(wish.body()), encoding="utf-8")
        temporary.replace(path)
        self._is_leaving = True
        await _answer(send, 202, wish.body())
        # Only after the answer: from here on the server drains and refuses connections.
        os.kill(os.getpid(), signal.SIGTERM)


def _read_token(name: str | None) -> bytes | None:
    if not name:
        return None
    token = Path(name).read_bytes().strip()
    return token or None


def _parse_wish(text: str) -> Wish | None:
    try:
        return parse_wish(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _what_is_served(environment: Mapping[str, str]) -> dict[str, str]:
    """The digests a supervisor found before it started us; nothing where none did."""
    target = environment.get(TARGET_DIGEST)
    return {"target": target, "draft": environment.get(DRAFT_DIGEST, "")} if target else {}


async def _read(receive: Receive) -> str:
    body = b""
    while len(body) <= LARGEST_BODY:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body.decode("utf-8", "replace")
    return ""  # no command is that long: it is refused as none


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
