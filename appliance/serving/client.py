"""
HTTP to the workers: forward requests, and scrape health, models and metrics.

Bytes pass through unparsed.  Every failure to reach a worker or to receive its answer becomes
`WorkerFailedError`; a status that the worker chose is an answer, not a failure.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from appliance.errors import (
    WorkerFailedError,
    WorkerLeavingError,
    WorkerTimeoutError,
    WorkerUnreachableError,
)
from appliance.infra.read_turns import ReadTurns
from appliance.serving.connection import PassOn, Piece, WorkerConnection
from appliance.serving.usage import parse_answer, parse_usage
from appliance.serving.worker import ServedModel, Worker
from appliance.serving.worker_protocol import LEAVING_HEADER
from appliance.serving.worker_tls import WorkerTls

OK = 200
UNAUTHORISED = 401
NOT_FOUND = 404
FAILED = 500
SHUT_DOWN = b"cannot schedule new futures after shutdown"
"""In the 500 of a stopping vLLM without our middleware."""
LEAVING_MESSAGE = "The worker is stopping. Try again in a moment."
IDLE_SECONDS = 4.0
"""Less than the 5 s after which a worker closes an idle connection: none is used while it closes."""
CANARIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "1, 2, 3, 4,", "max_tokens": 8, "temperature": 0},
    "/v1/embeddings": {"input": "1, 2, 3, 4,"},
    "/score": {"queries": "1, 2", "documents": "3, 4"},
}
"""By route: the first is greedy, and long enough for a draft to be verified.  A worker serves the route of
the one task it was started for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTimeouts:
    """Maximum silence of a worker, in seconds; an answer that continues may take any time."""

    keep_alive_seconds: float
    """Silence after which the client is sent a keep-alive."""
    silence_seconds: float

    async def read(
        self, answer: WorkerConnection, keep_alive: Callable[[], Awaitable[None]], pass_on: PassOn
    ) -> bytes:
        """
        What `pass_on` does not take, empty at the end.

        Raises WorkerTimeoutError if the worker was silent too long.
        """
        silent, passed = 0.0, answer.passed
        step = min(self.keep_alive_seconds, self.silence_seconds)
        while True:
            try:
                return await answer.read(step, pass_on)
            except TimeoutError as error:
                silent = step + (silent if answer.passed == passed else 0.0)
                passed = answer.passed
                if silent >= self.silence_seconds:
                    raise self.lost() from error
                await keep_alive()

    async def read_all(self, answer: WorkerConnection) -> bytes:
        """The whole answer; raises WorkerTimeoutError if the worker was silent too long."""
        pieces: list[bytes] = []
        while True:
            try:
                piece = await answer.read(self.silence_seconds)
            except TimeoutError as error:
                raise self.lost() from error
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)

    def lost(self) -> WorkerTimeoutError:
        return WorkerTimeoutError(
            f"The worker sent nothing for {self.silence_seconds:g} seconds. Send a shorter request."
        )


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int
    tls_name: str | None
    """Name that the certificate must have; None without TLS."""
    name: str
    """Host and port as in the `Host` header."""
    prefix: str


@lru_cache(maxsize=1024)
def _address(url: str, tls_name: str) -> _Address:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    name = parts.netloc.rpartition("@")[2]
    host = parts.hostname or ""
    expected = (tls_name or host) if tls else None
    return _Address(host=host, port=port, tls_name=expected, name=name, prefix=parts.path.rstrip("/"))


class WorkerClient:
    """Connections to all workers, with the control token; neither proxies nor redirects are followed."""

    def __init__(
        self, session: aiohttp.ClientSession, token: str, tls: WorkerTls, connect_seconds: float
    ) -> None:
        self._session = session
        self._authorization = {"Authorization": f"Bearer {token}"}
        self._tls = tls
        self._connect_seconds = connect_seconds
        self._turns = ReadTurns()
        # Idle connections by URL, most recently used last.
        self._idle: dict[str, list[WorkerConnection]] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, token: str, tls: WorkerTls, connect_seconds: float
    ) -> AsyncIterator["WorkerClient"]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            client = cls(session, token, tls, connect_seconds)
            try:
                yield client
            finally:
                client._close()

    @asynccontextmanager
    async def forward(
        self, worker: Worker, path: str, body: Sequence[Piece], headers: dict[str, str], seconds: float
    ) -> AsyncIterator[WorkerConnection]:
        """
        Send a request body to a worker; yields its answer once the head has arrived, and aborts what is left.

        Raises TimeoutError if no head arrived within `seconds`, WorkerUnreachableError if no connection could
        be opened (the worker has not received the request), WorkerLeavingError if it is stopping and refused
        the request, WorkerFailedError if it closed the connection early or does not accept our token.
        """
        address = _address(*worker.address)
        head = _head(address, path, sum(map(len, body)), headers | self._authorization)
        kept = self._take_idle(worker.url)
        connection = kept or await self._connect(address)
        try:
            connection.send(head, body)
            try:
                await connection.read_head(seconds)
            except WorkerFailedError as lost:
                if kept is None or connection.has_received:
                    raise
                # Most likely the worker closed the idle connection while the request was being sent.
                connection = await self._connect_again(address, lost)
                connection.send(head, body)
                await connection.read_head(seconds)
            if connection.status == UNAUTHORISED:
                # Relayed, it would tell the client that its own key is wrong.
                raise WorkerFailedError("The worker does not accept the token of this gateway.")
            if connection.is_leaving or (
                connection.status == FAILED and SHUT_DOWN in await connection.peek(seconds)
            ):
                raise WorkerLeavingError(LEAVING_MESSAGE)
            yield connection
        finally:
            if connection.finish():
                self._keep_idle(worker.url, connection)

    def _keep_idle(self, url: str, connection: WorkerConnection) -> None:
        idle = self._idle.setdefault(url, [])
        idle.append(connection)
        if not idle[0].is_usable or idle[0].idle_since < connection.idle_since - IDLE_SECONDS:
            idle.pop(0).abort()

    def _take_idle(self, url: str) -> WorkerConnection | None:
        idle, oldest = self._idle.get(url), asyncio.get_running_loop().time() - IDLE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.is_usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def _connect_again(self, address: _Address, lost: WorkerFailedError) -> WorkerConnection:
        try:
            return await self._connect(address)
        except WorkerUnreachableError:
            # Not unreachable: it may have received the request, and crashed because of it.
            raise lost from None

    async def _connect(self, address: _Address) -> WorkerConnection:
        is_tls = address.tls_name is not None
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    *(lambda: WorkerConnection(self._turns), address.host, address.port),
                    ssl=self._tls.context if is_tls else None,
                    server_hostname=address.tls_name,
                )
        except (OSError, TimeoutError) as error:
            message = f"The worker could not be reached: {type(error).__name__}."
            raise WorkerUnreachableError(message) from error
        return connection

    def _close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    async def models(self, worker: Worker, timeout_seconds: float) -> tuple[ServedModel, ...]:
        page = await self._get(worker, "/v1/models", timeout_seconds)
        try:
            return tuple(
                ServedModel(
                    name=entry["id"],
                    max_model_len=entry.get("max_model_len"),
                    created=int(entry.get("created", 0)),
                    parent=entry.get("parent"),
                )
                for entry in json.loads(page)["data"]
            )
        except (ValueError, KeyError, TypeError) as error:
            raise WorkerFailedError("The worker's list of models cannot be read.") from error

    async def engine(self, worker: Worker, timeout_seconds: float) -> str:
        page = await self._get(worker, "/version", timeout_seconds)
        try:
            return f"vllm {json.loads(page)['version']}"
        except (ValueError, KeyError, TypeError) as error:
            raise WorkerFailedError("The worker's version cannot be read.") from error

    async def metrics_page(self, worker: Worker, timeout_seconds: float) -> str:
        return await self._get(worker, "/metrics", timeout_seconds)

    async def canary(self, worker: Worker, model: str, timeout_seconds: float) -> int:
        """Send a canary request; returns the tokens of its answer, or of the prompt if none is generated."""
        status, path, text = NOT_FOUND, "", ""
        for path, body in CANARIES.items():
            status, text = await self._send("POST", worker, path, timeout_seconds, {"model": model, **body})
            if status != NOT_FOUND:
                break
        _check(status, path)
        usage = parse_usage(parse_answer(text))
        tokens = usage.completion_tokens if path == "/v1/completions" else usage.prompt_tokens
        if not tokens:
            raise WorkerFailedError(f"The worker answered {path} without a single token.")
        return tokens

    async def _get(self, worker: Worker, path: str, timeout_seconds: float) -> str:
        status, text = await self._send("GET", worker, path, timeout_seconds)
        _check(status, path)
        return text

    async def _send(
        self,
        method: str,
        worker: Worker,
        path: str,
        timeout_seconds: float,
        body: dict[str, Any] | None = None,
    ) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._session.request(
                *(method, worker.url + path),
                json=body,
                headers=self._authorization,
                ssl=self._tls.context,
                server_hostname=worker.tls_name or None,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if LEAVING_HEADER in response.headers:
                    raise WorkerLeavingError(LEAVING_MESSAGE)
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            raise WorkerFailedError(f"The worker could not be reached: {type(error).__name__}.") from error


def _check(status: int, path: str) -> None:
    if status != OK:
        raise WorkerFailedError(f"The worker answered {status} to {path}.")


def _head(address: _Address, path: str, length: int, headers: dict[str, str]) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"POST {address.prefix}{path} HTTP/1.1\r\nHost: {address.name}\r\nContent-Length: {length}"
    return f"{head}\r\n{lines}\r\n".encode("latin-1")
