"""
Recycle a worker: drain, restart, test with a canary, admit; one worker at a time, never the last.

    draining ─► restart ─► canary ─► admitted

With the draft this is a recycle, without it a hard-off.  A worker that fails its canary is restarted again,
then without its draft.  A draft on trial gets one attempt, and then the active one takes its place.  It fails
by excluding the worker and reporting it: a worker that could not answer the canary gets no client's request.
One that was never restarted returns to its former state.

A promotion recycles several workers in a row: it reserves the recycler, so that no other restart comes in
between.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from appliance.audit.entry_types import EntryType
from appliance.audit.sink import AuditSink, submit_best_effort
from appliance.errors import ApplianceError, ControlRefusedError, WorkerFailedError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import RecycleSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import WITH_DRAFT, CandidateDraft, RestartRequest
from appliance.serving.restartable import is_new_process, refusal
from appliance.serving.worker import Admission, Worker, WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason, SpeculationMode

CANARY_REQUESTS = 3  # completions that a restarted worker has to answer before any other request
CANARY_SECONDS = 60.0  # limit of each; the first after a start is slow
POLL_SECONDS = 0.2  # between two reads of the control loop's snapshots


class RecycleResult(StrEnum):
    """Outcome of a recycle; also the metric label."""

    RECYCLED = "recycled"
    WITHOUT_DRAFT = "without_draft"  # back in service, but not with the requested draft
    NOT_RESTARTED = "not_restarted"  # continues unchanged
    FAILED = "failed"  # failed its canary, and gets no requests
    CANCELLED = "cancelled"


class Restarter(Protocol):
    async def restart(self, worker: Worker, *, request: RestartRequest, reason: Reason) -> None:
        """Let the worker finish its requests, end and start again; returns once that is certain to happen."""


class CanaryClient(Protocol):
    async def canary(self, worker: Worker, model: str, timeout_seconds: float) -> int:
        """Let a worker complete a fixed text; fails with `WorkerFailedError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecycleParts:
    pool: WorkerPool
    client: CanaryClient
    own: Mapping[WorkerId, Restarter]  # workers that this process supervises
    others: Restarter  # for all other workers
    audit: AuditSink
    metrics: Metrics
    logger: Logger


@dataclass(frozen=True, slots=True, kw_only=True)
class RecycleJob:
    worker_id: WorkerId
    request: RestartRequest
    reason: Reason
    actor: str | None = None
    note: str | None = None

    @property
    def attempts(self) -> tuple[RestartRequest, ...]:
        """To try in turn, until one passes the canary."""
        if not self.request.with_draft:
            return (self.request, self.request)
        tried = () if self.request.candidate is None else (self.request,)
        return (*tried, WITH_DRAFT, WITH_DRAFT, RestartRequest(with_draft=False))

    def is_met_by(self, request: RestartRequest, draft: str) -> bool:
        candidate = self.request.candidate
        return request == self.request and (candidate is None or candidate.draft == draft)


class Recycler:
    """Recycles the workers of one pool; only the holder of the control lease may use it."""

    def __init__(
        self,
        parts: RecycleParts,
        *,
        settings: RecycleSettings,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`clock` is the control loop's; `sleep` waits in seconds of that clock."""
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._worker_id: WorkerId | None = None
        self._task: asyncio.Task[RecycleResult] | None = None
        self._holder: str | None = None

    @property
    def current(self) -> WorkerId | None:
        return self._worker_id if self._task is not None and not self._task.done() else None

    def reserve(self, holder: str) -> None:
        """Let only `holder` begin a recycle until `release`; raises ControlRefusedError if another has it."""
        if self._holder not in {None, holder}:
            raise ControlRefusedError(f"{self._holder} is in progress: wait until it is done")
        self._holder = holder

    def release(self, holder: str) -> None:
        if self._holder == holder:
            self._holder = None

    def refusal(
        self, worker_id: WorkerId, *, holder: str | None = None, allow_downtime: bool = False
    ) -> str | None:
        """Why a worker may not be recycled now, in one line; None if it may."""
        if self.current is not None:
            return f"worker {self.current} is being recycled: wait until that is done"
        if self._holder not in {None, holder}:
            return f"{self._holder} is in progress: wait until it is done"
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
        Recycle in the background; the task ends in a result, never in an error.

        `actor` is the operator who requested it, if one did; `candidate` the draft to try (None: the active
        one); `holder` that of the reservation; `allow_downtime` lets a model be without a worker meanwhile.
        Raises ControlRefusedError if another worker is in recycling, or this one may not be recycled now.
        """
        refused = self.refusal(worker_id, holder=holder, allow_downtime=allow_downtime)
        if refused is not None:
            raise ControlRefusedError(refused)
        request = RestartRequest(with_draft=with_draft, candidate=candidate)
        job = RecycleJob(worker_id=worker_id, request=request, reason=reason, actor=actor, note=note)
        self._worker_id = worker_id
        self._task = asyncio.get_running_loop().create_task(self._run(job))
        return self._task

    async def close(self) -> None:
        """Cancel the recycle in progress; a worker that was not restarted yet gets requests again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, job: RecycleJob) -> RecycleResult:
        pool, worker_id = self._parts.pool, job.worker_id
        before = next(seen.admission for seen in pool.snapshots if seen.worker.worker_id == worker_id)
        result, may_have_restarted = RecycleResult.CANCELLED, False
        try:
            await self._drain(job)
            # From here on it may have been restarted.
            may_have_restarted = True
            result = await self._restart_until_sound(job)
        except Exception as defect:
            # A defect here must not end the gateway.
            result = RecycleResult.FAILED
            self._parts.logger.exception(
                "worker_recycle_failed", worker=worker_id, error=type(defect).__name__
            )
        finally:
            if not may_have_restarted or result is RecycleResult.NOT_RESTARTED:
                after = before
            elif result in {RecycleResult.RECYCLED, RecycleResult.WITHOUT_DRAFT}:
                after = Admission.ADMITTED
            else:
                after = Admission.CANARY
            pool.set_admission(worker_id, after)
            self._report_end(job, result, after)
        return result

    async def _drain(self, job: RecycleJob) -> None:
        """Also wait for the requests of other gateways."""
        pool, began = self._parts.pool, self._clock()
        pool.set_admission(job.worker_id, Admission.DRAINING)
        self._report(job, "worker_drain_started")
        last_busy = began

        def is_idle() -> bool:
            nonlocal last_busy
            if pool.in_flight.get(job.worker_id):
                last_busy = self._clock()
                return False
            seen = pool.snapshot(job.worker_id)
            if seen is None or not seen.healthy or seen.metrics is None:
                return True
            # A scrape from before the end of the last request proves nothing.
            return seen.seen_at > last_busy and not seen.metrics.running and not seen.metrics.waiting

        is_drained = await self._until(is_idle, self._settings.drain_seconds)
        event = "worker_drained" if is_drained else "worker_drain_timed_out"
        self._report(job, event, seconds=round(self._clock() - began, 1))

    async def _restart_until_sound(self, job: RecycleJob) -> RecycleResult:
        for number, request in enumerate(job.attempts):
            seen = self._parts.pool.snapshot(job.worker_id)
            if seen is None:
                self._report(job, "worker_restart_refused", error="it has left the pool")
                return RecycleResult.NOT_RESTARTED if number == 0 else RecycleResult.FAILED
            restarter = self._parts.own.get(job.worker_id, self._parts.others)
            try:
                await restarter.restart(seen.worker, request=request, reason=job.reason)
            except ApplianceError as error:
                self._report(job, "worker_restart_refused", error=str(error))
                if number == 0:
                    return RecycleResult.NOT_RESTARTED
                continue
            self._parts.pool.set_admission(job.worker_id, Admission.CANARY)
            mode = mode_of(request.with_draft)
            self._report(job, "worker_restart_requested", mode=mode)
            self._audit(job, with_draft=request.with_draft)
            failure = await self._canary_failure(job, seen, with_draft=request.with_draft)
            self._audit(job, with_draft=request.with_draft, canary="failed" if failure else "passed")
            if failure is None:
                self._report(job, "worker_canary_passed", mode=mode)
                now = self._parts.pool.snapshot(job.worker_id)
                is_met = now is not None and job.is_met_by(request, now.draft)
                return RecycleResult.RECYCLED if is_met else RecycleResult.WITHOUT_DRAFT
            self._report(job, "worker_canary_failed", mode=mode, error=failure)
        return RecycleResult.FAILED

    async def _canary_failure(
        self, job: RecycleJob, before: WorkerSnapshot, *, with_draft: bool
    ) -> str | None:
        """The failure in one line, or None."""
        back = await self._until_back(job, before)
        if back is not None and back.worker is before.worker:
            # No supervisor in this process started it, so the pool does not know its mode yet.
            mode, reason = mode_of(back.speculates), None if back.speculates else job.reason
            self._parts.pool.add(replace(back.worker, mode=mode, reason=reason))
            back = await self._until_back(job, back)
        if back is None:
            return f"it did not answer within {self._settings.start_seconds:g} s"
        if back.speculates != with_draft:
            return f"it came back {'with' if back.speculates else 'without'} a draft"
        if not back.models:
            return "it serves no model"
        try:
            for _ in range(CANARY_REQUESTS):
                await self._parts.client.canary(back.worker, back.models[0].name, CANARY_SECONDS)
        except WorkerFailedError as error:
            return str(error)
        return None

    async def _until_back(self, job: RecycleJob, before: WorkerSnapshot) -> WorkerSnapshot | None:
        """Wait until the control loop finds a new process healthy; None after the start time-out."""
        was_down, is_own = False, job.worker_id in self._parts.own
        back: WorkerSnapshot | None = None

        def is_back() -> bool:
            nonlocal was_down, back
            back = self._parts.pool.snapshot(job.worker_id)
            if back is None or not back.healthy:
                was_down = not is_own  # its supervisor tells the pool of every new process
                return False
            if job.request.candidate is not None and not is_own and back.reading is None:
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

    def _report(self, job: RecycleJob, event: str, **fields: Any) -> None:  # noqa: ANN401 - see `logs`
        level = self._parts.logger.warning if "error" in fields else self._parts.logger.info
        level(event, worker=job.worker_id, reason=job.reason, **fields)

    def _report_end(self, job: RecycleJob, result: RecycleResult, admission: Admission) -> None:
        is_out = admission is not Admission.ADMITTED
        level = self._parts.logger.error if is_out else self._parts.logger.info
        level(
            "worker_recycle_ended", worker=job.worker_id, reason=job.reason, outcome=result, state=admission
        )
        self._parts.metrics.worker_recycles.labels(job.worker_id, job.reason, result).inc()
        self._parts.metrics.worker_left_out.labels(job.worker_id).set(is_out)

    def _audit(self, job: RecycleJob, *, with_draft: bool, canary: str | None = None) -> None:
        fields = {"with_draft": with_draft, "canary": canary, "actor": job.actor, "note": job.note}
        submit_best_effort(
            *(self._parts.audit, self._parts.logger, EntryType.WORKER_RECYCLED),
            worker=job.worker_id,
            reason=str(job.reason),
            **{name: value for name, value in fields.items() if value is not None},
        )


def mode_of(with_draft: bool) -> SpeculationMode:  # noqa: FBT001 - the value that is named
    return SpeculationMode.SPECULATIVE if with_draft else SpeculationMode.TARGET_ONLY
