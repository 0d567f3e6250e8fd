"""All engine time is attributed once."""

import math

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.cost.account import Power, WorkerAccount, WorkerSample, apportion
from appliance.gateway.cost.presence import Presence
from appliance.speculation.goodput import Estimate
from tests.unit.gateway.cost.readings import cell, reading

WEIGHTS = st.lists(st.floats(min_value=0, max_value=1e6, allow_subnormal=False), min_size=1, max_size=30)


@given(st.integers(min_value=0, max_value=10**13), WEIGHTS.filter(any))
def test_apportioned_parts_add_up_and_are_proportional(total, weights):
    """Exactly; each within a unit of its share, and nothing for weight 0."""
    parts = apportion(total, weights)
    assert sum(parts) == total
    whole = math.fsum(weights)
    for part, weight in zip(parts, weights, strict=True):
        assert part >= 0
        assert abs(part - total * (weight / whole)) <= 1 + total * 1e-12
        assert weight > 0 or part == 0


TENANTS = st.sampled_from(("red", "green", "blue"))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), TENANTS),
        st.tuples(st.just("end"), st.integers(min_value=0, max_value=50)),
        st.tuples(st.just("pass"), st.floats(min_value=0.001, max_value=30)),
        st.tuples(st.just("look"), st.floats(min_value=0, max_value=5)),
    ),
    max_size=60,
)


@given(EVENTS, st.booleans())
def test_shares_and_unattributed_time_add_up_to_busy_time(events, alone):
    """To the microsecond, for any requests, polls and gaps; energy too."""
    account, now, busy = WorkerAccount(Power(idle=50, busy=300)), 0.0, 0.0
    account.observe(WorkerSample(at=now, reading=reading(busy)), alone=alone)
    under_way, shared, rest, told, joules, told_joules = [], 0, 0, 0, 0, 0
    for what, value in [*events, ("look", 1.0)]:
        if what == "begin":
            under_way.append(account.presence.begin(value, "m", now))
        elif what == "end" and under_way:
            account.presence.end(under_way.pop(value % len(under_way)), now)
        elif what == "pass":
            now += value
        elif what == "look":
            now, busy = now + 0.1, busy + value
            seen = account.observe(WorkerSample(at=now, reading=reading(busy), requests=9), alone=alone)
            told += seen.time.busy_us
            told_joules += seen.time.busy_millijoules
            shared += sum(us for us, _joules in seen.shares.values())
            joules += sum(millijoules for _us, millijoules in seen.shares.values())
            rest += seen.unattributed_us
            assert all(us >= 0 for us, _joules in seen.shares.values())
            if alone and seen.shares:
                assert seen.unattributed_us == 0
                assert sum(m for _us, m in seen.shares.values()) == seen.time.busy_millijoules
    assert told == round(busy * 1e6)
    assert shared + rest == told
    assert joules <= told_joules


def looked(account: WorkerAccount, at: float, busy: float, **sample) -> dict:
    seen = account.observe(WorkerSample(at=at, reading=reading(busy), **sample), alone=True)
    return {tenant: us / 1e6 for (tenant, _model), (us, _joules) in seen.shares.items()}


def test_requests_weigh_by_their_seconds():
    """Two for the whole second, one for half of it: two fifths each, and one fifth."""
    account = WorkerAccount(Power())
    account.observe(WorkerSample(at=0, reading=reading(0)), alone=True)
    account.presence.begin("red", "m", 0.0)
    account.presence.begin("green", "m", 0.0)
    short = account.presence.begin("blue", "m", 0.0)
    account.presence.end(short, 0.5)
    assert looked(account, 1.0, 1.0) == {"red": 0.4, "green": 0.4, "blue": 0.2}


def test_late_step_belongs_to_the_previous_requests():
    account = WorkerAccount(Power())
    account.observe(WorkerSample(at=0, reading=reading(0)), alone=True)
    account.presence.end(account.presence.begin("red", "m", 0.0), 0.9)
    assert looked(account, 1.0, 0.0) == {}
    assert looked(account, 2.0, 3.0) == {"red": 3.0}
    seen = account.observe(WorkerSample(at=3.0, reading=reading(3.5)), alone=True)
    assert seen.shares == {}
    assert seen.unattributed_us == 500_000


def test_other_gateways_requests_get_their_part():
    """One request of ours and three in the worker: two thirds are others'."""
    account = WorkerAccount(Power())
    account.presence.begin("red", "m", 0.0)
    account.presence.reset_peak()
    account.observe(WorkerSample(at=0, reading=reading(0), requests=3), alone=False)
    account.presence.reset_peak()
    seen = account.observe(WorkerSample(at=1, reading=reading(0.9), requests=3), alone=False)
    assert seen.shares["red", "m"][0] == 300_000
    assert seen.unattributed_us == 600_000


def test_request_with_several_choices_does_not_count_as_others():
    """Without another gateway all requests in the worker are ours, however many sequences it counts."""
    account = WorkerAccount(Power())
    account.presence.begin("red", "m", 0.0)
    account.observe(WorkerSample(at=0, reading=reading(0), requests=4), alone=True)
    assert (
        account.observe(WorkerSample(at=1, reading=reading(1), requests=4), alone=True).unattributed_us == 0
    )


def test_restarted_engine_counts_from_zero():
    """Its time since its start counts; the last time of its predecessor is unknown."""
    account = WorkerAccount(Power())
    account.observe(WorkerSample(at=0, reading=reading(100.0)), alone=True)
    account.presence.begin("red", "m", 0.0)
    seen = account.observe(WorkerSample(at=2, reading=reading(0.5, epoch="two")), alone=True)
    assert seen.time.busy_us == 500_000
    assert seen.time.observed_us == 2_000_000
    assert account.observe(WorkerSample(at=90, reading=reading(1.0, epoch="three")), alone=True) is None


def test_an_engine_that_measures_nothing_is_busy_while_it_has_requests():
    """That time is marked as an estimate."""
    account = WorkerAccount(Power())
    blind = reading(controllable=False)
    account.observe(WorkerSample(at=0, reading=blind), alone=True)
    first = account.presence.begin("red", "m", 1.0)
    second = account.presence.begin("green", "m", 2.0)
    account.presence.end(first, 3.0)
    account.presence.end(second, 4.0)
    seen = account.observe(WorkerSample(at=10, reading=blind), alone=True)
    assert seen.time.busy_us == seen.time.estimated_us == 3_000_000
    assert {tenant: us for (tenant, _m), (us, _j) in seen.shares.items()} == {
        "red": 1_500_000,
        "green": 1_500_000,
    }


def test_measured_energy_takes_precedence_over_settings():
    """GPUs' measurements and the host's watts, divided between busy and idle by time."""
    account = WorkerAccount(Power(idle=1, busy=2, host=100))
    account.observe(WorkerSample(at=0, reading=reading(0, energy=(2, 5_000_000))), alone=True)
    time = account.observe(WorkerSample(at=10, reading=reading(4, energy=(2, 8_000_000))), alone=True).time
    assert time.millijoules == 3_000_000 + 1_000_000
    assert time.busy_millijoules == 1_600_000
    assert time.metered_us == time.observed_us
    assert time.gpu_us == 2 * time.busy_us
    again = account.observe(WorkerSample(at=20, reading=reading(5, energy=(2, 10))), alone=True).time
    assert again.metered_us == 0, "the driver was reloaded: its counter proves nothing"
    assert again.millijoules == 1 * 2000 + 9 * 1000


def test_energy_does_not_depend_on_when_steps_are_counted():
    """A step that began in one interval and is counted in the next makes no idle time that never was."""
    account = WorkerAccount(Power(idle=100, busy=300))
    counted = [(0, 0.0), (1, 0.2), (2, 2.0), (3, 2.1), (4, 4.0), (6, 4.0)]
    first, *rest = (WorkerSample(at=at, reading=reading(busy)) for at, busy in counted)
    account.observe(first, alone=True)
    energy = sum(account.observe(sample, alone=True).time.millijoules for sample in rest)
    assert energy == (4 * 300 + 2 * 100) * 1000


def test_without_watts_energy_is_unknown_not_nothing():
    account = WorkerAccount(Power())
    account.observe(WorkerSample(at=0, reading=reading(0)), alone=True)
    time = account.observe(WorkerSample(at=10, reading=reading(4)), alone=True).time
    assert time.millijoules == 0
    assert time.unknown_power_us == time.observed_us


def test_steps_are_compared_once_costs_are_known():
    """Steps before the first sweep are compared after it; each only once."""
    account, kind = WorkerAccount(Power()), (1, 3)
    account.observe(WorkerSample(at=0, reading=reading(0), costs={}), alone=True)
    drafted = {kind: cell(steps=100, seconds=2.0, requests=100, tokens=300)}
    first = account.observe(WorkerSample(at=1, reading=reading(2, steps=drafted), costs={}), alone=True)
    assert first.time.draft_us == 0
    known = {(1, 3): Estimate(mean=math.log(1.5), variance=0.0)}
    second = account.observe(WorkerSample(at=2, reading=reading(2, steps=drafted), costs=known), alone=True)
    assert second.time.draft_us == 2_000_000
    assert second.time.target_only_us == 4_000_000, "three tokens per step, at two thirds of its cost"
    third = account.observe(WorkerSample(at=3, reading=reading(2, steps=drafted), costs=known), alone=True)
    assert third.time.draft_us == 0


def test_only_the_controlling_gateway_records_savings():
    """Steps of another gateway's control are not recorded here, even after a change of control."""
    account = WorkerAccount(Power())
    drafted = {(1, 3): cell(steps=100, seconds=2.0, requests=100, tokens=300)}
    account.observe(WorkerSample(at=0, reading=reading(0), costs=None), alone=False)
    account.observe(WorkerSample(at=1, reading=reading(2, steps=drafted), costs=None), alone=False)
    known = {(1, 3): Estimate(mean=0.0, variance=0.0)}
    seen = account.observe(WorkerSample(at=2, reading=reading(2, steps=drafted), costs=known), alone=False)
    assert seen.time.draft_us == 0


def test_finished_request_groups_are_dropped():
    presence = Presence()
    presence.end(presence.begin("red", "m", 0.0), 1.0)
    assert presence.take(2.0) == ({("red", "m"): 1.0}, 1.0)
    assert presence.take(3.0) == ({}, 0.0)
    assert presence.groups == {}
