"""
HTTP listener of the plugin in the engine process: reads and controls the scheduler, restarts the worker.

    GET  /appliance/speculation   table in force, measurements, and digests of the weights
    PUT  /appliance/speculation   apply a table, a probe, or both; answers like GET
    POST /appliance/restart       restart the worker, with its draft, with another, or without

It has one thread of its own, and no step waits for a socket: a step and a command wait for each other only
while the other reads or writes the scheduler's table and figures (`scheduler_control`).  Connections are
accepted at a limited rate, because every thread of a process shares its interpreter; beyond the maximum the
oldest is closed, so that silent clients do not keep gateways out.

Every request needs the control token, from a file that may change.  Fails closed: without a token the engine
does not start.  While its port is in use the engine serves, and gateways report that it cannot be controlled.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any

from appliance.infra.settings import split_host
from appliance.serving.nvml import EnergyMeter, open_meter
from appliance.serving.restart_request import RestartRequest, parse_restart_request
from appliance.serving.vllm.redaction import LOGGER
from appliance.serving.vllm.token_file import Refusals, TokenFile
from appliance.serving.worker_protocol import (
    CONTROL_ADDRESS,
    CONTROL_CERTIFICATE_FILE,
    CONTROL_CLIENT_CA_FILE,
    CONTROL_KEY_FILE,
    DRAFT_DIGEST,
    LEAVING,
    RESTART_FILE,
    RESTART_PATH,
    SPECULATION_PATH,
    TARGET_DIGEST,
    TOKEN_FILE,
)
from appliance.tenancy.identity.files import stamp

MAX_CONNECTIONS = 32
ACCEPT_SECONDS = 0.01
"""Time between two accepted connections."""
LARGEST_HEAD = LARGEST_BODY = 2**16
IO_SECONDS = 5.0
"""Maximum time for a handshake, for a head (silence between two requests included), a body, or an answer."""
BIND_SECONDS = 1.0
"""Time between two attempts to listen on a port that is in use."""
RENEW_SECONDS = 10.0
"""Time between two looks for changed certificate files."""
METHODS = {SPECULATION_PATH: ("GET", "PUT"), RESTART_PATH: ("POST",)}

Answer = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlledEngine:
    """What the listener needs of its engine."""

    command: Callable[[str], str]
    """JSON command in, JSON answer out; TimeoutError if the engine does not let it in."""
    gpus: int | None
    """That it computes on; None if unknown."""
    server: int | None
    """Process id of the HTTP server that SIGTERM ends, and the engine with it; None if unknown."""


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: Mapping[bytes, bytes]
    """Names in lower case."""


def start_listener(engine: ControlledEngine, environment: Mapping[str, str]) -> "ControlListener | None":
    """Listen, if the environment names an address; raises ValueError, KeyError or OSError for its files."""
    if not (address := environment.get(CONTROL_ADDRESS)):
        return None
    listener = ControlListener(engine, environment)
    listener.start(*split_host(address))
    return listener


async def _bind(host: str, port: int) -> socket.socket:
    """Once the port is free."""
    for attempt in count():
        try:
            return _bind_now(host, port)
        except OSError as error:
            if not attempt:
                logger = logging.getLogger(LOGGER)  # noqa: TID251 - the worker's log
                text = "cannot listen on port %d of %s; until then no gateway controls this worker: %s"
                logger.error(text, port, host, error)  # noqa: TRY400
            await asyncio.sleep(BIND_SECONDS)
    raise AssertionError


def _bind_now(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)


class ControlListener:
    def __init__(self, engine: ControlledEngine, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._token = TokenFile(Path(environment[TOKEN_FILE]))
        self._tls = _Tls.of(environment)
        self._refusals = Refusals(time.monotonic)
        self._restart_file = environment.get(RESTART_FILE)
        self._serves = _served_digests(environment)
        self._gpus = environment.get("CUDA_VISIBLE_DEVICES")
        self._meters: list[EnergyMeter | None] = []
        """Empty until the first reading; [None] if nothing measures energy."""
        self._is_leaving = False
        self._open: dict[asyncio.Task[None], None] = {}
        """Oldest first."""

    def start(self, host: str, port: int) -> None:
        """Listen in a thread until the process ends."""

        async def run() -> None:
            await self.serve(await _bind(host, port))

        threading.Thread(target=lambda: asyncio.run(run()), name="appliance-control", daemon=True).start()

    async def serve(self, bound: socket.socket) -> None:
        bound.settimeout(0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._accept(bound))
            if self._tls is not None:
                tasks.create_task(self._tls.keep_renewed())

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(OSError):  # the client has left already, or there are too many files
                connection, _ = await loop.sock_accept(bound)
                if len(self._open) >= MAX_CONNECTIONS:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    oldest.cancel()
                task = loop.create_task(self._converse(connection))
                self._open[task] = None
                task.add_done_callback(lambda ended: self._open.pop(ended, None))
            await asyncio.sleep(ACCEPT_SECONDS)

    async def _converse(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LARGEST_HEAD)
        protocol = asyncio.StreamReaderProtocol(reader)
        tls = None if self._tls is None else self._tls.context
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(IO_SECONDS):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
            transport.set_write_buffer_limits(0)  # `drain` then waits for all of an answer
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            while await self._exchange(reader, writer):
                pass
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            pass  # it left, was silent, or speaks another protocol
        finally:
            if transport is None:
                connection.close()
            else:
                transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False if it was the last one of its connection."""
        async with asyncio.timeout(IO_SECONDS):
            request = _parse_head(await reader.readuntil(b"\r\n\r\n"))
        length = _body_length(request.headers)
        if length is None:
            await _send(writer, 411, {"error": "send a Content-Length"}, last=True)
            return False
        if length > LARGEST_BODY:
            error = {"error": f"the body is longer than {LARGEST_BODY} bytes"}
            await _send(writer, 413, error, last=True)
            return False
        async with asyncio.timeout(IO_SECONDS):
            body = await reader.readexactly(length)
        if not self._token.accepts(request.headers.get(b"authorization", b"")):
            self._refusals.add()
            await _send(writer, 401, {"error": "unauthorized"}, last=True)
            return False
        status, content = self.answer(request.method, request.path, body.decode("utf-8", "replace"))
        last = request.headers.get(b"connection", b"").lower() == b"close"
        try:
            await _send(writer, status, content, last=last)
        finally:
            if status == HTTPStatus.ACCEPTED and self._engine.server is not None:
                # After the answer, because from here on the server drains.
                with suppress(ProcessLookupError):
                    os.kill(self._engine.server, signal.SIGTERM)
        return not last

    def answer(self, method: str, path: str, text: str) -> Answer:
        """Of a caller with the token; the server is ended after the answer to a restart."""
        if path not in METHODS:
            return 404, {"error": f"there is no {path} here"}
        if method not in METHODS[path]:
            return 405, {"error": f"{path} does not accept {method}"}
        if path == RESTART_PATH:
            return self._restart(text)
        if self._is_leaving:
            return 503, LEAVING
        return self._command("{}" if method == "GET" else text)

    def _command(self, text: str) -> Answer:
        try:
            answer: dict[str, Any] = json.loads(self._engine.command(text))
        except TimeoutError as error:
            return 503, {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - an engine of another structure; reported, not raised
            problem = f"the engine does not take commands: {type(error).__name__}"
            answer = {"controllable": False, "problems": [problem], "engine": "", "epoch": ""}
        answer |= self._serves
        if (energy := self._read_energy()) is not None:
            answer["energy"] = energy
        return 400 if "error" in answer else 200, answer

    def _read_energy(self) -> dict[str, int] | None:
        if not self._meters:
            gpus = self._engine.gpus
            self._meters = [None if gpus is None else open_meter(self._gpus, gpus)]
        meter = self._meters[0]
        millijoules = meter.read() if meter is not None else None
        if meter is None or millijoules is None:
            return None
        return {"gpus": meter.gpus, "millijoules": millijoules}

    def _restart(self, text: str) -> Answer:
        request = _parse_request(text)
        if request is None:
            return 400, {"error": 'send {"with_draft": true} or false'}
        if self._restart_file is None or self._engine.server is None:
            return 409, {"error": "this worker has no supervisor, so it would not come back"}
        path = Path(self._restart_file)
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(request.body()), encoding="utf-8")
        temporary.replace(path)
        self._is_leaving = True
        return 202, request.body()


class _Tls:
    """The context of new connections; changed files are loaded, and unusable ones change nothing."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._files = [certificate, key, *([client_ca] if client_ca is not None else [])]
        self._stamp = stamp(self._files)
        self.context = self._load()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "_Tls | None":
        if not (certificate := environment.get(CONTROL_CERTIFICATE_FILE)):
            return None
        client_ca = environment.get(CONTROL_CLIENT_CA_FILE)
        key = Path(environment[CONTROL_KEY_FILE])
        return cls(Path(certificate), key, Path(client_ca) if client_ca else None)

    async def keep_renewed(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            self.renew()

    def renew(self) -> None:
        now = stamp(self._files)
        if now == self._stamp:
            return
        with suppress(OSError, ValueError):  # between a new certificate and its key; tried again
            self.context = self._load()
            self._stamp = now

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._client_ca)
        # A password is always given, or OpenSSL would ask for it on the terminal.
        context.load_cert_chain(self._certificate, self._key, "")
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _parse_head(head: bytes) -> _Request:
    first, *lines = head[:-4].split(b"\r\n")
    method, path, version = first.split(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError("not HTTP/1.1")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or name != name.strip() or name in headers:
            raise ValueError("a malformed header, or one that stands there twice")
        headers[name] = value.strip()
    if version == b"HTTP/1.0":
        headers[b"connection"] = b"close"
    return _Request(method.decode("ascii"), path.decode("ascii"), headers)


def _body_length(headers: Mapping[bytes, bytes]) -> int | None:
    """None for a body whose length is not named."""
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() and b"transfer-encoding" not in headers else None


async def _send(writer: asyncio.StreamWriter, status: int, content: Mapping[str, Any], *, last: bool) -> None:
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"Connection: {'close' if last else 'keep-alive'}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    async with asyncio.timeout(IO_SECONDS):
        await writer.drain()


def _parse_request(text: str) -> RestartRequest | None:
    try:
        return parse_restart_request(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _served_digests(environment: Mapping[str, str]) -> dict[str, str]:
    """The digests that the supervisor computed before the start; empty without a supervisor."""
    target = environment.get(TARGET_DIGEST)
    return {"target": target, "draft": environment.get(DRAFT_DIGEST, "")} if target else {}
