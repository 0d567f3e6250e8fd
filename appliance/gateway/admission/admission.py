"""
Lets requests through to a worker with room, and has the others wait for a place.

    enter ─► a worker with room? ─► slot
       │ no
       └──► wait ─► fair queue ─► somebody's slot is released, a worker comes back ─► slot

The invariant everything here keeps: while something waits in a lane, no worker of that lane has room.
Whatever makes room (a released slot, a look at a worker, an operator) hands it on at once, within the
same call, so no wake-up is lost and nobody who comes later overtakes.  A slot is counted from the moment
it is handed on, not from when its owner runs again; an owner that is gone by then gives it back.

Owned by one event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from appliance.errors import AtCapacityError, NoWorkerAvailableError
from appliance.gateway.admission.places import corrected_places, most_places
from appliance.gateway.admission.queue import Bounds, FairQueue, Lane, Waiter
from appliance.gateway.admission.retries import RetryBudget
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AdmissionSettings, PoolSettings
from appliance.serving.affinity import Affinity, prefixes
from appliance.serving.breaker import CLOSED, Breaker, BreakerPolicy, BreakerState
from appliance.serving.pool import WorkerPool
from appliance.serving.router import candidates, lightest, no_worker
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.tenancy import PriorityClass

HEADROOM_REQUESTS = 8
"""Requests a worker holds beyond its batch, so that a free place in the batch is filled at once."""
RETRY_SHARE = 0.2
"""Maximum retries on another worker, as a share of all requests."""
RETRY_RESERVE = 100
"""Retries that may be saved up for the failure of a full worker."""
BREAKER = BreakerPolicy(failures=5, seconds=5.0)


@dataclass(eq=False, slots=True, kw_only=True)
class Asked:
    """What is known of a request when it asks for a worker."""

    lane: Lane
    tenant: str
    priority: PriorityClass
    size_bytes: int
    """What it keeps in memory while it waits."""
    beginning: Callable[[], str]
    """Gives the text that its KV cache depends on; only asked for where there is a choice."""
    hashes: tuple[int, ...] | None = None
    """Those of its beginning, once they were needed."""
    was_repeated: bool = False
    """Whether a worker may have computed it in vain already."""


class Slot:
    """A place that one request has with one worker, until it is released."""

    __slots__ = ("_control", "_is_held", "snapshot")

    def __init__(self, control: "AdmissionControl", snapshot: WorkerSnapshot) -> None:
        self._control = control
        self._is_held = True
        self.snapshot = snapshot
        """The worker, as it was last seen when the slot was given."""

    def succeeded(self) -> None:
        """Note that the worker answered, whatever it said about the request."""
        self._control.saw_answer(self.snapshot.worker.worker_id)

    def failed(self) -> None:
        """Note that the worker could not be reached, broke off before its answer, or answered 5xx."""
        self._control.saw_failure(self.snapshot.worker.worker_id)

    def release(self) -> None:
        """Give the place back; once is enough."""
        if self._is_held:
            self._is_held = False
            self._control.pool.end(self.snapshot.worker.worker_id)


class AdmissionControl:
    """Hands out the places of the workers of one pool."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        settings: AdmissionSettings,
        pool_settings: PoolSettings,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """
        Prepare; hears of changes of the pool from now on.

        Args:
            pool: whose workers.
            settings: the `admission` section.
            pool_settings: the `pool` section.
            metrics: where waiting and refusals are counted.
            clock: monotonic seconds.
        """
        self.pool = pool
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._queue = FairQueue(
            Bounds(requests=settings.queue_requests, size_bytes=settings.queue_bytes),
            shares={
                PriorityClass.STANDARD: settings.standard_share,
                PriorityClass.BATCH: settings.batch_share,
            },
            weights=settings.tenant_weights,
        )
        self._waiting: dict[Waiter, tuple[Asked, asyncio.Future[Slot]]] = {}
        self._retries = RetryBudget(share=RETRY_SHARE, reserve=RETRY_RESERVE)
        self._affinity = Affinity(pool_settings.affinity_prefixes)
        self._remembers_beginnings = pool_settings.affinity_prefixes > 0
        self._policy = BREAKER
        self._breakers: dict[WorkerId, Breaker] = {}
        """Of workers whose last request failed; all others' are closed."""
        self._places: dict[WorkerId, int] = {}
        self._seen_at: dict[WorkerId, float] = {}
        self._able: dict[Lane, tuple[WorkerSnapshot, ...]] = {}
        self._version = -1
        pool.on_capacity(self._hand_on)
        for priority in PriorityClass:
            metrics.queue_requests.labels(priority).set_function(partial(self._queue.requests, priority))
            metrics.queue_bytes.labels(priority).set_function(partial(self._queue.size_bytes, priority))

    def refuse_if_full(self, lane: Lane, tenant: str, priority: PriorityClass, size_bytes: int) -> None:
        """
        Refuse a request that could not even wait, before anything is done for it.

        Args:
            lane: the workers that may answer it.
            tenant: whose it is.
            priority: its class.
            size_bytes: what it would keep in memory.

        Raises:
            AtCapacityError: no worker has room for it, and neither has the queue.
        """
        if self._queue.has_place(tenant, priority, size_bytes):
            return
        able = self._workers(lane)
        if able and not self._with_room(able):
            raise self._refusal(priority, "full")

    def enter(self, asked: Asked) -> Slot | None:
        """
        A slot at once; None where every worker that may answer is full, so that it has to `wait`.

        Raises:
            NoWorkerAvailableError: no worker may answer it now.
        """
        self._retries.saw_request()
        if self._queue:
            self._hand_on()  # nobody says when a breaker's time is over
        able = self._workers(asked.lane)
        if not able:
            raise no_worker(asked.lane.model, may_speculate=asked.lane.may_speculate)
        with_room = self._with_room(able)
        return self._give(asked, with_room) if with_room else None

    async def wait(self, asked: Asked, keep_alive: Callable[[], Awaitable[None]], seconds: float) -> Slot:
        """
        Wait for a slot.

        Cancelling this takes the request out of the queue, and gives back a slot it was just handed.

        Args:
            asked: what `enter` had no slot for.
            keep_alive: called whenever so many `seconds` have passed in silence.
            seconds: how long silence may last.

        Raises:
            AtCapacityError: the queue is full, the request had to make way for one of a tenant with fewer,
                or it has waited for too long.
            NoWorkerAvailableError: it has waited for too long, and no worker may answer it now.
        """
        waiter = Waiter(
            lane=asked.lane, tenant=asked.tenant, priority=asked.priority, size_bytes=asked.size_bytes
        )
        displaced = self._queue.push(waiter)
        if displaced is None:
            raise self._refusal(asked.priority, "full")
        for each in displaced:
            self._waiting.pop(each)[1].set_exception(self._refusal(each.priority, "displaced"))
        handed: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = (asked, handed)
        began = self._clock()
        try:
            await self._until(handed, asked, keep_alive, seconds)
        except BaseException:
            if handed.done() and handed.exception() is None:
                handed.result().release()
            raise
        finally:
            if self._waiting.pop(waiter, None) is not None:
                self._queue.discard(waiter)
            self._metrics.queue_seconds.labels(asked.priority).observe(self._clock() - began)
        return handed.result()

    async def _until(
        self,
        handed: asyncio.Future[Slot],
        asked: Asked,
        keep_alive: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> None:
        deadline = self._clock() + self._patience(asked.priority)
        self._hand_on()  # nobody says what happened between `enter` and now
        while not handed.done():
            left = deadline - self._clock()
            if left <= 0:
                raise self._too_late(asked)
            await asyncio.wait({handed}, timeout=min(left, seconds))
            self._hand_on()  # nor when a breaker's time is over
            if not handed.done() and self._clock() < deadline:
                await keep_alive()

    def again(self, asked: Asked, tried: Iterable[WorkerId], *, is_free: bool) -> Slot | None:
        """
        A slot with another worker, for a request that has been admitted and was not answered.

        It is not sent to the back of the queue, nor held to the number of places: there are few of
        them, and a request must not be lost because it met a dying worker.

        Args:
            asked: the request.
            tried: workers that failed it.
            is_free: whether the worker never saw it, so that trying again cannot double its cost.

        Returns:
            None where no other worker may answer it, where two may have computed it already, so that it
            may be what breaks them, or where too much is being tried again as it is.
        """
        able = tuple(each for each in self._workers(asked.lane) if each.worker.worker_id not in tried)
        if not able:
            return None
        if not is_free:
            if asked.was_repeated or not self._retries.take():
                return None
            asked.was_repeated = True
        return self._give(asked, able)

    def saw_answer(self, worker_id: WorkerId) -> None:
        """Note that a worker answered a request."""
        if self._breakers and self._breakers.pop(worker_id, CLOSED).state(0.0) is not BreakerState.CLOSED:
            self._metrics.worker_breaker_open.labels(worker_id).set(0)
            self._hand_on()

    def saw_failure(self, worker_id: WorkerId) -> None:
        """Note that a worker failed a request."""
        before = self._breakers.get(worker_id, CLOSED)
        after = self._breakers[worker_id] = before.failed(self._clock(), self._policy)
        if before.is_closed and not after.is_closed:
            self._metrics.worker_breaker_open.labels(worker_id).set(1)

    def breaker(self, worker_id: WorkerId) -> BreakerState:
        """Where a worker's breaker stands."""
        return self._breakers.get(worker_id, CLOSED).state(self._clock())

    def places(self, worker_id: WorkerId) -> int:
        """Most requests this gateway has with a worker at a time, as things are; 0 for an unknown one."""
        self._refresh()
        return self._places.get(worker_id, 0)

    def _give(self, asked: Asked, able: tuple[WorkerSnapshot, ...]) -> Slot:
        chosen = self._choose(asked, able)
        worker_id = chosen.worker.worker_id
        if worker_id in self._breakers:
            self._breakers[worker_id] = self._breakers[worker_id].begun(self._clock(), self._policy)
        self.pool.begin(worker_id)
        return Slot(self, chosen)

    def _choose(self, asked: Asked, able: tuple[WorkerSnapshot, ...]) -> WorkerSnapshot:
        """The best of several; there is at least one."""
        if len(self._able[asked.lane]) == 1:
            return able[0]
        if asked.hashes is None:
            remembers = self._remembers_beginnings
            asked.hashes = prefixes(asked.tenant, asked.lane.model, asked.beginning()) if remembers else ()
        chosen = lightest(able, self.pool.in_flight, seen_by=self._affinity.find(asked.hashes))
        assert chosen is not None  # noqa: S101 - there is at least one
        self._affinity.saw(asked.hashes, chosen.worker.worker_id)
        return chosen

    def _hand_on(self) -> None:
        """Give what room there is to those who wait for it, in turn."""
        while self._queue:
            lanes = [lane for lane in self._queue.lanes if self._with_room(self._workers(lane))]
            waiter = self._queue.take(lanes)
            if waiter is None:
                return
            asked, handed = self._waiting.pop(waiter)
            handed.set_result(self._give(asked, self._with_room(self._workers(asked.lane))))

    def _with_room(self, able: tuple[WorkerSnapshot, ...]) -> tuple[WorkerSnapshot, ...]:
        in_flight, places = self.pool.in_flight, self._places
        for each in able:
            worker_id = each.worker.worker_id
            if in_flight[worker_id] >= places[worker_id]:
                break
        else:
            return able  # the usual case
        return tuple(
            each for each in able if in_flight[each.worker.worker_id] < places[each.worker.worker_id]
        )

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
        """Take what was newly seen of the workers into account."""
        if self._version == self.pool.version:
            return
        self._version = self.pool.version
        self._able.clear()
        snapshots = {seen.worker.worker_id: seen for seen in self.pool.snapshots}
        for known in (self._places, self._seen_at, self._breakers):
            for gone in known.keys() - snapshots.keys():
                del known[gone]
        for worker_id, seen in snapshots.items():
            most = most_places(
                seen, fixed=self._settings.worker_requests, headroom=HEADROOM_REQUESTS
            )
            places = self._places.get(worker_id, most)
            if seen.metrics is None or seen.seen_at == self._seen_at.get(worker_id):
                places = min(places, most)
            else:
                places = corrected_places(
                    places,
                    most=most,
                    headroom=HEADROOM_REQUESTS,
                    ours=self.pool.in_flight[worker_id],
                    running=seen.metrics.running,
                    waiting=seen.metrics.waiting,
                )
            self._places[worker_id], self._seen_at[worker_id] = places, seen.seen_at
            self._metrics.worker_places.labels(worker_id).set(places)

    def _patience(self, priority: PriorityClass) -> float:
        """How long a request of this class may wait, in seconds."""
        is_batch = priority is PriorityClass.BATCH
        return self._settings.batch_wait_seconds if is_batch else self._settings.wait_seconds

    def _too_late(self, asked: Asked) -> AtCapacityError | NoWorkerAvailableError:
        if not self._workers(asked.lane):
            self._metrics.queue_refusals.labels(asked.priority, "no_worker").inc()
            return no_worker(asked.lane.model, may_speculate=asked.lane.may_speculate)
        return self._refusal(asked.priority, "late")

    def _refusal(self, priority: PriorityClass, reason: str) -> AtCapacityError:
        self._metrics.queue_refusals.labels(priority, reason).inc()
        if reason == "late":
            waited = f"{self._patience(priority):g} seconds"
            return AtCapacityError(f"No worker had room for this request within {waited}. Try again later.")
        if reason == "displaced":
            message = "All workers are busy, and of those who wait you have most requests. Try again later."
            return AtCapacityError(message)
        return AtCapacityError(
            "All workers are busy and as many requests wait as may. Try again in a moment."
        )
