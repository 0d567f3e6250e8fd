"""
Assigns requests to workers with free slots, and queues the others.

    enter ─► a worker with a free slot? ─► slot
       │ no
       └──► wait ─► fair queue ─► a slot is released, a worker comes back ─► slot

A request also waits if its model has no worker now, and lost the last one so recently that another may be on
its way: a restart, a rolling upgrade.  Each waits within its class's time.

The invariant: while a request waits in a lane, no worker of that lane has a free slot.  Whatever frees a slot
(a release, a scrape, an operator) assigns it within the same call, so no wake-up is lost and no later request
overtakes.  A slot is counted from its assignment, not from when the waiting task resumes; a task that was
cancelled by then releases it.

Owned by one event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from appliance.errors import AtCapacityError, NoWorkerAvailableError
from appliance.gateway.admission.queue import FairQueue, Lane, QueueBounds, Waiter
from appliance.gateway.admission.slot_count import adjusted_slots, max_slots
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AdmissionSettings, PoolSettings
from appliance.serving.affinity import Affinity, prefixes
from appliance.serving.breaker import CLOSED, Breaker, BreakerPolicy, BreakerState
from appliance.serving.pool import WorkerPool
from appliance.serving.router import candidates, lightest, no_worker
from appliance.serving.worker import Admission, WorkerId, WorkerSnapshot
from appliance.tenancy import PriorityClass

HEADROOM_REQUESTS = 8  # beyond a worker's batch, so that its batch stays full
RETRY_SHARE = 0.2  # of all requests that may be retried on another worker
RETRY_RESERVE = 100  # retries saved up for the failure of a full worker
BREAKER = BreakerPolicy(failures=5, seconds=5.0)


@dataclass(eq=False, slots=True, kw_only=True)
class AdmissionRequest:
    lane: Lane
    tenant: str
    priority: PriorityClass
    size_bytes: int  # held while it waits
    sequences: int = 1  # that it takes of a worker's slots
    prefix_text: Callable[[], str]  # what its KV cache depends on; called only to choose a worker
    wait_until: float | None = None  # clock reading; None before it waits
    hashes: tuple[int, ...] | None = None
    was_retried: bool = False  # whether a worker may have computed it in vain already


class Slot:
    """Held by one request until released."""

    __slots__ = ("_control", "_is_held", "_sequences", "snapshot")

    def __init__(self, control: "AdmissionControl", snapshot: WorkerSnapshot, sequences: int) -> None:
        self._control = control
        self._sequences = sequences
        self._is_held = True
        self.snapshot = snapshot  # as it was when the slot was assigned

    def succeeded(self) -> None:
        """The worker answered, whatever the answer."""
        self._control.record_answer(self.snapshot.worker.worker_id)

    def failed(self) -> None:
        """The worker could not be reached, broke off before its answer, or answered 5xx."""
        self._control.record_failure(self.snapshot.worker.worker_id)

    def release(self) -> None:
        """Later calls do nothing."""
        if self._is_held:
            self._is_held = False
            self._control.pool.end(self.snapshot.worker.worker_id, self._sequences)


class RetryBudget:
    """
    Bounds retries to a share of the requests, so that failures do not multiply.

    When workers fail under load, retrying every request elsewhere overloads the others too.  Requests fill
    the budget and retries empty it; `reserve` is its maximum, which lets a quiet gateway survive the failure
    of a full worker.
    """

    def __init__(self, *, share: float, reserve: float) -> None:
        self._share = share
        self._reserve = reserve
        self.left = reserve  # retries that may be made now

    def record_request(self) -> None:
        self.left = min(self._reserve, self.left + self._share)

    def take(self) -> bool:
        """Whether a retry may be made; it is counted if so."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


class AdmissionControl:
    def __init__(
        self,
        *,
        pool: WorkerPool,
        settings: AdmissionSettings,
        pool_settings: PoolSettings,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Subscribe to the pool's changes; `clock` gives monotonic seconds."""
        self.pool = pool
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._queue = FairQueue(
            QueueBounds(requests=settings.queue_requests, size_bytes=settings.queue_bytes),
            shares={
                PriorityClass.STANDARD: settings.standard_share,
                PriorityClass.BATCH: settings.batch_share,
            },
            weights=settings.tenant_weights,
        )
        self._waiting: dict[Waiter, tuple[AdmissionRequest, asyncio.Future[Slot]]] = {}
        self._retries = RetryBudget(share=RETRY_SHARE, reserve=RETRY_RESERVE)
        self._affinity = Affinity(pool_settings.affinity_prefixes)
        self._has_affinity = pool_settings.affinity_prefixes > 0
        self._policy = BREAKER
        self._breakers: dict[WorkerId, Breaker] = {}  # only after a failed request; others are closed
        self._slots: dict[WorkerId, int] = {}
        self._seen_at: dict[WorkerId, float] = {}
        self._able: dict[Lane, tuple[WorkerSnapshot, ...]] = {}
        self._version = -1
        pool.on_capacity(self._dispatch)
        for priority in PriorityClass:
            metrics.queue_requests.labels(priority).set_function(partial(self._queue.requests, priority))
            metrics.queue_bytes.labels(priority).set_function(partial(self._queue.size_bytes, priority))

    def check_capacity(self, lane: Lane, tenant: str, priority: PriorityClass, size_bytes: int) -> None:
        """Raise AtCapacityError if the request could not even be queued, before anything is done for it."""
        if self._queue.has_room(tenant, priority, size_bytes):
            return
        able = self._workers(lane)
        if able:
            if not self._with_free_slots(able):
                raise self._refusal(priority, "full")
        elif self._return_seconds(lane) > 0:
            raise no_worker(lane.model, may_speculate=lane.may_speculate)

    def enter(self, request: AdmissionRequest) -> Slot | None:
        """
        None if it has to wait: every worker of the lane is full, or away for a moment.

        Raises NoWorkerAvailableError if none may answer, and none is on its way.
        """
        self._retries.record_request()
        if self._queue:
            self._dispatch()  # no event says when a breaker may be tried
        able = self._workers(request.lane)
        if not able:
            if self._return_seconds(request.lane) > 0:
                return None
            raise no_worker(request.lane.model, may_speculate=request.lane.may_speculate)
        free = self._with_free_slots(able)
        return self._assign(request, free) if free else None

    async def wait(
        self, request: AdmissionRequest, keep_alive: Callable[[], Awaitable[None]], seconds: float
    ) -> Slot:
        """
        Wait for a slot; call `keep_alive` after every `seconds` of waiting.

        Cancelling this removes the request from the queue, and releases a slot that was just assigned to it.
        Raises AtCapacityError if the queue is full, a tenant with fewer requests displaced this one, or it
        has waited too long; NoWorkerAvailableError if meanwhile no worker may answer it.
        """
        waiter = Waiter(
            lane=request.lane,
            tenant=request.tenant,
            priority=request.priority,
            size_bytes=request.size_bytes,
            sequences=request.sequences,
        )
        displaced = self._queue.push(waiter)
        if displaced is None:
            raise self._refusal(request.priority, "full")
        for each in displaced:
            self._waiting.pop(each)[1].set_exception(self._refusal(each.priority, "displaced"))
        assigned: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = (request, assigned)
        began = self._clock()
        try:
            await self._until(assigned, request, keep_alive, seconds)
        except BaseException:
            if assigned.done() and assigned.exception() is None:
                assigned.result().release()
            raise
        finally:
            if self._waiting.pop(waiter, None) is not None:
                self._queue.discard(waiter)
            self._metrics.queue_seconds.labels(request.priority).observe(self._clock() - began)
        return assigned.result()

    async def _until(
        self,
        assigned: asyncio.Future[Slot],
        request: AdmissionRequest,
        keep_alive: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> None:
        if request.wait_until is None:
            request.wait_until = self._clock() + self._max_wait_seconds(request.priority)
        self._dispatch()  # no event says what happened between `enter` and now
        while not assigned.done():
            left = request.wait_until - self._clock()
            if not self._workers(request.lane):
                left = min(left, self._return_seconds(request.lane))
            if left <= 0:
                raise self._timeout_error(request)
            await asyncio.wait({assigned}, timeout=min(left, seconds))
            self._dispatch()  # nor when a breaker may be tried
            if not assigned.done() and left > seconds:
                await keep_alive()

    def retry(self, request: AdmissionRequest, tried: Iterable[WorkerId], *, is_free: bool) -> Slot | None:
        """
        Assign a slot of a worker not in `tried` to a request that was admitted and not answered.

        It neither returns to the queue nor counts against the slots: there are few of them, and a request
        must not be lost because it met a failing worker.  `is_free`: no worker received it, so a retry cannot
        double its cost. None if no other worker may answer it, if two may have computed it already (it may be
        what breaks them), or if the retry budget is empty.
        """
        able = tuple(each for each in self._workers(request.lane) if each.worker.worker_id not in tried)
        if not able or not self._may_retry(request, is_free=is_free):
            return None
        return self._assign(request, able)

    def may_wait(self, request: AdmissionRequest, *, is_free: bool) -> bool:
        """
        Whether a request whose worker failed may wait for one to return; `is_free` is as for `retry`.

        Not if a worker can answer now: `retry` would have chosen it, unless it has failed this request.
        """
        if self._workers(request.lane) or self._return_seconds(request.lane) <= 0:
            return False
        return self._may_retry(request, is_free=is_free)

    def _may_retry(self, request: AdmissionRequest, *, is_free: bool) -> bool:
        if is_free:
            return True
        if request.was_retried or not self._retries.take():
            return False
        request.was_retried = True
        return True

    def _return_seconds(self, lane: Lane) -> float:
        """Maximum time that requests wait for a worker to return, if there is none; 0 if none is expected."""
        allowed, now = self._settings.worker_wait_seconds, self._clock()
        return max(
            (
                allowed if seen.admission is not Admission.ADMITTED else seen.seen_at + allowed - now
                for seen in self.pool.snapshots
                if seen.serves(lane.model)
                and not (seen.drained or seen.leaving)
                and (lane.may_speculate or not seen.speculates)
            ),
            default=0.0,
        )

    def record_answer(self, worker_id: WorkerId) -> None:
        if self._breakers and self._breakers.pop(worker_id, CLOSED).state(0.0) is not BreakerState.CLOSED:
            self._metrics.worker_breaker_open.labels(worker_id).set(0)
            self._dispatch()

    def record_failure(self, worker_id: WorkerId) -> None:
        before = self._breakers.get(worker_id, CLOSED)
        after = self._breakers[worker_id] = before.failed(self._clock(), self._policy)
        if before.is_closed and not after.is_closed:
            self._metrics.worker_breaker_open.labels(worker_id).set(1)

    def breaker(self, worker_id: WorkerId) -> BreakerState:
        return self._breakers.get(worker_id, CLOSED).state(self._clock())

    def slots(self, worker_id: WorkerId) -> int:
        """Maximum requests of this gateway in flight at a worker now; 0 for an unknown worker."""
        self._refresh()
        return self._slots.get(worker_id, 0)

    def _assign(self, request: AdmissionRequest, able: tuple[WorkerSnapshot, ...]) -> Slot:
        chosen = self._choose(request, able)
        worker_id = chosen.worker.worker_id
        if worker_id in self._breakers:
            self._breakers[worker_id] = self._breakers[worker_id].begun(self._clock(), self._policy)
        self.pool.begin(worker_id, request.sequences)
        return Slot(self, chosen, request.sequences)

    def _choose(self, request: AdmissionRequest, able: tuple[WorkerSnapshot, ...]) -> WorkerSnapshot:
        if len(self._able[request.lane]) == 1:
            return able[0]
        if request.hashes is None:
            request.hashes = (
                prefixes(request.tenant, request.lane.model, request.prefix_text())
                if self._has_affinity
                else ()
            )
        chosen = lightest(able, self.pool.in_flight, seen_by=self._affinity.find(request.hashes))
        assert chosen is not None  # noqa: S101 - there is at least one
        self._affinity.record(request.hashes, chosen.worker.worker_id)
        return chosen

    def _dispatch(self) -> None:
        while self._queue:
            lanes = [lane for lane in self._queue.lanes if self._with_free_slots(self._workers(lane))]
            waiter = self._queue.take(lanes)
            if waiter is None:
                return
            request, assigned = self._waiting.pop(waiter)
            assigned.set_result(self._assign(request, self._with_free_slots(self._workers(request.lane))))

    def _with_free_slots(self, able: tuple[WorkerSnapshot, ...]) -> tuple[WorkerSnapshot, ...]:
        in_flight, slots = self.pool.in_flight, self._slots
        for each in able:
            worker_id = each.worker.worker_id
            if in_flight[worker_id] >= slots[worker_id]:
                break
        else:
            return able  # the usual case
        return tuple(each for each in able if in_flight[each.worker.worker_id] < slots[each.worker.worker_id])

    def _workers(self, lane: Lane) -> tuple[WorkerSnapshot, ...]:
        """The workers that may answer a lane now; those whose breaker is open only if there is no other."""
        if self._version != self.pool.version:
            self._refresh()
        able = self._able.get(lane)
        if able is None:
            able = self._able[lane] = candidates(
                lane.model, self.pool.snapshots, may_speculate=lane.may_speculate
            )
        if self._breakers and len(able) > 1:
            now = self._clock()
            closed = tuple(
                each for each in able if self._breakers.get(each.worker.worker_id, CLOSED).allows(now)
            )
            return closed or able
        return able

    def _refresh(self) -> None:
        if self._version == self.pool.version:
            return
        self._version = self.pool.version
        self._able.clear()
        snapshots = {seen.worker.worker_id: seen for seen in self.pool.snapshots}
        for known in (self._slots, self._seen_at, self._breakers):
            for gone in known.keys() - snapshots.keys():
                del known[gone]
        for worker_id, seen in snapshots.items():
            most = max_slots(seen, fixed=self._settings.worker_requests, headroom=HEADROOM_REQUESTS)
            slots = self._slots.get(worker_id, most)
            if seen.metrics is None or seen.seen_at == self._seen_at.get(worker_id):
                slots = min(slots, most)
            else:
                slots = adjusted_slots(
                    slots,
                    most=most,
                    headroom=HEADROOM_REQUESTS,
                    ours=self.pool.in_flight[worker_id],
                    running=seen.metrics.running,
                    waiting=seen.metrics.waiting,
                )
            self._slots[worker_id], self._seen_at[worker_id] = slots, seen.seen_at
            self._metrics.worker_places.labels(worker_id).set(slots)

    def _max_wait_seconds(self, priority: PriorityClass) -> float:
        is_batch = priority is PriorityClass.BATCH
        return self._settings.batch_wait_seconds if is_batch else self._settings.wait_seconds

    def _timeout_error(self, request: AdmissionRequest) -> AtCapacityError | NoWorkerAvailableError:
        if not self._workers(request.lane):
            self._metrics.queue_refusals.labels(request.priority, "no_worker").inc()
            return no_worker(request.lane.model, may_speculate=request.lane.may_speculate)
        return self._refusal(request.priority, "late")

    def _refusal(self, priority: PriorityClass, reason: str) -> AtCapacityError:
        self._metrics.queue_refusals.labels(priority, reason).inc()
        if reason == "late":
            waited = f"{self._max_wait_seconds(priority):g} seconds"
            return AtCapacityError(f"No worker had room for this request within {waited}. Try again later.")
        if reason == "displaced":
            message = "All workers are busy, and your tenant has the longest queue. Try again later."
            return AtCapacityError(message)
        return AtCapacityError("All workers are busy and the queue is full. Try again in a moment.")
