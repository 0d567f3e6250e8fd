"""
Take a worker out of service, start it anew, try it out, let it back in: one at a time, never the last.

    draining ─► restart ─► canary ─► admitted

With the draft this is a recycle, without it a hard-off.  A worker that does not come back sound is
restarted once more, then without its draft.  A draft on trial is tried once, and then the one in
service takes its place.  It fails by keeping the worker out and saying so: a worker that could not
even answer us gets no request of anybody else.  One that was never restarted goes back to where it
was.

Whoever has to recycle several workers in a row reserves the recycler, so that nobody else's restart
comes in between.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from appliance.audit.registry import EntryType
from appliance.audit.sink import AuditSink
from appliance.errors import ApplianceError, AuditError, ControlRefusedError, WorkerFailedError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import RecycleSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import WITH_DRAFT, CandidateDraft, RestartRequest
from appliance.serving.restartable import is_new_process, refusal
from appliance.serving.worker import Admission, Worker, WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason, SpeculationMode

CANARY_REQUESTS = 3
"""Completions a restarted worker has to answer before it gets any other request."""
CANARY_SECONDS = 60.0
"""Time limit of each; the first after a start is slow."""
POLL_SECONDS = 0.2
"""Between two looks at what the control loop has seen."""


class RecycleResult(StrEnum):
    """How a recycling ended; also the metric label."""

    RECYCLED = "recycled"
    WITHOUT_DRAFT = "without_draft"
    """It is back in service, but not with the draft that was asked for."""
    NOT_RESTARTED = "not_restarted"
    """It could not be restarted, and goes on as it was."""
    FAILED = "failed"
    """It did not come back sound, and gets no requests."""
    CANCELLED = "cancelled"


class Restarter(Protocol):
    """Whoever can restart a worker."""

    async def restart(self, worker: Worker, *, request: RestartRequest, reason: Reason) -> None:
        """Have it finish its requests, end and start again; returns once that is certain to happen."""


class CanaryClient(Protocol):
    """What is needed of the HTTP client."""

    async def canary(self, worker: Worker, model: str, timeout_seconds: float) -> int:
        """Have a worker complete a fixed text; fails with `WorkerFailedError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecycleParts:
    """What a recycler works with, built by the composition root."""

    pool: WorkerPool
    client: CanaryClient
    own: Mapping[WorkerId, Restarter]
    """Workers that this process supervises."""
    others: Restarter
    """For all other workers."""
    audit: AuditSink
    metrics: Metrics
    logger: Logger


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be done with a worker, and why."""

    worker_id: WorkerId
    request: RestartRequest
    reason: Reason
    actor: str | None = None
    note: str | None = None

    @property
    def attempts(self) -> tuple[RestartRequest, ...]:
        """How it is started, one after the other, until it is sound."""
        if not self.request.with_draft:
            return (self.request, self.request)
        tried = () if self.request.candidate is None else (self.request,)
        return (*tried, WITH_DRAFT, WITH_DRAFT, RestartRequest(with_draft=False))

    def is_met_by(self, request: RestartRequest, draft: str) -> bool:
        """Whether a worker that was started by this request, and has this draft, is what was ordered."""
        candidate = self.request.candidate
        return request == self.request and (candidate is None or candidate.draft == draft)


class Recycler:
    """Recycles the workers of one pool; whoever lets it must be the only one who does."""

    def __init__(
        self,
        parts: RecycleParts,
        *,
        settings: RecycleSettings,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """
        Prepare; nothing runs before `begin`.

        Args:
            parts: what to work with.
            settings: the `recycle` section.
            clock: monotonic seconds, the same as the control loop's.
            sleep: waits, in seconds of that clock.
        """
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._worker_id: WorkerId | None = None
        self._task: asyncio.Task[RecycleResult] | None = None
        self._holder: str | None = None

    @property
    def current(self) -> WorkerId | None:
        """The worker that is being recycled now."""
        return self._worker_id if self._task is not None and not self._task.done() else None

    def reserve(self, holder: str) -> None:
        """
        Let nobody but `holder` begin anything until `release`.

        Raises:
            ControlRefusedError: somebody else has it.
        """
        if self._holder not in {None, holder}:
            raise ControlRefusedError(f"{self._holder} is under way: wait until it is done")
        self._holder = holder

    def release(self, holder: str) -> None:
        """Let others begin again; nothing where somebody else has it."""
        if self._holder == holder:
            self._holder = None

    def refusal(
        self, worker_id: WorkerId, *, holder: str | None = None, allow_downtime: bool = False
    ) -> str | None:
        """Why a worker may not be recycled now, in one line; None if it may."""
        if self.current is not None:
            return f"worker {self.current} is being recycled: wait until that is done"
        if self._holder not in {None, holder}:
            return f"{self._holder} is under way: wait until it is done"
        return refusal(self._parts.pool.snapshots, worker_id, allow_downtime=allow_downtime)

    def begin(
        self,
        worker_id: WorkerId,
        *,
        with_draft: bool,
        reason: Reason,
        actor: str | None = None,
        note: str | None = None,
        candidate: CandidateDraft | None = None,
        holder: str | None = None,
        allow_downtime: bool = False,
    ) -> asyncio.Task[RecycleResult]:
        """
        Begin to recycle a worker in the background; the task ends in a result, never in an error.

        Args:
            worker_id: which.
            with_draft: whether it is to come back with its draft.
            reason: why.
            actor: who asked for it, where somebody did.
            note: why, in their words.
            candidate: the draft to try on it; None for the one in service.
            holder: for whom the recycler is reserved, where it is.
            allow_downtime: whether a model may be without a worker meanwhile.

        Raises:
            ControlRefusedError: another one is being recycled, or this one may not be; says why.
        """
        refused = self.refusal(worker_id, holder=holder, allow_downtime=allow_downtime)
        if refused is not None:
            raise ControlRefusedError(refused)
        request = RestartRequest(with_draft=with_draft, candidate=candidate)
        order = Order(worker_id=worker_id, request=request, reason=reason, actor=actor, note=note)
        self._worker_id = worker_id
        self._task = asyncio.get_running_loop().create_task(self._carry_out(order))
        return self._task

    async def recycle(self, worker_id: WorkerId, *, with_draft: bool, reason: Reason) -> RecycleResult:
        """Recycle a worker and wait for it; as `begin` otherwise."""
        return await self.begin(worker_id, with_draft=with_draft, reason=reason)

    async def close(self) -> None:
        """Give up what is under way; a worker that was not restarted yet gets requests again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _carry_out(self, order: Order) -> RecycleResult:
        pool, worker_id = self._parts.pool, order.worker_id
        before = next(seen.admission for seen in pool.snapshots if seen.worker.worker_id == worker_id)
        result, was_asked = RecycleResult.CANCELLED, False
        try:
            await self._drain(order)
            # From here on nobody can say for certain that it goes on as it was.
            was_asked = True
            result = await self._renew(order)
        except Exception as defect:
            # A defect here must not end the gateway.
            result = RecycleResult.FAILED
            self._parts.logger.exception(
                "worker_recycle_failed", worker=worker_id, error=type(defect).__name__
            )
        finally:
            if not was_asked or result is RecycleResult.NOT_RESTARTED:
                after = before
            elif result in {RecycleResult.RECYCLED, RecycleResult.WITHOUT_DRAFT}:
                after = Admission.ADMITTED
            else:
                after = Admission.CANARY
            pool.set_admission(worker_id, after)
            self._tell_end(order, result, after)
        return result

    async def _drain(self, order: Order) -> None:
        """Send it nothing more, and wait for what it has; other gateways' requests count as well."""
        pool, began = self._parts.pool, self._clock()
        pool.set_admission(order.worker_id, Admission.DRAINING)
        self._tell(order, "worker_drain_started")
        last_busy = began

        def is_idle() -> bool:
            nonlocal last_busy
            if pool.in_flight.get(order.worker_id):
                last_busy = self._clock()
                return False
            seen = pool.snapshot(order.worker_id)
            if seen is None or not seen.healthy or seen.metrics is None:
                return True
            # What was seen before the last request had ended says nothing about now.
            return seen.seen_at > last_busy and not seen.metrics.running and not seen.metrics.waiting

        is_drained = await self._until(is_idle, self._settings.drain_seconds)
        event = "worker_drained" if is_drained else "worker_drain_timed_out"
        self._tell(order, event, seconds=round(self._clock() - began, 1))

    async def _renew(self, order: Order) -> RecycleResult:
        """Restart it until it is sound: as ordered, once more, at last without its draft."""
        for number, request in enumerate(order.attempts):
            seen = self._parts.pool.snapshot(order.worker_id)
            if seen is None:
                self._tell(order, "worker_restart_refused", error="it has left the pool")
                return RecycleResult.NOT_RESTARTED if number == 0 else RecycleResult.FAILED
            restarter = self._parts.own.get(order.worker_id, self._parts.others)
            try:
                await restarter.restart(seen.worker, request=request, reason=order.reason)
            except ApplianceError as error:
                self._tell(order, "worker_restart_refused", error=str(error))
                if number == 0:
                    return RecycleResult.NOT_RESTARTED
                continue
            self._parts.pool.set_admission(order.worker_id, Admission.CANARY)
            mode = mode_of(request.with_draft)
            self._tell(order, "worker_restart_asked", mode=mode)
            self._audit(order, with_draft=request.with_draft)
            failure = await self._try_out(order, seen, with_draft=request.with_draft)
            self._audit(order, with_draft=request.with_draft, canary="failed" if failure else "passed")
            if failure is None:
                self._tell(order, "worker_canary_passed", mode=mode)
                now = self._parts.pool.snapshot(order.worker_id)
                is_met = now is not None and order.is_met_by(request, now.draft)
                return RecycleResult.RECYCLED if is_met else RecycleResult.WITHOUT_DRAFT
            self._tell(order, "worker_canary_failed", mode=mode, error=failure)
        return RecycleResult.FAILED

    async def _try_out(self, order: Order, before: WorkerSnapshot, *, with_draft: bool) -> str | None:
        """Wait until the worker is back, and ask it something; what is wrong with it, if anything."""
        back = await self._until_back(order, before)
        if back is not None and back.worker is before.worker:
            # Nobody in this process started it, so nobody has said yet how it runs now.
            mode, reason = mode_of(back.speculates), None if back.speculates else order.reason
            self._parts.pool.add(replace(back.worker, mode=mode, reason=reason))
            back = await self._until_back(order, back)
        if back is None:
            return f"it did not answer within {self._settings.start_seconds:g} s"
        if back.speculates != with_draft:
            return f"it came back {'with' if back.speculates else 'without'} a draft"
        if not back.models:
            return "it serves no model"
        try:
            for _ in range(CANARY_REQUESTS):
                await self._parts.client.canary(
                    back.worker, back.models[0].name, CANARY_SECONDS
                )
        except WorkerFailedError as error:
            return str(error)
        return None

    async def _until_back(self, order: Order, before: WorkerSnapshot) -> WorkerSnapshot | None:
        """Wait until the control loop has seen another process healthy; None if it does not in time."""
        was_down, is_own = False, order.worker_id in self._parts.own
        back: WorkerSnapshot | None = None

        def is_back() -> bool:
            nonlocal was_down, back
            back = self._parts.pool.snapshot(order.worker_id)
            if back is None or not back.healthy:
                was_down = not is_own  # its supervisor tells the pool of every new process
                return False
            if order.request.candidate is not None and not is_own and back.reading is None:
                return False  # which draft it has, only its plugin can say
            return is_new_process(before, back, was_down=was_down)

        return back if await self._until(is_back, self._settings.start_seconds) else None

    async def _until(self, is_true: Callable[[], bool], seconds: float) -> bool:
        deadline = self._clock() + seconds
        while not is_true():
            if self._clock() >= deadline:
                return False
            await self._sleep(POLL_SECONDS)
        return True

    def _tell(self, order: Order, event: str, **fields: Any) -> None:  # noqa: ANN401 - see `logs`
        level = self._parts.logger.warning if "error" in fields else self._parts.logger.info
        level(event, worker=order.worker_id, reason=order.reason, **fields)

    def _tell_end(self, order: Order, result: RecycleResult, admission: Admission) -> None:
        is_out = admission is not Admission.ADMITTED
        level = self._parts.logger.error if is_out else self._parts.logger.info
        level(
            "worker_recycle_ended",
            worker=order.worker_id,
            reason=order.reason,
            outcome=result,
            state=admission,
        )
        self._parts.metrics.worker_recycles.labels(order.worker_id, order.reason, result).inc()
        self._parts.metrics.worker_left_out.labels(order.worker_id).set(is_out)

    def _audit(self, order: Order, *, with_draft: bool, canary: str | None = None) -> None:
        fields = {"with_draft": with_draft, "canary": canary, "actor": order.actor, "note": order.note}
        try:
            self._parts.audit.submit(
                EntryType.WORKER_RECYCLED,
                worker=order.worker_id,
                reason=str(order.reason),
                **{name: value for name, value in fields.items() if value is not None},
            )
        except AuditError as error:
            self._parts.logger.warning(
                "audit_entry_refused", reason=str(EntryType.WORKER_RECYCLED), error=str(error)
            )


def mode_of(with_draft: bool) -> SpeculationMode:  # noqa: FBT001 - the value that is named
    """The mode of a worker that was started with its draft, or without."""
    return SpeculationMode.SPECULATIVE if with_draft else SpeculationMode.TARGET_ONLY
