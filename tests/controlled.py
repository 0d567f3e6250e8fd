"""
A control loop with everything around it, for tests: real sockets, real plugin, real audit log.

The plugin's hooks sit on a stand-in of vLLM's scheduler; tests set the speed of clocks.
"""

import asyncio
import io
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from appliance.audit.entry import decode
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.control.changes import ChangeLog, SpeculationChange
from appliance.control.loop import ControlLoop, ControlParts
from appliance.control.override import Override, SqlOverrideStore
from appliance.control.recycle import Recycler, RecycleResult
from appliance.errors import ControlRefusedError, ControlUnavailableError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AuditSettings, LogSettings, MonitorSettings, PoolSettings
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.pool import WorkerPool
from appliance.serving.vllm.scheduler_control import SchedulerControl
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import Reason, SpeculationMode
from tests.fake_engine import FakeClock, FakeScheduler, work
from tests.fakes import CONTROL_TOKEN, SPECULATIVE_METRICS, FakeWorker, until

LARGEST = 4
LOOKUP = (0, 3, 3, 3, 0)
EVERYWHERE, NOWHERE = [[1, LARGEST, 3]], [[1, LARGEST, 0]]
W1, W2 = WorkerId("w1"), WorkerId("w2")


class EngineWorker(FakeWorker):
    """A worker with an engine that decodes one request, under the real plugin."""

    def __init__(self, **more: Any) -> None:
        super().__init__(metrics=SPECULATIVE_METRICS, **more)
        self.engine_clock = FakeClock()
        self.scheduler = FakeScheduler(LOOKUP)
        self.steering = SchedulerControl(self.scheduler, self.engine_clock)
        self.scheduler.add("a")
        self.polls = 0
        self.may_answer = asyncio.Event()
        """Its metrics page comes once this is set, as it is unless a test clears it."""
        self.may_answer.set()

    async def metrics_page(self, request: web.Request) -> web.Response:
        """Return the metrics page once it may."""
        self.polls += 1
        await self.may_answer.wait()
        return await super().metrics_page(request)

    def decode(self, steps: int = 200, *, accepted: int) -> None:
        """Let the engine work; a draft token costs a tenth of a step."""
        for _ in range(steps):
            k = self.scheduler.dynamic_sd_lookup[1]
            work(self.scheduler, self.engine_clock, seconds=0.01 * (1 + k / 10), accepted=accepted)


class Lease:
    """A lease that is held or not, as the test wants."""

    def __init__(self) -> None:
        self.is_held = True
        self.released = 0

    async def hold(self) -> bool:
        return self.is_held

    async def release(self) -> None:
        self.released += 1


class Restarts:
    """A recycler that restarts no worker: it remembers what was begun, one recycle at a time."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.why: str | None = None
        self.closed = 0
        self.ends: asyncio.Future[RecycleResult] | None = None

    def refusal(self, worker_id: WorkerId) -> str | None:
        is_busy = self.ends is not None and not self.ends.done()
        return self.why or ("another worker is being recycled" if is_busy else None)

    def begin(self, worker_id: WorkerId, **how: Any) -> asyncio.Future[RecycleResult]:
        if (why := self.refusal(worker_id)) is not None:
            raise ControlRefusedError(why)
        self.begun.append({"worker": worker_id, **how})
        self.ends = asyncio.get_running_loop().create_future()
        return self.ends

    async def close(self) -> None:
        self.closed += 1


class BreakableClient(WorkerClient):
    """The real client, with a defect for one worker."""

    broken: WorkerId | None = None

    async def metrics_page(self, worker: Worker, timeout_seconds: float) -> str:
        if worker.worker_id == self.broken:
            message = "a defect"
            raise LookupError(message)
        return await super().metrics_page(worker, timeout_seconds)


class BreakableOverrides(SqlOverrideStore):
    """The real store, with a disk that can fail."""

    is_broken = False

    async def list(self) -> tuple[Override, ...]:
        if self.is_broken:
            message = "the disk is slow"
            raise ControlUnavailableError(message)
        return await super().list()


class Controlled:
    """A control loop, and everything around it."""

    def __init__(self, stack: AsyncExitStack, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stack = stack
        self.url = f"sqlite:///{directory / 'audit.db'}"
        self.directory = directory
        self.pool = WorkerPool()
        self.lease = Lease()
        self.restarts = Restarts()
        self.clock, self.wall = FakeClock(), FakeClock()
        self.metrics = Metrics(CollectorRegistry())
        self.log = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", self.log)
            self.logger = configure_logs(LogSettings(format="json"), terminal=False)
        self.workers: list[FakeWorker] = []

    async def start(self, *workers: FakeWorker, **settings: Any) -> None:
        """Listen with the workers, and build the loop; nothing is polled yet."""
        enter = self.stack.enter_async_context
        for number, worker in enumerate(workers, start=1):
            worker.token = CONTROL_TOKEN
            await enter(worker.serving())
            self.pool.add(Worker(worker_id=WorkerId(f"w{number}"), url=worker.url))
            self.workers.append(worker)
        create_signing_key(self.directory / "audit.key")
        audit_settings = AuditSettings()
        self.store = SqlAuditStore(self.url)
        self.stack.callback(self.store.close)
        self.audit = await enter(
            AuditLog.open(
                store=self.store,
                signer=load_signing_key(self.directory / "audit.key", audit_settings.origin),
                settings=audit_settings,
                sealed_head_path=self.directory / "audit.head",
                clock=self.wall,
                version="test",
                on_commit=self.metrics.record_audit_commit,
            )
        )
        self.client = await enter(
            BreakableClient.open(token=CONTROL_TOKEN, tls=WorkerTls(PoolSettings()), connect_seconds=2.0)
        )
        self.speculation = await enter(
            SpeculationClient.open(token=CONTROL_TOKEN, tls=WorkerTls(PoolSettings()))
        )
        self.overrides = BreakableOverrides(self.url)
        self.stack.callback(self.overrides.close)
        changes = ChangeLog(audit=self.audit, metrics=self.metrics, logger=self.logger, clock=self.wall)
        self.loop = ControlLoop(
            ControlParts(
                pool=self.pool,
                client=self.client,
                speculation=self.speculation,
                lease=self.lease,
                overrides=self.overrides,
                recycler=cast("Recycler", self.restarts),
                changes=changes,
                metrics=self.metrics,
                logger=self.logger,
            ),
            settings=MonitorSettings(interval_seconds=0.01, **settings),
            clock=self.clock,
            wall_clock=self.wall,
        )

    async def tick(self, count: int = 1, *, accepted: int | None = None) -> None:
        """Tick this often, a second apart; with `accepted`, engines decode in between."""
        for _ in range(count):
            for worker in self.workers:
                if accepted is not None and isinstance(worker, EngineWorker):
                    worker.decode(accepted=accepted)
            self.clock.advance(1.0)
            self.wall.advance(1.0)
            await self.loop.tick()

    async def collapse(self) -> None:
        """Draft well for some time, then let nothing more be accepted until drafting stops."""
        await self.tick(8, accepted=2)
        assert self.seen().decision.mode is SpeculationMode.SPECULATIVE
        for _ in range(10):
            await self.tick(accepted=0)
            if self.seen().decision.verdict is Reason.COLLAPSED:
                return
        pytest.fail("it did not stop")

    def seen(self, worker: WorkerId = W1) -> WorkerSnapshot:
        """The pool's latest snapshot of a worker."""
        snapshot = self.pool.snapshot(worker)
        assert snapshot is not None
        return snapshot

    def sample(self, name: str, **labels: str) -> float | None:
        """A metric's value."""
        return self.metrics.registry.get_sample_value(f"appliance_{name}", labels)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Lines of the operator log."""
        lines = map(json.loads, self.log.getvalue().splitlines())
        return [line for line in lines if line["event"] == event]

    @property
    def last(self) -> SpeculationChange:
        """The latest change."""
        return self.loop.events(0)[-1]

    async def entries(self, count: int) -> list[dict[str, Any]]:
        """The changes the audit log holds, once there are so many."""

        def found() -> list[dict[str, Any]]:
            leaves = self.store.leaves(0, 1000)
            return [dict(decode(leaf.leaf).fields) for leaf in leaves if leaf.type == "speculation.changed"]

        await until(lambda: len(found()) >= count)
        return found()
