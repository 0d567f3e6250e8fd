"""
HTTP to the workers: forward a request, and look at how a worker is doing.

Bytes pass through unparsed.  Every failure to reach or to hear a worker becomes
`WorkerFailedError`; a status the worker chose is an answer, not a failure.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from appliance.errors import WorkerFailedError, WorkerUnreachableError
from appliance.serving.connection import WorkerConnection
from appliance.serving.usage import parse_answer, parse_usage
from appliance.serving.worker import ServedModel, Worker

OK = 200
NOT_FOUND = 404
IDLE_SECONDS = 4.0
"""Shorter than the 5 s after which a worker closes an idle connection: we must never send on one."""
CANARIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "1, 2, 3, 4,", "max_tokens": 8, "temperature": 0},
    "/v1/embeddings": {"input": "1, 2, 3, 4,"},
    "/score": {"queries": "1, 2", "documents": "3, 4"},
}
"""
Requests whose answers nobody needs, the first of them greedy, and long enough for a draft to be verified.

A worker has the route of the one task it was started for.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer whose head has arrived; leaving `forward` closes it and aborts the rest."""

    status: int
    content_type: str
    connection: WorkerConnection

    async def read_any(self, seconds: float) -> bytes:
        """
        Return what has arrived, waiting if nothing has; empty at the end.

        Raises:
            WorkerFailedError: the worker broke off.
            TimeoutError: nothing came for so long; it can be asked again.
        """
        return await self.connection.read(seconds)


@dataclass(frozen=True, slots=True)
class _Address:
    host: str
    port: int
    tls: bool
    name: str
    """Host and port as the `Host` header gives them."""
    prefix: str
    """Path that the worker's own paths are below."""


@lru_cache(maxsize=1024)
def _address(url: str) -> _Address:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    name = parts.netloc.rpartition("@")[2]
    return _Address(host=parts.hostname or "", port=port, tls=tls, name=name, prefix=parts.path.rstrip("/"))


class WorkerClient:
    """Connections to all workers; proxies and redirects are never followed."""

    def __init__(self, session: aiohttp.ClientSession, connect_seconds: float) -> None:
        self._session = session
        self._connect_seconds = connect_seconds
        # Idle ones by URL, the one used last at the end.
        self._idle: dict[str, list[WorkerConnection]] = {}
        self._tls: ssl.SSLContext | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, *, connect_seconds: float) -> AsyncIterator["WorkerClient"]:
        """Hold the connections for as long as the context lasts."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            client = cls(session, connect_seconds)
            try:
                yield client
            finally:
                client._close()

    @asynccontextmanager
    async def forward(
        self, worker: Worker, path: str, body: bytes, headers: dict[str, str], seconds: float
    ) -> AsyncIterator[Answer]:
        """
        Send a request body to a worker and give its answer once the head has arrived.

        Raises:
            TimeoutError: no head came for so many seconds.
            WorkerUnreachableError: no connection could be opened, so the worker has not seen the request.
            WorkerFailedError: it closed before it answered.
        """
        address = _address(worker.url)
        request = _request(address, path, body, headers)
        kept = self._take_idle(worker.url)
        connection = kept or await self._connect(address)
        try:
            connection.ask(request)
            try:
                await connection.read_head(seconds)
            except WorkerFailedError as lost:
                if kept is None or connection.has_heard:
                    raise
                # Most likely closed for having been idle, just when the request was on its way.
                connection = await self._connect_again(address, lost)
                connection.ask(request)
                await connection.read_head(seconds)
            yield Answer(connection.status, connection.content_type, connection)
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
            # Not unreachable: it may have seen the request, and be gone because of it.
            raise lost from None

    async def _connect(self, address: _Address) -> WorkerConnection:
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    WorkerConnection, address.host, address.port, ssl=self._tls if address.tls else None
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
        """The model names a worker answers to."""
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
            message = "The worker's list of models cannot be read."
            raise WorkerFailedError(message) from error

    async def engine(self, worker: Worker, timeout_seconds: float) -> str:
        """The engine's name and version."""
        page = await self._get(worker, "/version", timeout_seconds)
        try:
            return f"vllm {json.loads(page)['version']}"
        except (ValueError, KeyError, TypeError) as error:
            message = "The worker's version cannot be read."
            raise WorkerFailedError(message) from error

    async def metrics_page(self, worker: Worker, timeout_seconds: float) -> str:
        """A worker's metrics in Prometheus text format."""
        return await self._get(worker, "/metrics", timeout_seconds)

    async def canary(self, worker: Worker, model: str, timeout_seconds: float) -> int:
        """
        Have a worker do its task on a fixed text, past the gateway; the number of tokens in its answer.

        Where it generates none, these are the prompt's.

        Raises:
            WorkerFailedError: it refused, counted none, or did not answer in time.
        """
        status, path, text = NOT_FOUND, "", ""
        for path, body in CANARIES.items():
            status, text = await self._send("POST", worker, path, timeout_seconds, {"model": model, **body})
            if status != NOT_FOUND:
                break
        _check(status, path)
        usage = parse_usage(parse_answer(text))
        tokens = usage.completion_tokens if path == "/v1/completions" else usage.prompt_tokens
        if not tokens:
            message = f"The worker answered {path} without a single token."
            raise WorkerFailedError(message)
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
                method, worker.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            message = f"The worker could not be reached: {type(error).__name__}."
            raise WorkerFailedError(message) from error


def _check(status: int, path: str) -> None:
    if status != OK:
        message = f"The worker answered {status} to {path}."
        raise WorkerFailedError(message)


def _request(address: _Address, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"POST {address.prefix}{path} HTTP/1.1\r\nHost: {address.name}\r\nContent-Length: {len(body)}"
    return f"{head}\r\n{lines}\r\n".encode("latin-1") + body
