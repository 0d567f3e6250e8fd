"""The queue is bounded and fair, and loses no request."""

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from appliance.gateway.admission.queue import FairQueue, Lane, QueueBounds, Waiter
from appliance.tenancy import PriorityClass

INTERACTIVE, STANDARD, BATCH = PriorityClass
DEMO = Lane("demo", may_speculate=True)
PLAIN = Lane("demo", may_speculate=False)
OTHER = Lane("other", may_speculate=True)
WIDE = QueueBounds(requests=1000, size_bytes=10**9)
SHARES = {STANDARD: 0.2, BATCH: 0.05}


def waiter(
    tenant: str = "a",
    priority: PriorityClass = STANDARD,
    lane: Lane = DEMO,
    size: int = 1,
    sequences: int = 1,
) -> Waiter:
    return Waiter(lane=lane, tenant=tenant, priority=priority, size_bytes=size, sequences=sequences)


def filled(*waiters: Waiter, **options) -> FairQueue:
    queue = FairQueue(WIDE, **options)
    for each in waiters:
        assert queue.push(each) == []
    return queue


def drained(queue: FairQueue, *lanes: Lane) -> list[Waiter]:
    taken = []
    while (each := queue.take(lanes or (DEMO,))) is not None:
        taken.append(each)
    return taken


def queued(queue: FairQueue) -> list[Waiter]:
    return [
        each
        for kind in queue._classes.values()
        for tenant in kind._tenants.values()
        for line in tenant.lanes.values()
        for each in line
    ]


def test_an_empty_queue_returns_none():
    assert FairQueue(WIDE).take([DEMO]) is None
    assert len(FairQueue(WIDE)) == 0


def test_requests_of_one_tenant_are_first_come_first_served():
    mine = [waiter() for _ in range(5)]
    assert drained(filled(*mine)) == mine


def test_a_tenant_with_many_requests_delays_one_with_few_by_one_turn():
    """The single request of the second tenant is served second."""
    many = [waiter("many") for _ in range(100)]
    single = waiter("single")
    assert drained(filled(*many, single)).index(single) == 1


@pytest.mark.parametrize("weight", [1, 3])
def test_a_request_of_many_sequences_takes_as_many_turns(weight: int):
    """Whatever a tenant packs into one request, while others wait it gets its share of the sequences."""
    large = [waiter("large", sequences=64) for _ in range(8)]
    small = [waiter("small") for _ in range(256)]
    order = drained(filled(*large, *small, weights={"large": weight}))
    assert sorted(map(id, order)) == sorted(map(id, [*large, *small]))
    served = Counter[str]()
    for each in order[: order.index(small[-1])]:
        served[each.tenant] += each.sequences
        assert served["large"] <= weight * (served["small"] + 2) + 64


@pytest.mark.parametrize("weight", [1, 3])
def test_a_tenant_that_queues_one_request_at_a_time_owes_its_turns_all_the_same(weight: int):
    """An empty line of its own does not cancel them while others wait."""
    queue = filled(*[waiter("small") for _ in range(256)], weights={"large": weight})
    served = Counter[str]()
    while served["small"] < 256:
        if not any(each.tenant == "large" for each in queued(queue)):
            assert queue.push(waiter("large", sequences=64)) == []
        taken = queue.take((DEMO,))
        assert taken is not None
        served[taken.tenant] += taken.sequences
        assert served["large"] <= weight * (served["small"] + 2) + 64
    assert served["large"] >= weight * served["small"] - 64


def test_turns_that_a_tenant_owes_end_with_the_queue():
    """Then no other tenant was passed over."""
    queue = filled(waiter("large", sequences=64), waiter("small"))
    drained(queue)
    late, soon = waiter("small"), waiter("large")
    for each in (soon, late):
        queue.push(each)
    assert drained(queue) == [soon, late]


def test_tenants_that_owe_turns_do_not_leave_a_slot_idle():
    large = [waiter(tenant, sequences=2048) for tenant in "abc" for _ in range(3)]
    order = drained(filled(*large))
    assert [each.tenant for each in order] == list("abcabcabc")


def test_tenants_that_come_back_take_no_extra_turns():
    """A tenant whose queue was empty joins at the end of the round, as a new one does."""
    queue = filled(waiter("a"), waiter("b"), waiter("c"))
    order = []
    for _ in range(9):
        taken = queue.take([DEMO])
        order.append(taken.tenant)
        queue.push(waiter(taken.tenant))
    assert order == ["a", "b", "c"] * 3


def test_a_tenant_with_more_weight_takes_more_turns_in_a_row():
    """Three to one."""
    queue = filled(*[waiter("a") for _ in range(8)], *[waiter("b") for _ in range(8)], weights={"a": 3})
    assert [queue.take([DEMO]).tenant for _ in range(8)] == [*"aaab", *"aaab"]


def test_a_higher_class_is_served_first():
    """Unless a lower one has a full credit."""
    low, middle, high = waiter(priority=BATCH), waiter(), waiter(priority=INTERACTIVE)
    assert drained(filled(low, middle, high)) == [high, middle, low]


def test_lower_classes_get_their_share():
    """Of a hundred turns under a flood of higher classes, a fifth and a twentieth."""
    flood = [waiter(priority=priority) for priority in PriorityClass for _ in range(100)]
    queue = filled(*flood, shares=SHARES)
    counts = Counter(queue.take([DEMO]).priority for _ in range(100))
    assert counts[STANDARD] in (19, 20)
    assert counts[BATCH] in (4, 5)


def test_an_empty_class_accumulates_no_credit():
    """A class that was empty for long gets its share and no more."""
    queue = filled(*[waiter(priority=INTERACTIVE) for _ in range(200)], shares=SHARES)
    for _ in range(100):
        queue.take([DEMO])
    for _ in range(20):
        queue.push(waiter())
    assert Counter(queue.take([DEMO]).priority for _ in range(10))[STANDARD] <= 2


def test_a_full_model_does_not_block_another():
    """A request for a worker with room overtakes one for a full worker."""
    first, second = waiter(), waiter(lane=OTHER)
    queue = filled(first, second)
    assert queue.lanes == {DEMO, OTHER}
    assert queue.take([OTHER]) is second
    assert queue.take([OTHER]) is None
    assert queue.lanes == {DEMO}
    assert queue.take([DEMO, OTHER]) is first


def test_a_tenants_own_lanes_are_served_by_age():
    """The tenant's other requests do not starve one that must not be speculated."""
    queue = filled(waiter(), waiter(lane=PLAIN), waiter())
    assert [each.lane for each in drained(queue, PLAIN, DEMO)] == [DEMO, PLAIN, DEMO]


def test_a_discarded_request_is_not_served_and_takes_no_turn():
    """A client that left costs its tenant nothing."""
    gone, mine, others = waiter("a"), waiter("a"), waiter("b")
    queue = filled(gone, mine, others)
    assert queue.discard(gone)
    assert not queue.discard(gone)
    assert drained(queue) == [mine, others]


@pytest.mark.parametrize(
    "bounds", [QueueBounds(requests=2, size_bytes=100), QueueBounds(requests=100, size_bytes=20)]
)
def test_a_request_beyond_a_bound_is_refused(bounds: QueueBounds):
    """By number or by bytes; another class has its own bounds."""
    queue = FairQueue(bounds)
    first = waiter(size=10)
    assert queue.push(first) == []
    assert queue.push(waiter(size=10)) == []
    assert not queue.has_room("a", STANDARD, 10)
    assert queue.push(waiter(size=10)) is None
    assert queue.push(waiter(size=10, priority=BATCH)) == []
    queue.discard(first)
    assert queue.push(waiter(size=10)) == []


def test_a_queue_of_size_zero_refuses_every_request():
    """Queueing can be switched off."""
    queue = FairQueue(QueueBounds(requests=0, size_bytes=100))
    assert not queue.has_room("a", STANDARD, 1)
    assert queue.push(waiter()) is None


def test_the_tenant_that_holds_most_is_displaced_by_one_with_less():
    """Its newest request goes; its others keep their turns."""
    queue = FairQueue(QueueBounds(requests=4, size_bytes=100))
    flood = [waiter("many") for _ in range(4)]
    assert [queue.push(each) for each in flood] == [[]] * 4
    assert queue.has_room("few", STANDARD, 1)
    assert not queue.has_room("many", STANDARD, 1)
    single = waiter("few")
    assert queue.push(single) == [flood[3]]
    assert queue.push(waiter("few")) == [flood[2]]
    assert queue.push(waiter("few")) is None
    assert len(queue) == 4
    assert queue.take([DEMO]) is flood[0]
    assert queue.take([DEMO]) is single


def test_a_large_request_displaces_small_ones_up_to_its_share():
    """What a tenant holds counts in requests or in bytes, whichever is more."""
    queue = FairQueue(QueueBounds(requests=100, size_bytes=100))
    small = [waiter("many", size=10) for _ in range(10)]
    assert [queue.push(each) for each in small] == [[]] * 10
    assert queue.push(waiter("few", size=60)) is None
    assert queue.push(waiter("few", size=30)) == small[:6:-1]
    assert queue.size_bytes(STANDARD) == 100


@given(st.lists(st.sampled_from("abcdef"), max_size=80), st.integers(1, 12))
def test_a_tenant_with_its_share_or_less_is_never_refused(arrivals: list[str], places: int):
    """However the others fill the queue."""
    queue, waiting = FairQueue(QueueBounds(requests=places, size_bytes=10**6)), Counter()
    for tenant in arrivals:
        holders = {name for name, count in waiting.items() if count} | {tenant}
        displaced = queue.push(waiter(tenant))
        if waiting[tenant] + 1 <= places // len(holders):
            assert displaced is not None
        if displaced is not None:
            waiting[tenant] += 1
            waiting.subtract(each.tenant for each in displaced)
            assert all(waiting[each.tenant] >= waiting[tenant] for each in displaced)
        assert sum(waiting.values()) == len(queue) <= places


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(PriorityClass)), max_size=60))
def test_every_request_is_served_exactly_once(arrivals: list[tuple[str, PriorityClass]]):
    """Whatever the mixture of tenants and classes."""
    mine = [waiter(*each) for each in arrivals]
    queue = filled(*mine, shares=SHARES)
    assert sorted(map(id, drained(queue))) == sorted(map(id, mine))
    assert len(queue) == 0
    assert queue.lanes == set()


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30), min_size=1),
    st.lists(st.sampled_from("abcdef"), max_size=60),
)
def test_no_tenant_waits_longer_than_one_round(backlog: dict[str, int], late: list[str]):
    """Between two turns of one tenant, every tenant that waits throughout has had one."""
    queue = filled(*[waiter(tenant) for tenant, count in backlog.items() for _ in range(count)])
    waiting, since_turn = Counter(backlog), defaultdict(set)
    arrivals = iter(late)
    while (taken := queue.take([DEMO])) is not None:
        assert taken.tenant not in {
            other for tenant, passed in since_turn.items() if tenant != taken.tenant for other in passed
        }, "passed twice by the same tenant"
        waiting[taken.tenant] -= 1
        since_turn.pop(taken.tenant, None)
        for tenant, count in waiting.items():
            if count and tenant != taken.tenant:
                since_turn[tenant].add(taken.tenant)
        if (tenant := next(arrivals, None)) is not None:
            queue.push(waiter(tenant))
            waiting[tenant] += 1


@given(
    st.floats(0.01, 0.4),
    st.floats(0.01, 0.4),
    st.lists(st.sampled_from([INTERACTIVE, STANDARD]), min_size=1, max_size=200),
)
def test_a_class_that_waits_gets_at_least_its_share(standard: float, batch: float, arrivals):
    """Whatever higher classes send, over any number of turns, within two turns."""
    queue = FairQueue(WIDE, shares={STANDARD: standard, BATCH: batch})
    for _ in range(300):
        queue.push(waiter(priority=BATCH))
    served: Counter[PriorityClass] = Counter()
    for turns, priority in enumerate(arrivals, start=1):
        queue.push(waiter(priority=priority))
        queue.push(waiter(priority=INTERACTIVE))
        served[queue.take([DEMO]).priority] += 1
        assert served[BATCH] >= math.floor(turns * batch) - 2


class AnyHistory(RuleBasedStateMachine):
    """Arrivals, turns and discards in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = QueueBounds(requests=6, size_bytes=40)
        self.queue = FairQueue(self.bounds, shares=SHARES, weights={"a": 2})
        self.waiting: list[Waiter] = []

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from(PriorityClass),
        lane=st.sampled_from([DEMO, PLAIN, OTHER]),
        size=st.integers(0, 50),
    )
    def arrives(self, tenant, priority, lane, size):
        new = waiter(tenant, priority, lane, size)
        ahead = [each for each in self.waiting if each.priority is priority]
        fits = len(ahead) < 6 and sum(each.size_bytes for each in ahead) + size <= 40
        has_place = self.queue.has_room(tenant, priority, size)
        displaced = self.queue.push(new)
        assert has_place is (displaced is not None)
        if displaced is None:
            assert not fits
            return
        assert (displaced == []) is fits
        assert all(each in ahead and each.tenant != tenant for each in displaced)
        assert len({each.tenant for each in displaced}) <= 1
        self.waiting = [each for each in self.waiting if each not in displaced] + [new]

    @rule(lanes=st.sets(st.sampled_from([DEMO, PLAIN, OTHER])))
    def serves(self, lanes):
        able = [each for each in self.waiting if each.lane in lanes]
        taken = self.queue.take(lanes)
        if not able:
            assert taken is None
            return
        assert taken in able
        kind = (taken.tenant, taken.priority, taken.lane)
        assert taken is next(each for each in able if (each.tenant, each.priority, each.lane) == kind)
        self.waiting.remove(taken)

    @rule(data=st.data())
    def leaves(self, data):
        if self.waiting:
            gone = data.draw(st.sampled_from(self.waiting))
            assert self.queue.discard(gone)
            assert not self.queue.discard(gone)
            self.waiting.remove(gone)

    @invariant()
    def counts_are_right(self):
        assert len(self.queue) == len(self.waiting)
        assert self.queue.lanes == {each.lane for each in self.waiting}
        for priority in PriorityClass:
            mine = [each for each in self.waiting if each.priority is priority]
            assert self.queue.requests(priority) == len(mine) <= self.bounds.requests
            assert self.queue.size_bytes(priority) == sum(each.size_bytes for each in mine)
            assert self.queue.size_bytes(priority) <= self.bounds.size_bytes


TestAnyHistory = AnyHistory.TestCase
