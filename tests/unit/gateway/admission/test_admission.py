"""Slots are respected, assigned in turn, and never lost."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from appliance.errors import AtCapacityError, NoWorkerAvailableError
from appliance.gateway.admission import AdmissionControl, AdmissionRequest, Lane, Slot, admission
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AdmissionSettings, PoolSettings
from appliance.serving.breaker import BreakerPolicy, BreakerState
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel, Worker, WorkerId
from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.values import SpeculationMode
from appliance.tenancy import PriorityClass
from tests.clock import Clock

INTERACTIVE, STANDARD, BATCH = PriorityClass
A, B = WorkerId("a"), WorkerId("b")
DEMO = Lane("demo", may_speculate=True)
TICK = 0.01
LONG = "x" * 20_000


class ControlledPool:
    """Admission control of a pool whose workers have few slots."""

    def __init__(
        self, workers: int = 1, *, breaker_seconds: float = 5.0, prefixes: int = 100, retries=None, **own
    ) -> None:
        self.pool = WorkerPool()
        self.clock = Clock()
        self.metrics = Metrics(CollectorRegistry())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admission, "BREAKER", BreakerPolicy(failures=2, seconds=breaker_seconds))
            if retries is not None:
                patch.setattr(admission, "RETRY_SHARE", retries[0])
                patch.setattr(admission, "RETRY_RESERVE", retries[1])
            self.control = AdmissionControl(
                pool=self.pool,
                settings=AdmissionSettings(
                    **{"worker_requests": 2, "queue_requests": 8, "worker_wait_seconds": 0, **own}
                ),
                pool_settings=PoolSettings(affinity_prefixes=prefixes),
                metrics=self.metrics,
                clock=self.clock,
            )
        for worker_id in (A, B)[:workers]:
            self.pool.add(Worker(worker_id=worker_id, url=f"http://127.0.0.1/{worker_id}"))
            self.scrape(worker_id)

    def scrape(self, worker_id: WorkerId, running: int = 0, waiting: int = 0, model: str = "demo") -> None:
        """Store a successful scrape of a worker."""
        self.clock.now += 0.001
        seen = WorkerMetrics(
            running=running,
            waiting=waiting,
            kv_cache_usage=0.0,
            prompt_tokens_total=0,
            generation_tokens_total=0,
            preemptions_total=0,
            finished_requests_total={},
            speculation=None,
        )
        self.pool.update(
            replace(
                self.pool.snapshot(worker_id),
                healthy=True,
                models=(ServedModel(name=model, max_model_len=None, created=0),),
                metrics=seen,
                seen_at=self.clock.now,
            )
        )

    def fill(self, tenant: str = "first") -> list[Slot]:
        """Take every slot."""
        held = []
        while (slot := self.control.enter(make_request(tenant))) is not None:
            held.append(slot)
        return held

    def waiting(self, request: AdmissionRequest) -> asyncio.Task[Slot]:
        """Queue a request."""
        assert self.control.enter(request) is None
        return asyncio.ensure_future(self.control.wait(request, nothing, 60.0))

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels)


def make_request(
    tenant: str = "acme",
    priority: PriorityClass = STANDARD,
    text: str = "",
    model: str = "demo",
    sequences: int = 1,
) -> AdmissionRequest:
    return AdmissionRequest(
        lane=Lane(model, may_speculate=True),
        tenant=tenant,
        priority=priority,
        size_bytes=100,
        sequences=sequences,
        prefix_text=lambda: text,
    )


async def soon(waiting: asyncio.Task[Slot]) -> Slot:
    """The assigned slot, which must come soon."""
    async with asyncio.timeout(5):
        return await waiting


async def nothing() -> None:
    """A keep-alive that does nothing."""


# Without a queue.


def test_a_request_gets_a_free_slot_at_once():
    """Up to the slots of the worker, and again once one is released."""
    tested = ControlledPool()
    first, second = tested.control.enter(make_request()), tested.control.enter(make_request())
    assert tested.pool.in_flight == {A: 2}
    assert tested.control.enter(make_request()) is None
    first.release()
    first.release()
    assert tested.pool.in_flight == {A: 1}
    assert tested.control.enter(make_request()).snapshot.worker.worker_id == A
    second.release()


async def test_a_request_takes_a_slot_per_sequence():
    """It may take more than are free; the next request waits until enough of them are released."""
    tested = ControlledPool(worker_requests=4)
    small, large = tested.control.enter(make_request()), tested.control.enter(make_request(sequences=8))
    assert tested.pool.in_flight == {A: 9}
    waiting = tested.waiting(make_request("other"))
    await asyncio.sleep(TICK)
    small.release()
    await asyncio.sleep(TICK)
    assert not waiting.done()
    large.release()
    assert (await soon(waiting)).snapshot.worker.worker_id == A
    assert tested.pool.in_flight == {A: 1}


def test_a_request_without_a_worker_is_refused_at_once():
    """503: waiting helps only if workers are full, or one is on its way."""
    tested = ControlledPool(worker_wait_seconds=30)
    with pytest.raises(NoWorkerAvailableError):
        tested.control.enter(make_request(model="other"))
    tested.pool.report_unreachable(A)
    tested.clock.now += 30
    with pytest.raises(NoWorkerAvailableError):
        tested.control.enter(make_request())


async def test_requests_wait_for_a_worker_that_restarts():
    """As long after the last one was up as the setting says, and no longer; in the order they came."""
    tested = ControlledPool(worker_wait_seconds=30, worker_requests=1)
    tested.pool.report_unreachable(A)
    first, second = (
        asyncio.ensure_future(tested.control.wait(make_request(), nothing, TICK)) for _ in range(2)
    )
    await asyncio.sleep(0)
    tested.clock.now += 29
    tested.pool.add(Worker(worker_id=A, url="http://127.0.0.1/a"))  # its supervisor has started it again
    tested.scrape(A)
    slot = await first
    assert not second.done()
    tested.pool.report_unreachable(A)
    tested.clock.now += 30
    slot.release()
    with pytest.raises(NoWorkerAvailableError, match="No worker is ready for demo"):
        await second
    assert tested.value("appliance_queue_refusals_total", priority="standard", reason="no_worker") == 1


@pytest.mark.parametrize("state", ["drained", "leaving"])
def test_no_request_waits_for_a_worker_that_an_operator_took_away(state):
    """It does not return by itself."""
    tested = ControlledPool(worker_wait_seconds=30)
    tested.pool.begin(A)
    tested.pool.set_drained(A, True) if state == "drained" else tested.pool.leave(A)
    with pytest.raises(NoWorkerAvailableError):
        tested.control.enter(make_request())


def test_slots_follow_the_queue_of_the_worker(monkeypatch):
    """A worker whose KV cache holds four requests does not get a full batch."""
    monkeypatch.setattr(admission, "HEADROOM_REQUESTS", 2)
    tested = ControlledPool(worker_requests=50)
    held = tested.fill()
    assert len(held) == 50
    tested.scrape(A, running=4, waiting=46)
    assert tested.control.slots(A) == 6
    for slot in held[:45]:
        slot.release()
    assert tested.control.enter(make_request()) is not None
    assert tested.control.enter(make_request()) is None
    tested.scrape(A, running=4, waiting=0)
    assert tested.control.slots(A) == 8
    assert tested.value("appliance_worker_places", worker="a") == 8


# The queue.


async def test_a_released_slot_is_assigned_to_a_queued_request():
    """In the same call, and counted from then on: no later request can overtake."""
    tested = ControlledPool()
    held = tested.fill()
    late = tested.waiting(make_request("late"))
    await asyncio.sleep(TICK)
    assert tested.value("appliance_queue_requests", priority="standard") == 1
    held[0].release()
    assert tested.pool.in_flight == {A: 2}
    assert tested.control.enter(make_request()) is None
    assert (await soon(late)).snapshot.worker.worker_id == A
    assert tested.value("appliance_queue_requests", priority="standard") == 0
    assert tested.value("appliance_queue_seconds_count", priority="standard") == 1


async def test_tenants_take_turns():
    """A tenant with six queued requests delays one with a single request by one turn."""
    tested, order = ControlledPool(), []
    held = tested.fill()
    tasks = []
    for tenant in [*["many"] * 6, "single"]:
        task = tested.waiting(make_request(tenant))
        task.add_done_callback(lambda _, tenant=tenant: order.append(tenant))
        tasks.append(task)
    await asyncio.sleep(TICK)
    for slot in held:
        slot.release()
    for task in [*tasks[:1], tasks[6], *tasks[1:6]]:
        (await soon(task)).release()
    assert order.index("single") == 1


async def test_a_worker_that_comes_back_serves_queued_requests():
    """A scrape or an undrain: whatever frees a slot assigns it."""
    tested = ControlledPool(2)
    tested.pool.set_drained(B, True)
    tested.fill()
    waiting = [tested.waiting(make_request()) for _ in range(2)]
    await asyncio.sleep(TICK)
    tested.pool.set_drained(B, False)
    assert {(await soon(each)).snapshot.worker.worker_id for each in waiting} == {B}


async def test_a_full_model_does_not_block_another():
    """A request for another model overtakes queued ones."""
    tested = ControlledPool(2)
    tested.scrape(B, model="other")
    tested.fill()
    waiting = tested.waiting(make_request())
    await asyncio.sleep(TICK)
    assert tested.control.enter(make_request(model="other")).snapshot.worker.worker_id == B
    assert not waiting.done()
    waiting.cancel()


# Refusals.


async def test_a_request_is_refused_if_workers_and_queue_are_full():
    """429 from both checks; other classes and models are not affected."""
    tested = ControlledPool(2, queue_requests=1)
    tested.scrape(B, model="other")
    tested.fill()
    waiting = tested.waiting(make_request())
    await asyncio.sleep(TICK)
    with pytest.raises(AtCapacityError):
        tested.control.check_capacity(DEMO, "first", STANDARD, 100)
    with pytest.raises(AtCapacityError):
        await tested.control.wait(make_request("another"), nothing, 1.0)
    tested.control.check_capacity(DEMO, "first", BATCH, 100)
    tested.control.check_capacity(Lane("other", may_speculate=True), "first", STANDARD, 100)
    tested.control.check_capacity(Lane("unserved", may_speculate=True), "first", STANDARD, 100)
    assert tested.value("appliance_queue_refusals_total", priority="standard", reason="full") == 2
    waiting.cancel()


async def test_the_tenant_with_the_longest_queue_is_displaced():
    """One tenant cannot fill the queue; its newest request is refused at once."""
    tested = ControlledPool(queue_requests=2)
    held = tested.fill()
    older, newer = tested.waiting(make_request("many")), tested.waiting(make_request("many"))
    await asyncio.sleep(TICK)
    few = tested.waiting(make_request("few"))
    with pytest.raises(AtCapacityError, match="longest queue"):
        await soon(newer)
    assert tested.value("appliance_queue_refusals_total", priority="standard", reason="displaced") == 1
    for slot in held:
        slot.release()
    assert await soon(older)
    assert await soon(few)
    assert tested.pool.in_flight == {A: 2}


async def test_a_request_displaced_and_cancelled_in_one_step_leaves_the_queue():
    tested = ControlledPool(queue_requests=2)
    tested.fill()
    older, newer = tested.waiting(make_request("many")), tested.waiting(make_request("many"))
    await asyncio.sleep(TICK)
    few = tested.waiting(make_request("few"))
    await asyncio.sleep(0)
    newer.cancel()
    with pytest.raises((asyncio.CancelledError, AtCapacityError)):
        await newer
    assert tested.value("appliance_queue_requests", priority="standard") == 2
    older.cancel()
    few.cancel()


async def test_a_request_that_waited_too_long_is_refused():
    """429 if the workers are full, 503 if there is none left."""
    tested = ControlledPool(wait_seconds=30.0)
    tested.fill()
    for lost, error in ((False, AtCapacityError), (True, NoWorkerAvailableError)):
        request = make_request()
        assert tested.control.enter(request) is None
        waiting = asyncio.ensure_future(tested.control.wait(request, nothing, TICK))
        await asyncio.sleep(2 * TICK)
        assert not waiting.done()
        if lost:
            tested.pool.report_unreachable(A)
        tested.clock.now += 31.0
        with pytest.raises(error):
            await waiting
    assert tested.value("appliance_queue_requests", priority="standard") == 0
    assert tested.value("appliance_queue_refusals_total", priority="standard", reason="late") == 1
    assert tested.value("appliance_queue_refusals_total", priority="standard", reason="no_worker") == 1


async def test_a_queued_request_is_kept_alive():
    """At the given interval; if that shows that the client left, the request leaves the queue."""
    tested, kept = ControlledPool(), 0
    tested.fill()

    async def keep_alive() -> None:
        nonlocal kept
        kept += 1
        if kept == 3:
            raise ConnectionResetError

    request = make_request()
    assert tested.control.enter(request) is None
    with pytest.raises(ConnectionResetError):
        await tested.control.wait(request, keep_alive, TICK)
    assert (kept, tested.value("appliance_queue_requests", priority="standard")) == (3, 0)


# Clients that leave.


async def test_a_request_whose_client_left_leaves_the_queue():
    """The next request gets the slot."""
    tested = ControlledPool()
    held = tested.fill()
    gone, stays = tested.waiting(make_request()), tested.waiting(make_request())
    await asyncio.sleep(TICK)
    gone.cancel()
    await asyncio.sleep(TICK)
    held[0].release()
    assert await soon(stays)
    assert tested.pool.in_flight == {A: 2}


async def test_a_cancelled_request_releases_the_slot_just_assigned_to_it():
    """Cancelled between the assignment and its own turn: the next one gets the slot at once."""
    tested = ControlledPool()
    held = tested.fill()
    gone, stays = tested.waiting(make_request()), tested.waiting(make_request())
    await asyncio.sleep(TICK)
    held[0].release()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await soon(stays)
    assert tested.pool.in_flight == {A: 2}


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_no_slot_is_lost_whatever_happens(seed: int):
    """Clients come and leave at any moment, workers fail and come back: in the end every slot is free."""
    asyncio.run(storm(seed))


async def storm(seed: int) -> None:
    """A few hundred clients on two workers, some of them impatient."""
    chance = random.Random(seed)
    tested = ControlledPool(2, queue_requests=30, worker_requests=3)
    ended: Counter[str] = Counter()

    async def client() -> None:
        request = make_request(chance.choice("abc"), chance.choice(list(PriorityClass)))
        try:
            tested.control.check_capacity(request.lane, request.tenant, request.priority, request.size_bytes)
            slot = tested.control.enter(request) or await tested.control.wait(request, nothing, 60.0)
        except (AtCapacityError, NoWorkerAvailableError):
            ended["refused"] += 1
            return
        assert all(count <= 3 for count in tested.pool.in_flight.values())
        try:
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        finally:
            slot.release()
        ended["served"] += 1

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.ensure_future(client()))
        event = chance.random()
        if event < 0.2:
            chance.choice(tasks).cancel()
        elif event < 0.3:
            tested.pool.report_unreachable(chance.choice([A, B]))
        elif event < 0.5:
            tested.scrape(chance.choice([A, B]))
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    tested.scrape(A)
    tested.scrape(B)
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert tested.pool.in_flight == {A: 0, B: 0}
    assert sum(tested.value("appliance_queue_requests", priority=each) for each in PriorityClass) == 0
    assert ended["served"]
    assert not [task for task in tasks if not task.cancelled() and task.exception()]


# The choice of a worker.


def test_a_conversation_returns_to_its_worker_unless_that_is_much_busier():
    """For the KV cache, up to a difference in load."""
    tested = ControlledPool(2, worker_requests=100)
    first = tested.control.enter(make_request(text=LONG))
    home = first.snapshot.worker.worker_id
    again = [tested.control.enter(make_request(text=LONG)) for _ in range(5)]
    assert {slot.snapshot.worker.worker_id for slot in again} == {home}
    assert tested.control.enter(make_request("other", text=LONG)).snapshot.worker.worker_id != home
    for _ in range(20):
        tested.control.enter(make_request(text=LONG))
    busy = tested.pool.in_flight
    assert abs(busy[A] - busy[B]) <= 9


def test_the_prefix_is_not_hashed_without_a_choice_of_workers():
    """It would cost time for nothing."""

    def never() -> str:
        pytest.fail("was read")

    request = make_request()
    request.prefix_text = never
    assert ControlledPool().control.enter(request)
    assert ControlledPool(2, prefixes=0).control.enter(request)


# Failing workers.


def fail(tested: ControlledPool, worker_id: WorkerId, times: int = 2) -> None:
    for _ in range(times):
        tested.control.record_failure(worker_id)


def test_an_open_breaker_excludes_a_worker_and_then_allows_one_trial():
    """Meanwhile the other worker serves all requests, and a metric shows it."""
    tested = ControlledPool(2, worker_requests=100)
    fail(tested, A)
    assert tested.control.breaker(A) is BreakerState.OPEN
    assert tested.value("appliance_worker_breaker_open", worker="a") == 1
    assert {tested.control.enter(make_request()).snapshot.worker.worker_id for _ in range(5)} == {B}
    tested.clock.now += 5.1
    assert tested.control.breaker(A) is BreakerState.HALF_OPEN
    trial = tested.control.enter(make_request())
    assert trial.snapshot.worker.worker_id == A
    assert {tested.control.enter(make_request()).snapshot.worker.worker_id for _ in range(5)} == {B}
    trial.succeeded()
    assert tested.control.breaker(A) is BreakerState.CLOSED
    assert tested.value("appliance_worker_breaker_open", worker="a") == 0
    assert tested.control.enter(make_request()).snapshot.worker.worker_id == A


def test_the_breaker_of_the_last_worker_is_ignored():
    """Requests that no worker can answer must not block those that one can."""
    tested = ControlledPool()
    fail(tested, A, 10)
    assert tested.control.enter(make_request()) is not None
    both = ControlledPool(2)
    fail(both, A)
    fail(both, B)
    assert both.control.enter(make_request()) is not None


async def test_a_queued_request_tries_a_worker_once_its_breaker_is_half_open():
    """No event says so; each wake-up checks."""
    tested = ControlledPool(2)
    fail(tested, A)
    tested.fill()
    request = make_request()
    assert tested.control.enter(request) is None
    waiting = asyncio.ensure_future(tested.control.wait(request, nothing, TICK))
    await asyncio.sleep(2 * TICK)
    assert not waiting.done()
    tested.clock.now += 5.1
    assert (await soon(waiting)).snapshot.worker.worker_id == A


def test_a_retry_goes_to_another_worker_even_if_that_is_full():
    """An admitted request is not lost because it met a failing worker."""
    tested = ControlledPool(2)
    held = tested.fill()
    assert len(held) == 4
    slot = tested.control.retry(make_request(), [A], is_free=True)
    assert slot.snapshot.worker.worker_id == B
    assert tested.pool.in_flight[B] == 3
    assert tested.control.retry(make_request(), [A, B], is_free=True) is None


def test_a_request_that_may_have_been_computed_is_retried_once():
    """A request that breaks workers breaks two at most; one that no worker received costs nothing."""
    tested, request = ControlledPool(2), make_request()
    assert tested.control.retry(request, [A], is_free=True)
    assert tested.control.retry(request, [A], is_free=False)
    assert tested.control.retry(request, [B], is_free=False) is None
    assert tested.control.retry(request, [B], is_free=True)


def test_retries_are_a_share_of_the_requests():
    """If every request fails, not every one is retried."""
    tested = ControlledPool(2, worker_requests=1000, retries=(0.5, 3))
    tries = [tested.control.retry(make_request(), [A], is_free=False) for _ in range(5)]
    assert [each is not None for each in tries] == [True, True, True, False, False]
    for _ in range(2):
        tested.control.enter(make_request())
    assert tested.control.retry(make_request(), [A], is_free=False) is not None


def test_a_worker_that_left_has_no_slots_and_no_breaker():
    tested = ControlledPool(2)
    fail(tested, A)
    tested.pool.leave(A)
    assert (tested.control.slots(A), tested.control.breaker(A)) == (0, BreakerState.CLOSED)
    assert tested.control.enter(make_request()).snapshot.worker.worker_id == B


def test_a_target_only_worker_serves_requests_that_must_not_be_speculated():
    """Their lane has no other worker."""
    tested = ControlledPool(1, worker_requests=5)
    request = make_request()
    request.lane = Lane("demo", may_speculate=False)
    assert tested.control.enter(request)
    drafting = Worker(worker_id=B, url="http://127.0.0.1/b", mode=SpeculationMode.SPECULATIVE)
    tested.pool.add(drafting)
    tested.pool.update(replace(tested.pool.snapshot(B), healthy=True, models=tested.pool.snapshot(A).models))
    assert {tested.control.enter(replace(request)).snapshot.worker.worker_id for _ in range(4)} == {A}
