"""
The appliances that are measured, as their admin API and the plugin in their worker show them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from appliance.errors import WorkerFailedError
from appliance.infra.settings import PoolSettings
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import EngineReading
from benchmarks.speculation.load import BenchmarkError, Target
from benchmarks.speculation.plan import Control, Mode
from demo.process import ApplianceProcess

FOLLOW_SECONDS = 5.0
"""Maximum time for a worker to apply a command."""
POLL_SECONDS = 0.2
OVERRIDE_SECONDS = 3600
OPERATOR = "operator_override"


class Side:
    """One running appliance; made by `connect`."""

    def __init__(
        self, process: ApplianceProcess, worker: Worker, engine: str, model: Mapping[str, Any]
    ) -> None:
        self.engine = engine
        """The engine and its version, such as `vllm 0.32.0`."""
        self.max_model_len: int = model["max_model_len"]
        """Longest context in tokens."""
        self.target = Target(url=process.url, key=process.key, model=model["id"])
        self.worker = worker
        self._process = process

    @classmethod
    async def connect(cls, process: ApplianceProcess) -> "Side":
        """
        Ask a ready appliance what it serves.

        Raises:
            BenchmarkError: it does not answer as one.
        """
        found = (await _admin(process, "GET", "status"))["workers"][0]
        worker = Worker(worker_id=WorkerId(found["worker"]), url=found["url"])
        models = await _request(process.url + "/v1/models", process.key, "GET")
        return cls(process, worker, found["engine"], models["data"][0])

    @asynccontextmanager
    async def plugin(self) -> AsyncIterator[SpeculationClient]:
        """A client of the plugin in the worker."""
        token = (self._process.data / "control.token").read_text(encoding="utf-8").strip()
        async with SpeculationClient.open(token=token, tls=WorkerTls(PoolSettings())) as client:
            yield client

    async def speculation(self) -> dict[str, Any]:
        """The admin API's view of its one worker."""
        found: dict[str, Any] = (await _admin(self._process, "GET", "speculation"))["workers"][0]
        return found

    async def changes(self) -> list[dict[str, Any]]:
        """The newest changes of mode, oldest first."""
        found: list[dict[str, Any]] = (await _admin(self._process, "GET", "speculation/events?after=0"))[
            "events"
        ]
        return found

    async def choose(self, mode: Mode) -> None:
        """
        Have the worker decode in a mode, and wait until it does.

        Raises:
            BenchmarkError: it was refused, or the worker does something else.
        """
        await _admin(self._process, "PUT", "speculation/override", order(mode))
        deadline = time.monotonic() + FOLLOW_SECONDS
        while not follows(worker := await self.speculation(), mode):
            if time.monotonic() > deadline:
                problems = "; ".join(worker["problems"]) or f"its table is {worker['table']}"
                message = f"the worker did not follow {mode.name} in {FOLLOW_SECONDS:.0f} seconds: {problems}"
                raise BenchmarkError(message)
            await asyncio.sleep(POLL_SECONDS)

    async def reading(self) -> EngineReading | None:
        """The counts of the plugin in the worker; None where there is none."""
        async with self.plugin() as client:
            try:
                reading = await client.read(self.worker, FOLLOW_SECONDS)
            except WorkerFailedError as error:
                message = f"the worker does not tell its counts: {error}"
                raise BenchmarkError(message) from error
        return reading if reading.controllable else None


def order(mode: Mode) -> dict[str, Any]:
    """The override that puts a mode in force."""
    if mode.control is not Control.FIXED:
        return {"worker": "*", "mode": "auto"}
    order: dict[str, Any] = {"worker": "*", "seconds": OVERRIDE_SECONDS, "note": "benchmark"}
    if not mode.draft_tokens:
        return {**order, "mode": "target_only"}
    return {**order, "mode": "speculative", "draft_tokens": mode.draft_tokens}


def follows(worker: Mapping[str, Any], mode: Mode) -> bool:
    """Whether a worker, as the admin API shows it, does as a mode says."""
    if mode.control is not Control.FIXED:
        return worker["override"] is None and worker["reason"] != OPERATOR
    table = worker["table"]
    return bool(worker["override"] and table) and all(k == mode.draft_tokens for _first, _last, k in table)


async def _admin(
    process: ApplianceProcess, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    key = (process.data / "admin.key").read_text(encoding="utf-8").strip()
    return await _request(f"{process.admin_url}/admin/v1/{path}", key, method, body)


async def _request(url: str, key: str, method: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=4 * FOLLOW_SECONDS)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request(method, url, json=body) as response,
        ):
            if response.status != 200:
                message = f"{url} answered {response.status}: {(await response.text())[:300]}"
                raise BenchmarkError(message)
            content: dict[str, Any] = await response.json()
            return content
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        message = f"{url} does not answer: {type(error).__name__} {error}"
        raise BenchmarkError(message) from error
