"""Places are kept, handed on in turn, and never lost."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from appliance.errors import AtCapacityError, NoWorkerAvailableError
from appliance.gateway.admission import AdmissionControl, Asked, Lane, Slot, admission
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


class Gate:
    """A pool of workers with few places, and the control before it."""

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
                settings=AdmissionSettings(**{"worker_requests": 2, "queue_requests": 8, **own}),
                pool_settings=PoolSettings(affinity_prefixes=prefixes),
                metrics=self.metrics,
                clock=self.clock,
            )
        for worker_id in (A, B)[:workers]:
            self.pool.add(Worker(worker_id=worker_id, url=f"http://127.0.0.1/{worker_id}"))
            self.look(worker_id)

    def look(self, worker_id: WorkerId, running: int = 0, waiting: int = 0, model: str = "demo") -> None:
        """Store a good look at a worker."""
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
        """Take every place there is."""
        held = []
        while (slot := self.control.enter(asked(tenant))) is not None:
            held.append(slot)
        return held

    def waiting(self, request: Asked) -> asyncio.Task[Slot]:
        """Have a request wait."""
        assert self.control.enter(request) is None
        return asyncio.ensure_future(self.control.wait(request, nothing, 60.0))

    def value(self, name: str, **labels: str) -> float:
        """Return a metric."""
        return self.metrics.registry.get_sample_value(name, labels)


def asked(
    tenant: str = "acme", priority: PriorityClass = STANDARD, text: str = "", model: str = "demo"
) -> Asked:
    """Return a request."""
    return Asked(
        lane=Lane(model, may_speculate=True),
        tenant=tenant,
        priority=priority,
        size_bytes=100,
        beginning=lambda: text,
    )


async def soon(waiting: asyncio.Task[Slot]) -> Slot:
    """Return what is handed over, which must not take long."""
    async with asyncio.timeout(5):
        return await waiting


async def nothing() -> None:
    """Keep nobody alive."""


# At once.


def test_a_request_passes_straight_through_while_there_is_room():
    """Up to the places of the worker, and again once one is given back."""
    gate = Gate()
    first, second = gate.control.enter(asked()), gate.control.enter(asked())
    assert gate.pool.in_flight == {A: 2}
    assert gate.control.enter(asked()) is None
    first.release()
    first.release()
    assert gate.pool.in_flight == {A: 1}
    assert gate.control.enter(asked()).snapshot.worker.worker_id == A
    second.release()


def test_without_a_worker_the_answer_is_not_to_wait():
    """503, at once: capacity is another matter."""
    gate = Gate()
    with pytest.raises(NoWorkerAvailableError):
        gate.control.enter(asked(model="other"))
    gate.pool.report_unreachable(A)
    with pytest.raises(NoWorkerAvailableError):
        gate.control.enter(asked())


def test_places_follow_what_the_worker_says_of_its_queue(monkeypatch):
    """A worker whose cache holds four requests is not sent the batch it was started with."""
    monkeypatch.setattr(admission, "HEADROOM_REQUESTS", 2)
    gate = Gate(worker_requests=50)
    held = gate.fill()
    assert len(held) == 50
    gate.look(A, running=4, waiting=46)
    assert gate.control.places(A) == 6
    for slot in held[:45]:
        slot.release()
    assert gate.control.enter(asked()) is not None
    assert gate.control.enter(asked()) is None
    gate.look(A, running=4, waiting=0)
    assert gate.control.places(A) == 8
    assert gate.value("appliance_worker_places", worker="a") == 8


# In turn.


async def test_who_waits_is_handed_the_place_that_becomes_free():
    """In the same call, and counted from then on: nobody can overtake."""
    gate = Gate()
    held = gate.fill()
    late = gate.waiting(asked("late"))
    await asyncio.sleep(TICK)
    assert gate.value("appliance_queue_requests", priority="standard") == 1
    held[0].release()
    assert gate.pool.in_flight == {A: 2}
    assert gate.control.enter(asked()) is None
    assert (await soon(late)).snapshot.worker.worker_id == A
    assert gate.value("appliance_queue_requests", priority="standard") == 0
    assert gate.value("appliance_queue_seconds_count", priority="standard") == 1


async def test_tenants_take_turns():
    """One with six waiting delays one with a single request by one place."""
    gate, order = Gate(), []
    held = gate.fill()
    tasks = []
    for tenant in [*["many"] * 6, "single"]:
        task = gate.waiting(asked(tenant))
        task.add_done_callback(lambda _, tenant=tenant: order.append(tenant))
        tasks.append(task)
    await asyncio.sleep(TICK)
    for slot in held:
        slot.release()
    for task in [*tasks[:1], tasks[6], *tasks[1:6]]:
        (await soon(task)).release()
    assert order.index("single") == 1


async def test_a_worker_that_comes_back_takes_those_who_wait():
    """A look, an undrain: whatever makes room hands it on."""
    gate = Gate(2)
    gate.pool.set_drained(B, True)
    gate.fill()
    waiting = [gate.waiting(asked()) for _ in range(2)]
    await asyncio.sleep(TICK)
    gate.pool.set_drained(B, False)
    assert {(await soon(each)).snapshot.worker.worker_id for each in waiting} == {B}


async def test_a_full_model_holds_up_no_other():
    """Who waits for one model is passed by who asks for another."""
    gate = Gate(2)
    gate.look(B, model="other")
    gate.fill()
    waiting = gate.waiting(asked())
    await asyncio.sleep(TICK)
    assert gate.control.enter(asked(model="other")).snapshot.worker.worker_id == B
    assert not waiting.done()
    waiting.cancel()


# Turned away.


async def test_what_finds_no_place_to_wait_is_refused_before_anything_is_done():
    """429, also for one that comes to wait after all; other classes and models are not concerned."""
    gate = Gate(2, queue_requests=1)
    gate.look(B, model="other")
    gate.fill()
    waiting = gate.waiting(asked())
    await asyncio.sleep(TICK)
    with pytest.raises(AtCapacityError):
        gate.control.refuse_if_full(DEMO, "first", STANDARD, 100)
    with pytest.raises(AtCapacityError):
        await gate.control.wait(asked("another"), nothing, 1.0)
    gate.control.refuse_if_full(DEMO, "first", BATCH, 100)
    gate.control.refuse_if_full(Lane("other", may_speculate=True), "first", STANDARD, 100)
    gate.control.refuse_if_full(Lane("nobody's", may_speculate=True), "first", STANDARD, 100)
    assert gate.value("appliance_queue_refusals_total", priority="standard", reason="full") == 2
    waiting.cancel()


async def test_whoever_has_most_waiting_makes_way_for_a_tenant_with_fewer():
    """One tenant cannot take all the places to wait; its newest request hears so at once."""
    gate = Gate(queue_requests=2)
    held = gate.fill()
    older, newer = gate.waiting(asked("many")), gate.waiting(asked("many"))
    await asyncio.sleep(TICK)
    few = gate.waiting(asked("few"))
    with pytest.raises(AtCapacityError, match="you have most"):
        await soon(newer)
    assert gate.value("appliance_queue_refusals_total", priority="standard", reason="displaced") == 1
    for slot in held:
        slot.release()
    assert await soon(older)
    assert await soon(few)
    assert gate.pool.in_flight == {A: 2}


async def test_one_that_leaves_as_it_has_to_make_way_leaves_nothing_behind():
    """Displaced and cancelled within the same step."""
    gate = Gate(queue_requests=2)
    gate.fill()
    older, newer = gate.waiting(asked("many")), gate.waiting(asked("many"))
    await asyncio.sleep(TICK)
    few = gate.waiting(asked("few"))
    await asyncio.sleep(0)
    newer.cancel()
    with pytest.raises((asyncio.CancelledError, AtCapacityError)):
        await newer
    assert gate.value("appliance_queue_requests", priority="standard") == 2
    older.cancel()
    few.cancel()


async def test_who_has_waited_too_long_is_refused():
    """429 while workers are full, 503 when there is none left."""
    gate = Gate(wait_seconds=30.0)
    gate.fill()
    for lost, error in ((False, AtCapacityError), (True, NoWorkerAvailableError)):
        request = asked()
        assert gate.control.enter(request) is None
        waiting = asyncio.ensure_future(gate.control.wait(request, nothing, TICK))
        await asyncio.sleep(2 * TICK)
        assert not waiting.done()
        if lost:
            gate.pool.report_unreachable(A)
        gate.clock.now += 31.0
        with pytest.raises(error):
            await waiting
    assert gate.value("appliance_queue_requests", priority="standard") == 0
    assert gate.value("appliance_queue_refusals_total", priority="standard", reason="late") == 1
    assert gate.value("appliance_queue_refusals_total", priority="standard", reason="no_worker") == 1


async def test_who_waits_is_kept_alive():
    """As often as asked for; a client that is found gone meanwhile leaves the queue."""
    gate, kept = Gate(), 0
    gate.fill()

    async def keep_alive() -> None:
        nonlocal kept
        kept += 1
        if kept == 3:
            raise ConnectionResetError

    request = asked()
    assert gate.control.enter(request) is None
    with pytest.raises(ConnectionResetError):
        await gate.control.wait(request, keep_alive, TICK)
    assert (kept, gate.value("appliance_queue_requests", priority="standard")) == (3, 0)


# Clients leave.


async def test_a_client_that_leaves_is_out_of_the_queue():
    """The place that becomes free goes to the next."""
    gate = Gate()
    held = gate.fill()
    gone, stays = gate.waiting(asked()), gate.waiting(asked())
    await asyncio.sleep(TICK)
    gone.cancel()
    await asyncio.sleep(TICK)
    held[0].release()
    assert await soon(stays)
    assert gate.pool.in_flight == {A: 2}


async def test_a_client_that_leaves_with_a_place_just_handed_to_it_gives_it_back():
    """Cancelled between the hand-over and its own turn: the next one gets it at once."""
    gate = Gate()
    held = gate.fill()
    gone, stays = gate.waiting(asked()), gate.waiting(asked())
    await asyncio.sleep(TICK)
    held[0].release()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await soon(stays)
    assert gate.pool.in_flight == {A: 2}


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_no_place_is_lost_whatever_happens(seed: int):
    """Clients come, stay, leave at any moment, workers fail and come back: in the end all is as it was."""
    asyncio.run(storm(seed))


async def storm(seed: int) -> None:
    """A few hundred clients on two workers, some of them impatient."""
    chance = random.Random(seed)
    gate = Gate(2, queue_requests=30, worker_requests=3)
    ended: Counter[str] = Counter()

    async def client() -> None:
        request = asked(chance.choice("abc"), chance.choice(list(PriorityClass)))
        try:
            gate.control.refuse_if_full(request.lane, request.tenant, request.priority, request.size_bytes)
            slot = gate.control.enter(request) or await gate.control.wait(request, nothing, 60.0)
        except (AtCapacityError, NoWorkerAvailableError):
            ended["refused"] += 1
            return
        assert all(count <= 3 for count in gate.pool.in_flight.values())
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
            gate.pool.report_unreachable(chance.choice([A, B]))
        elif event < 0.5:
            gate.look(chance.choice([A, B]))
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    gate.look(A)
    gate.look(B)
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.pool.in_flight == {A: 0, B: 0}
    assert sum(gate.value("appliance_queue_requests", priority=each) for each in PriorityClass) == 0
    assert ended["served"]
    assert not [task for task in tasks if not task.cancelled() and task.exception()]


# Which worker.


def test_a_conversation_goes_back_to_its_worker_unless_that_is_much_busier():
    """The KV cache is worth something, but not everything."""
    gate = Gate(2, worker_requests=100)
    first = gate.control.enter(asked(text=LONG))
    home = first.snapshot.worker.worker_id
    again = [gate.control.enter(asked(text=LONG)) for _ in range(5)]
    assert {slot.snapshot.worker.worker_id for slot in again} == {home}
    assert gate.control.enter(asked("other", text=LONG)).snapshot.worker.worker_id != home
    for _ in range(20):
        gate.control.enter(asked(text=LONG))
    busy = gate.pool.in_flight
    assert abs(busy[A] - busy[B]) <= 9


def test_the_text_is_not_read_where_there_is_no_choice():
    """One worker costs nothing."""

    def never() -> str:
        pytest.fail("was read")

    request = asked()
    request.beginning = never
    assert Gate().control.enter(request)
    assert Gate(2, prefixes=0).control.enter(request)


# Workers that fail.


def fail(gate: Gate, worker_id: WorkerId, times: int = 2) -> None:
    """Have a worker fail so many requests."""
    for _ in range(times):
        gate.control.saw_failure(worker_id)


def test_a_worker_that_keeps_failing_gets_a_rest_and_then_one_try():
    """While it rests the other one does all, and the metrics say so."""
    gate = Gate(2, worker_requests=100)
    fail(gate, A)
    assert gate.control.breaker(A) is BreakerState.OPEN
    assert gate.value("appliance_worker_breaker_open", worker="a") == 1
    assert {gate.control.enter(asked()).snapshot.worker.worker_id for _ in range(5)} == {B}
    gate.clock.now += 5.1
    assert gate.control.breaker(A) is BreakerState.HALF_OPEN
    trial = gate.control.enter(asked())
    assert trial.snapshot.worker.worker_id == A
    assert {gate.control.enter(asked()).snapshot.worker.worker_id for _ in range(5)} == {B}
    trial.succeeded()
    assert gate.control.breaker(A) is BreakerState.CLOSED
    assert gate.value("appliance_worker_breaker_open", worker="a") == 0
    assert gate.control.enter(asked()).snapshot.worker.worker_id == A


def test_the_last_worker_is_not_given_a_rest():
    """Requests that no worker can answer must not shut out those that one can."""
    gate = Gate()
    fail(gate, A, 10)
    assert gate.control.enter(asked()) is not None
    both = Gate(2)
    fail(both, A)
    fail(both, B)
    assert both.control.enter(asked()) is not None


async def test_who_waits_for_a_worker_at_rest_is_let_through_when_it_may_be_tried():
    """Nobody tells of the time, so whoever comes by looks."""
    gate = Gate(2)
    fail(gate, A)
    gate.fill()
    request = asked()
    assert gate.control.enter(request) is None
    waiting = asyncio.ensure_future(gate.control.wait(request, nothing, TICK))
    await asyncio.sleep(2 * TICK)
    assert not waiting.done()
    gate.clock.now += 5.1
    assert (await soon(waiting)).snapshot.worker.worker_id == A


def test_a_second_try_goes_to_another_worker_even_if_that_is_full():
    """A request that was admitted is not lost because it met a dying worker."""
    gate = Gate(2)
    held = gate.fill()
    assert len(held) == 4
    slot = gate.control.again(asked(), [A], is_free=True)
    assert slot.snapshot.worker.worker_id == B
    assert gate.pool.in_flight[B] == 3
    assert gate.control.again(asked(), [A, B], is_free=True) is None


def test_what_may_have_been_computed_is_tried_again_once():
    """A request that breaks workers breaks two at most; one no worker has seen costs nothing."""
    gate, request = Gate(2), asked()
    assert gate.control.again(request, [A], is_free=True)
    assert gate.control.again(request, [A], is_free=False)
    assert gate.control.again(request, [B], is_free=False) is None
    assert gate.control.again(request, [B], is_free=True)


def test_second_tries_are_a_share_of_the_requests():
    """When everything fails, everything is not tried twice."""
    gate = Gate(2, worker_requests=1000, retries=(0.5, 3))
    tries = [gate.control.again(asked(), [A], is_free=False) for _ in range(5)]
    assert [each is not None for each in tries] == [True, True, True, False, False]
    for _ in range(2):
        gate.control.enter(asked())
    assert gate.control.again(asked(), [A], is_free=False) is not None


def test_a_worker_that_left_is_forgotten():
    """Its breaker and its places go with it."""
    gate = Gate(2)
    fail(gate, A)
    gate.pool.leave(A)
    assert (gate.control.places(A), gate.control.breaker(A)) == (0, BreakerState.CLOSED)
    assert gate.control.enter(asked()).snapshot.worker.worker_id == B


def test_a_worker_without_a_draft_serves_what_must_not_be_speculated():
    """The lane leads to it alone."""
    gate = Gate(1, worker_requests=5)
    request = asked()
    request.lane = Lane("demo", may_speculate=False)
    assert gate.control.enter(request)
    drafting = Worker(worker_id=B, url="http://127.0.0.1/b", mode=SpeculationMode.SPECULATIVE)
    gate.pool.add(drafting)
    gate.pool.update(replace(gate.pool.snapshot(B), healthy=True, models=gate.pool.snapshot(A).models))
    assert {gate.control.enter(replace(request)).snapshot.worker.worker_id for _ in range(4)} == {A}
