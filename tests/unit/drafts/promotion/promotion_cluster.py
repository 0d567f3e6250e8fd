"""
Remote workers, a gateway that promotes drafts on them, and a clock that advances only when a task sleeps.

Recycler, promoter, registry and files are real.  A worker is its plugin's counters, and chooses its draft as
`appliance.drafts.promotion.choice` does: by the active draft on disk, at each start.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from appliance.audit.entry_types import EntryType
from appliance.control.recycle import RecycleParts, Recycler
from appliance.drafts.evaluation.evaluation_results import Evaluation
from appliance.drafts.evaluation.store import save_evaluation
from appliance.drafts.promotion.promoter import Promoter
from appliance.drafts.promotion.promotion import Promotion
from appliance.drafts.promotion.promotion_run import PromotionParts
from appliance.drafts.registry.active_draft import ActiveDraft, read_active_draft
from appliance.errors import AuditUnavailableError, WorkerFailedError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import DraftSettings, LogSettings, RecycleSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import WITH_DRAFT, RestartRequest
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.values import NO_DRAFTS, Decision, Reason, SpeculationMode
from tests.fakes import audit_fields
from tests.unit.drafts.evaluation.bare_report import bare_report
from tests.unit.drafts.promotion.drafting import Side
from tests.unit.drafts.registry.site import NOW, Site

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
OWN = f"sha256:{'0' * 63}1"
"""The draft of the workers' own settings."""
RECYCLE = RecycleSettings(drain_seconds=5.0, start_seconds=60.0)
TRIAL = DraftSettings(trial_drafts=256, trial_seconds=600.0, trial_margin=0.25)
TOOK = 5.0
"""Seconds a worker takes to start."""


class KilledError(BaseException):
    """Simulates a kill: no code catches it."""


@dataclass
class Engine:
    """One worker's process, or its successor while that starts."""

    draft: str = OWN
    side: Side | None = None
    up_at: float = 0.0
    is_dead: bool = False
    verdict: Reason | None = None
    serves: int = 4
    """Requests a second while it takes any."""


@dataclass
class PromotionCluster:
    """Workers and disk, which outlive a gateway, and the current gateway."""

    site: Site
    names: tuple[WorkerId, ...] = (A, B, C)
    rates: dict[str, float] = field(default_factory=dict)
    """Acceptance of each draft; 0.7 by default."""
    mute: set[str] = field(default_factory=set)
    """Drafts with which a worker answers nothing."""
    now: float = 0.0
    entries: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[WorkerId, RestartRequest]] = field(default_factory=list)
    log_is_full: bool = False
    fate: int | None = None
    """Durable steps after which the gateway is killed."""
    steps: int = 0
    at: dict[float, Callable[[], object]] = field(default_factory=dict)
    fewest: int = 99
    """Fewest workers that took requests at any poll."""

    def __post_init__(self) -> None:
        self.random = random.Random(7)
        self.target = self.site.target
        """Digest of what all workers serve."""
        self.engines = {name: Engine() for name in self.names}
        for engine in self.engines.values():
            engine.side = self._side(engine.draft)
        self.in_force = dict.fromkeys(self.names, WITH_DRAFT)
        self.gateway = Gateway(self)

    @property
    def directory(self) -> Path:
        """Of the registry."""
        return self.site.directory

    @property
    def active(self) -> ActiveDraft:
        return read_active_draft(self.directory, self.target)

    def drafts(self) -> list[str]:
        """The draft of each worker."""
        return [engine.draft for engine in self.engines.values()]

    def evaluated(self, draft: str, **more: Any) -> Evaluation:
        """Save an evaluation of a draft."""
        evaluation = bare_report(**{"draft": draft, "target": self.target, "incumbent": OWN, **more})
        save_evaluation(self.directory, evaluation, "<p>")
        return evaluation

    def restart(self, name: WorkerId, request: RestartRequest) -> None:
        """Be a supervisor: end the worker and start it by this request."""
        self.in_force[name] = request
        self.engines[name].is_dead = True
        self.at[self.now + 2.0 + len(self.at) / 1000] = lambda: self.start(name)

    def start(self, name: WorkerId) -> None:
        """Start a worker; its draft is chosen now, by the active draft on disk."""
        request, active = self.in_force[name], self.active
        draft = active.draft or OWN
        if request.candidate is not None and active.promotion == request.candidate.promotion:
            draft = request.candidate.draft
        draft = draft if request.with_draft else ""
        self.engines[name] = Engine(draft=draft, side=self._side(draft), up_at=self.now + TOOK)

    def die(self, name: WorkerId) -> None:
        """Let a worker crash; its supervisor restarts it by the last restart request."""
        self.engines[name].is_dead = True
        self.at[self.now + 1.0 + len(self.at) / 1000] = lambda: self.start(name)

    async def sleep(self, seconds: float) -> None:
        """Advance the clock and run what is due."""
        self.now += seconds
        for due in sorted(time for time in self.at if time <= self.now):
            self.at.pop(due)()
        self.gateway.poll_when_due()
        await asyncio.sleep(0)

    def durable_step(self) -> None:
        """Count a step before or after which a kill may come."""
        self.steps += 1
        if self.fate is not None and self.steps >= self.fate:
            raise KilledError

    async def new_gateway(self) -> "Gateway":
        """Kill the gateway and start another one with the same workers."""
        await self.gateway.close()
        self.fate = None
        self.gateway = Gateway(self)
        return self.gateway

    def _side(self, draft: str) -> Side:
        return Side(
            self.random, self.rates.get(draft, 0.7), spread=0.02, epoch=f"{self.random.random():.12f}"
        )


class Gateway:
    """One gateway process; its memory is lost when it is killed."""

    def __init__(self, cluster: PromotionCluster) -> None:
        self.cluster = cluster
        self.is_acting = True
        self.polled_at = cluster.now
        self.pool = WorkerPool()
        for name in cluster.names:
            self.pool.add(Worker(worker_id=name, url=f"http://127.0.0.1/{name}"))
        logger = configure_logs(LogSettings(level="error"), terminal=False)
        self.metrics = Metrics(CollectorRegistry())
        self.recycler = Recycler(
            RecycleParts(
                pool=self.pool,
                client=self,
                own={},
                others=self,
                audit=self,
                metrics=self.metrics,
                logger=logger,
            ),
            settings=RECYCLE,
            clock=lambda: cluster.now,
            sleep=cluster.sleep,
        )
        self.ids = (f"P{number:04d}{int(cluster.now):06d}" for number in range(1, 10_000))
        self.promoter = Promoter(
            PromotionParts(
                pool=self.pool,
                recycler=self.recycler,
                is_acting=lambda: self.is_acting,
                clock=lambda: cluster.now,
                sleep=cluster.sleep,
                directory=cluster.directory,
                open_registry=lambda: cluster.site.registry,
                record=self.record,
                drafts=TRIAL,
                recycle=RECYCLE,
                wall_clock=lambda: NOW + cluster.now,
                metrics=self.metrics,
                logger=logger,
            ),
            new_id=lambda: f"{int(cluster.now * 10):08d}{next(self.ids)}",
        )
        self.task: asyncio.Task[None] | None = None
        self.poll()

    def poll_when_due(self) -> None:
        """Poll the workers once a second as the control loop does, and let them serve."""
        if self.cluster.now - self.polled_at >= 1.0:
            self.polled_at = self.cluster.now
            self.poll()
            taking = sum(seen.takes_requests for seen in self.pool.snapshots)
            self.cluster.fewest = min(self.cluster.fewest, taking)

    def poll(self) -> None:
        for name, engine in self.cluster.engines.items():
            before = self.pool.snapshot(name)
            if before is None:
                continue
            assert engine.side is not None
            if engine.is_dead or self.cluster.now < engine.up_at:
                self.pool.update(replace(before, healthy=False))
                continue
            if before.takes_requests and engine.draft and engine.verdict is None:
                for _ in range(engine.serves):
                    engine.side.request()
            self.pool.update(self._seen(before, engine))

    def _seen(self, before: WorkerSnapshot, engine: Engine) -> WorkerSnapshot:
        assert engine.side is not None
        drafting = NO_DRAFTS if engine.draft else None
        metrics = WorkerMetrics(
            running=0,
            waiting=0,
            kv_cache_usage=0.0,
            prompt_tokens_total=0,
            generation_tokens_total=0,
            preemptions_total=0,
            finished_requests_total={},
            speculation=drafting,
        )
        reading = replace(engine.side.reading, target=self.cluster.target, draft=engine.draft)
        return replace(
            before,
            healthy=True,
            models=(ServedModel(name="demo", max_model_len=None, created=1),),
            metrics=metrics,
            reading=reading,
            decision=Decision(mode=SpeculationMode.SPECULATIVE, verdict=engine.verdict),
            seen_at=self.cluster.now,
        )

    async def restart(self, worker: Worker, *, request: RestartRequest, reason: Reason) -> None:
        """Be the plugin in a worker."""
        self.cluster.durable_step()
        self.cluster.requests.append((worker.worker_id, request))
        self.cluster.restart(worker.worker_id, request)
        self.cluster.durable_step()

    async def canary(self, worker: Worker, model: str, timeout_seconds: float) -> int:
        """The HTTP client's part."""
        if self.cluster.engines[worker.worker_id].draft in self.cluster.mute:
            raise WorkerFailedError("The worker answered 500 to /v1/completions.")
        return 8

    def submit(self, entry_type: EntryType, /, **fields: Any) -> None:
        """The audit log of the recycler."""
        audit_fields(entry_type, fields)

    async def record(self, entry_type: EntryType, /, **fields: Any) -> None:
        """The audit log of the promoter."""
        self.cluster.durable_step()
        if self.cluster.log_is_full:
            raise AuditUnavailableError("the log takes no entry")
        self.cluster.entries.append({"type": str(entry_type), **audit_fields(entry_type, fields)})
        self.cluster.durable_step()

    async def run(self) -> None:
        """Start the promoter, and return once it recovers what another gateway left."""
        self.task = asyncio.ensure_future(self.promoter.run())
        for _ in range(50):
            await asyncio.sleep(0)
            if self.promoter._has_recovered or self.promoter._running() is not None:
                return

    async def until_over(self) -> Promotion | None:
        """Wait until no promotion runs; return the newest, if any."""
        async with asyncio.timeout(60):
            while self.promoter._running() is not None or not self.promoter._has_recovered:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return next(iter(await self.promoter.promotions()), None)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - the test's own clock
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Kill the gateway: nothing is cleaned up on disk."""
        for task in (self.task, self.promoter._task):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()
        await self.recycler.close()
        current = self.recycler._task
        if current is not None and not current.cancelled():
            current.exception()
