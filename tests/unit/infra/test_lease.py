"""At most one gateway holds the lease, and none acts without it."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, ExceptionContext, create_engine, text
from sqlalchemy.event import listen, remove

from appliance.errors import ConfigurationError
from appliance.infra.lease import Lease, SqlLease
from tests.migrated import migrated
from tests.sole_lease import SoleLease

SECONDS = 10.0


class Clock:
    """Unix time that changes only when it is set."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.stalls: list[float] = []
        """How far it moves before each of the next readings."""

    def __call__(self) -> float:
        if self.stalls:
            self.now += self.stalls.pop(0)
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return migrated(tmp_path / "control.db")


@pytest.fixture
def holder(url: str, clock: Clock) -> Iterator[Callable[[str], SqlLease]]:
    with ExitStack() as stack:

        def make(name: str) -> SqlLease:
            lease = SqlLease(url, name="control", holder=name, seconds=SECONDS, clock=clock)
            return stack.enter_context(closing(lease))

        yield make


@pytest.fixture(params=["sole", "sql"])
def lease(request: pytest.FixtureRequest, holder) -> Lease:
    return SoleLease() if request.param == "sole" else holder("a")


async def test_the_first_to_ask_holds_it_and_keeps_it(lease: Lease):
    assert [await lease.hold() for _ in range(3)] == [True, True, True]


async def test_asking_for_a_lease_that_another_holds_is_no_error_of_the_database(holder):
    """PostgreSQL would write one to its log each second, from every gateway that waits."""
    errors: list[ExceptionContext] = []
    note = errors.append
    listen(Engine, "handle_error", note)
    try:
        assert [await holder(name).hold() for name in ("a", "b")] == [True, False]
    finally:
        remove(Engine, "handle_error", note)
    assert errors == []


async def test_it_can_be_held_again_after_it_was_released(lease: Lease):
    await lease.release()
    assert await lease.hold()
    await lease.release()
    assert await lease.hold()


async def test_a_second_holder_waits_until_the_first_has_expired(holder, clock: Clock):
    first, second = holder("a"), holder("b")
    assert await first.hold()
    assert not await second.hold()
    clock.now += SECONDS
    assert not await second.hold()  # at that instant the first may still act
    clock.now += 0.001
    assert await second.hold()
    assert not await first.hold()


async def test_renewed_lease_keeps_other_holders_out(holder, clock: Clock):
    first, second = holder("a"), holder("b")
    for _ in range(20):
        assert await first.hold()
        clock.now += SECONDS / 4
        assert not await second.hold()


async def test_a_holder_asks_the_database_no_oftener_than_twice_in_a_lease(holder, clock: Clock, url: str):
    first = holder("a")
    await first.hold()
    engine = create_engine(url)
    with closing(engine.raw_connection()) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        clock.now += SECONDS / 2 - 0.001
        assert await first.hold()
        connection.rollback()
    engine.dispose()


async def test_a_released_lease_can_be_taken_at_once(holder):
    first, second = holder("a"), holder("b")
    assert await first.hold()
    await first.release()
    assert await second.hold()
    assert not await first.hold()


async def test_only_the_holder_can_release(holder):
    first, second = holder("a"), holder("b")
    assert await first.hold()
    await second.release()
    assert not await second.hold()


async def test_leases_of_other_names_are_other_leases(url: str, clock: Clock):
    leases = [SqlLease(url, name=name, holder=name, seconds=SECONDS, clock=clock) for name in ("x", "y")]
    assert [await lease.hold() for lease in leases] == [True, True]
    for lease in leases:
        lease.close()


async def test_the_epoch_grows_with_each_change_of_holder_and_not_with_renewals(holder, clock: Clock):
    first, second = holder("a"), holder("b")
    await first.hold()
    clock.now += SECONDS * 0.75
    await first.hold()
    assert first.epoch == 1
    clock.now += SECONDS + 1
    await first.hold()  # expired, but no other gateway held it meanwhile
    assert first.epoch == 1
    clock.now += SECONDS + 1
    await second.hold()
    assert second.epoch == 2
    await second.release()
    await first.hold()
    assert first.epoch == 3


async def test_a_lease_that_ran_out_while_the_database_answered_is_not_held(holder, clock: Clock):
    first = holder("a")
    clock.stalls = [0.0, SECONDS]
    assert not await first.hold()


async def test_a_clock_that_was_set_back_does_not_prolong_a_lease(holder, clock: Clock):
    first, second = holder("a"), holder("b")
    assert await first.hold()
    clock.now += SECONDS + 1
    assert await second.hold()
    clock.now -= 3600
    assert not await first.hold()


async def test_failing_database_means_not_held_with_a_reason(tmp_path: Path, clock: Clock):
    lease = SqlLease(
        f"sqlite:///{tmp_path / 'missing' / 'control.db'}",
        name="control",
        holder="a",
        seconds=SECONDS,
        clock=clock,
    )
    assert not await lease.hold()
    assert lease.failure == "unable to open database file"
    await lease.release()
    (tmp_path / "missing").mkdir()
    migrated(tmp_path / "missing" / "control.db")
    assert await lease.hold()
    assert lease.failure is None
    lease.close()


async def test_a_busy_database_means_not_held_within_seconds(url: str, clock: Clock):
    lease = SqlLease(url, name="control", holder="a", seconds=0.2, clock=clock)
    assert await lease.hold()
    clock.now += 0.15
    engine = create_engine(url)
    with closing(engine.raw_connection()) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        async with asyncio.timeout(5):
            assert not await lease.hold()
        connection.rollback()
    assert "locked" in str(lease.failure)
    assert await lease.hold()
    engine.dispose()
    lease.close()


async def test_a_missing_table_means_not_held_and_is_reported(holder, clock: Clock, url: str):
    first = holder("a")
    await first.hold()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE control_lease"))
    engine.dispose()
    clock.now += SECONDS
    assert not await first.hold()
    assert first.failure == "no such table: control_lease"


def test_unusable_url_is_a_configuration_error(clock: Clock):
    with pytest.raises(ConfigurationError, match="database URL"):
        SqlLease("nonsense", name="control", holder="a", seconds=SECONDS, clock=clock)


async def test_of_many_that_ask_at_once_one_holds_it(holder):
    leases = [holder(f"holder-{number}") for number in range(8)]
    for _ in range(3):
        assert sum(await asyncio.gather(*(lease.hold() for lease in leases))) == 1


class InterruptedClock(Clock):
    """Each reading may be followed by a pause in which others act, before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.interruptions: list[Callable[[], object]] = []

    def __call__(self) -> float:
        read = self.now
        if self.interruptions:
            interrupt, rest = self.interruptions[0], self.interruptions[1:]
            self.interruptions = []
            interrupt()
            self.interruptions = rest
        return read


pauses = st.tuples(st.sampled_from(["", "a", "b", "c"]), st.floats(0, 1.2 * SECONDS))
moves = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from(["hold", "hold", "hold", "release"]),
    st.floats(0, 1.2 * SECONDS),
    st.lists(pauses, max_size=2),
)


@given(st.lists(moves, max_size=20))
def test_never_do_two_hold_it_at_one_instant(script):
    """For any order of calls, delays and gateways."""
    clock = InterruptedClock()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        url = migrated(Path(directory) / "control.db")
        leases: dict[str, SqlLease] = {}
        for name in "abc":
            lease = SqlLease(url, name="x", holder=name, seconds=SECONDS, clock=clock)
            leases[name] = stack.enter_context(closing(lease))
        epochs: list[tuple[int, str]] = []

        def hold(name: str) -> None:
            if leases[name]._hold():
                epochs.append((leases[name].epoch, name))
            assert sum(clock.now < lease._held_until for lease in leases.values()) <= 1

        def interrupt(other: str, seconds: float) -> None:
            clock.now += seconds / 2
            if other:
                hold(other)
            clock.now += seconds / 2

        for name, action, wait, interruptions in script:
            clock.now += wait
            if action == "release":
                leases[name]._release()
                continue
            clock.interruptions = [
                partial(interrupt, other if other != name else "", seconds)
                for other, seconds in interruptions
            ]
            hold(name)
            clock.interruptions = []
        holders = {epoch: {name for number, name in epochs if number == epoch} for epoch, _ in epochs}
        assert all(len(names) == 1 for names in holders.values())
