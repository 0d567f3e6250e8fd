"""
Restart a worker that another process supervises: HTTP to the plugin inside it (`serving.vllm.plugin`).

The plugin leaves the wish for its supervisor and ends its server, which drains first.  A worker that
cannot be restarted this way says so and goes on as it is.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType

import aiohttp

from appliance.errors import ControlRefusedError, WorkerFailedError
from appliance.serving.restart_request import Wish
from appliance.serving.worker import Worker
from appliance.serving.worker_protocol import RESTART_PATH
from appliance.speculation.values import Reason

ANSWER_SECONDS = 10.0
REFUSALS: Mapping[int, str] = MappingProxyType(
    {
        HTTPStatus.NOT_FOUND: "it runs without the plugin, or was given no control token",
        HTTPStatus.UNAUTHORIZED: "it does not accept this control token",
        HTTPStatus.CONFLICT: "nobody supervises it, so it would not come back",
    }
)


class RestartClient:
    """Speaks to the plugins of workers in other processes, with one token."""

    def __init__(self, session: aiohttp.ClientSession, token: str) -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"}

    @classmethod
    @asynccontextmanager
    async def open(cls, *, token: str) -> AsyncIterator["RestartClient"]:
        """Hold a session for as long as the context lasts; connections are not kept."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, token)

    async def restart(self, worker: Worker, *, wish: Wish, reason: Reason) -> None:  # noqa: ARG002
        """
        Have the worker end and start again; returns once it has said that it will.

        A plugin of an earlier version does not know drafts on trial: the worker then comes back with
        the one in service, which shows in what it says of itself.

        Args:
            worker: which.
            wish: with its draft, with another, or without.
            reason: why; not sent, because only we and the audit log need it.

        Raises:
            ControlRefusedError: it cannot be restarted this way; it goes on as it is.
            WorkerFailedError: it did not answer, or nothing that was expected.
        """
        try:
            async with self._session.post(
                worker.url + RESTART_PATH,
                json=wish.body(),
                headers=self._headers,
                allow_redirects=False,
            ) as response:
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = f"The worker's plugin could not be reached: {type(error).__name__}."
            raise WorkerFailedError(message) from error
        if status in REFUSALS:
            message = f"worker {worker.worker_id} cannot be restarted from here: {REFUSALS[status]}"
            raise ControlRefusedError(message)
        if status != HTTPStatus.ACCEPTED:
            message = f"The worker's plugin answered {status} to {RESTART_PATH}."
            raise WorkerFailedError(message)
