"""
Restart a worker that another process supervises: HTTP to the plugin inside it (`serving.vllm.plugin`).

The plugin stores the request for its supervisor and ends its server, which drains first.  A worker that
cannot be restarted this way refuses and keeps running.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType

import aiohttp

from appliance.errors import ControlRefusedError, WorkerFailedError
from appliance.serving.restart_request import RestartRequest
from appliance.serving.worker import Worker
from appliance.serving.worker_protocol import RESTART_PATH
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import Reason

ANSWER_SECONDS = 10.0
REFUSALS: Mapping[int, str] = MappingProxyType(
    {
        HTTPStatus.NOT_FOUND: "it runs without the plugin, or was given no control token",
        HTTPStatus.UNAUTHORIZED: "it does not accept this control token",
        HTTPStatus.CONFLICT: "it has no supervisor, so it would not come back",
    }
)


class RestartClient:
    def __init__(self, session: aiohttp.ClientSession, token: str, tls: WorkerTls) -> None:
        self._session = session
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"}

    @classmethod
    @asynccontextmanager
    async def open(cls, *, token: str, tls: WorkerTls) -> AsyncIterator["RestartClient"]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, token, tls)

    async def restart(self, worker: Worker, *, request: RestartRequest, reason: Reason) -> None:  # noqa: ARG002
        """
        Restart the worker; returns once the worker has accepted the request.

        A plugin of an earlier version ignores a draft under test: the worker then returns with the active
        one, which its reading shows.  `reason` is not sent: only control and the audit log need it.
        """
        try:
            async with self._session.post(
                worker.control_url + RESTART_PATH,
                json=request.body(),
                headers=self._headers,
                ssl=self._tls.context,
                server_hostname=worker.tls_name or None,
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
            raise WorkerFailedError(f"The worker's plugin answered {status} to {RESTART_PATH}.")
