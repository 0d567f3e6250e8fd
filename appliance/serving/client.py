"""
HTTP to the workers: forward a request, and look at how a worker is doing.

Bytes pass through unparsed.  Every failure to reach or to hear a worker becomes
`WorkerFailedError`; a status the worker chose is an answer, not a failure.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from appliance.errors import WorkerFailedError
from appliance.serving.usage import parse_answer, parse_usage
from appliance.serving.worker import ServedModel, Worker

LARGEST_READ = 2**18
IDLE_SECONDS = 4.0
"""Shorter than the 5 s after which a worker closes an idle connection: we must never send on one."""
CANARY: dict[str, Any] = {"prompt": "1, 2, 3, 4,", "max_tokens": 8, "temperature": 0}
"""A request whose answer nobody needs: greedy, and long enough for a draft to be verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A worker's answer whose head has arrived; leaving `forward` closes it and aborts the rest."""

    status: int
    content_type: str
    stream: aiohttp.StreamReader

    async def read_any(self) -> bytes:
        """Return what has arrived, waiting if nothing has; empty at the end."""
        try:
            return await self.stream.readany()
        except (aiohttp.ClientError, OSError) as error:
            message = f"The worker broke off: {type(error).__name__}."
            raise WorkerFailedError(message) from error


class WorkerClient:
    """One connection pool to all workers; proxies and redirects are never followed."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @classmethod
    @asynccontextmanager
    async def open(cls, *, connect_seconds: float) -> AsyncIterator["WorkerClient"]:
        """Hold the connection pool for as long as the context lasts."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=LARGEST_READ,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session)

    @asynccontextmanager
    async def forward(
        self, worker: Worker, path: str, body: bytes, headers: dict[str, str]
    ) -> AsyncIterator[Answer]:
        """
        Send a request body to a worker and give its answer once the head has arrived.

        Raises:
            WorkerFailedError: the worker could not be reached or closed before it answered.
        """
        request = self._session.post(worker.url + path, data=body, headers=headers, allow_redirects=False)
        try:
            response = await request
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = f"The worker could not be reached: {type(error).__name__}."
            raise WorkerFailedError(message) from error
        try:
            yield Answer(
                status=response.status,
                content_type=response.headers.get("Content-Type", ""),
                stream=response.content,
            )
        finally:
            # Not `release`: an answer that was not read to its end must close the connection, which
            # is what makes the worker abort the request and free its batch slot.
            response.close() if not response.content.at_eof() else response.release()

    async def models(self, worker: Worker, timeout_seconds: float) -> tuple[ServedModel, ...]:
        """The model names a worker answers to."""
        page = await self._get(worker, "/v1/models", timeout_seconds)
        try:
            return tuple(
                ServedModel(
                    name=entry["id"],
                    max_model_len=entry.get("max_model_len"),
                    created=int(entry.get("created", 0)),
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
        Have a worker complete a fixed text, past the gateway; the number of tokens it made of it.

        Raises:
            WorkerFailedError: it refused, made none, or did not answer in time.
        """
        path = "/v1/completions"
        text = await self._ask("POST", worker, path, timeout_seconds, {"model": model, **CANARY})
        tokens = parse_usage(parse_answer(text)).completion_tokens
        if not tokens:
            message = f"The worker answered {path} without a single token."
            raise WorkerFailedError(message)
        return tokens

    async def _get(self, worker: Worker, path: str, timeout_seconds: float) -> str:
        return await self._ask("GET", worker, path, timeout_seconds)

    async def _ask(
        self,
        method: str,
        worker: Worker,
        path: str,
        timeout_seconds: float,
        body: dict[str, Any] | None = None,
    ) -> str:
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._session.request(
                method, worker.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            message = f"The worker could not be reached: {type(error).__name__}."
            raise WorkerFailedError(message) from error
        if response.status != 200:  # noqa: PLR2004
            message = f"The worker answered {response.status} to {path}."
            raise WorkerFailedError(message)
        return text
