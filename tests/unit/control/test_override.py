"""An order holds for whom it names, and never for good."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from appliance.control.override import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    Override,
    OverrideRequest,
    SqlOverrideStore,
    in_force,
    override_for,
    parse_override,
)
from appliance.errors import ConfigurationError, ControlUnavailableError, InvalidRequestError
from appliance.speculation.values import SpeculationMode

NOW = 1_800_000_000.0
OFF, ON = SpeculationMode.TARGET_ONLY, SpeculationMode.SPECULATIVE


def order(worker: str = "*", mode: SpeculationMode = OFF, *, since: float = NOW, seconds: float = 60.0):
    return Override(worker=worker, mode=mode, actor="k1", note="why", since=since, expires_at=since + seconds)


orders = st.lists(
    st.builds(
        order, st.sampled_from(["*", "w1", "w2"]), st.sampled_from([OFF, ON]), seconds=st.floats(-100, 100)
    ),
    unique_by=lambda made: made.worker,
)


@given(orders, st.sampled_from(["w1", "w2", "w3"]))
def test_an_order_for_one_worker_goes_before_the_one_for_all_and_expired_ones_are_none(found, worker):
    standing = {made.worker: made for made in found if made.expires_at > NOW}
    assert override_for(found, worker, NOW) == standing.get(worker, standing.get("*"))
    assert {made.worker for made in in_force(found, NOW)} == set(standing)


def test_an_order_ends_at_the_instant_it_says():
    made = order(seconds=60.0)
    assert override_for([made], "w1", NOW + 59.999) == made
    assert override_for([made], "w1", NOW + 60.0) is None


def test_a_request_says_who_may_do_what_for_how_long():
    asked = parse_override({"worker": "w1", "mode": "speculative", "seconds": 90, "note": "tuning"})
    assert asked == OverrideRequest(worker="w1", mode=ON, seconds=90, note="tuning")
    assert asked.made_by("k9", NOW) == Override(
        worker="w1", mode=ON, actor="k9", note="tuning", since=NOW, expires_at=NOW + 90
    )


def test_an_order_without_a_time_ends_after_an_hour():
    made = parse_override({"worker": "*", "mode": "target_only"}).made_by("k", NOW)
    assert made is not None
    assert made.expires_at == NOW + 3600


def test_auto_orders_nothing():
    assert parse_override({"worker": "*", "mode": "auto"}).made_by("k", NOW) is None


@given(st.integers())
def test_no_order_is_shorter_than_a_minute_or_longer_than_a_week(seconds: int):
    members = {"worker": "*", "mode": "target_only", "seconds": seconds}
    if SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        assert parse_override(members).seconds == seconds
    else:
        with pytest.raises(InvalidRequestError):
            parse_override(members)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"worker": None}, "worker"),
        ({"worker": ""}, "worker"),
        ({"worker": ["w1"]}, "worker"),
        ({"mode": "probing"}, "mode"),
        ({"mode": None}, "mode"),
        ({"mode": ["auto"]}, "mode"),
        ({"seconds": 60.5}, "seconds"),
        ({"seconds": True}, "seconds"),
        ({"seconds": "3600"}, "seconds"),
        ({"seconds": None}, "seconds"),
        ({"note": "x" * 201}, "note"),
        ({"note": "two\nlines"}, "note"),
        ({"note": "\ud800"}, "note"),
        ({"note": 7}, "note"),
        ({"mood": "off"}, "mood"),
    ],
)
def test_a_request_that_is_wrong_says_where_in_one_line(change, param):
    with pytest.raises(InvalidRequestError) as caught:
        parse_override({"worker": "*", "mode": "auto", **change})
    assert caught.value.param == param
    assert param in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.dictionaries(st.sampled_from(["worker", "mode", "seconds", "note", "else"]), st.from_type(object)))
def test_whatever_is_sent_is_read_or_refused(members):
    try:
        parse_override(members)
    except InvalidRequestError:
        return
    assert isinstance(members["worker"], str)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'control.db'}"


@pytest.fixture
def store(url: str) -> Iterator[SqlOverrideStore]:
    with closing(SqlOverrideStore(url)) as opened:
        yield opened


async def test_what_one_gateway_stores_another_reads_whole(store: SqlOverrideStore, url: str):
    await store.put(order("w2"))
    await store.put(order("*", ON))
    with closing(SqlOverrideStore(url)) as other:
        assert await other.list() == (order("*", ON), order("w2"))


async def test_there_is_nothing_in_a_new_database(store: SqlOverrideStore):
    assert await store.list() == ()
    assert not await store.delete("*")


async def test_a_new_order_replaces_the_one_for_the_same_worker_and_no_other(store: SqlOverrideStore):
    for made in (order("w1", OFF), order("w2", OFF), order("w1", ON)):
        await store.put(made)
    assert await store.list() == (order("w1", ON), order("w2", OFF))


async def test_deleting_ends_one_order_and_says_whether_there_was_one(store: SqlOverrideStore):
    await store.put(order("w1"))
    await store.put(order("*"))
    assert await store.delete("w1")
    assert not await store.delete("w1")
    assert await store.list() == (order("*"),)


async def test_a_new_order_sweeps_out_those_that_have_expired(store: SqlOverrideStore):
    await store.put(order("w1", seconds=60))
    await store.put(order("w2", seconds=61))
    await store.put(order("w3", since=NOW + 60))
    assert [made.worker for made in await store.list()] == ["w2", "w3"]


async def test_orders_put_at_once_are_all_kept(store: SqlOverrideStore):
    made = tuple(order(f"w{number}") for number in range(8))
    await asyncio.gather(*(store.put(each) for each in made))
    assert await store.list() == made


async def test_reading_does_not_wait_for_whoever_writes(store: SqlOverrideStore, url: str):
    await store.put(order("w1"))
    engine = create_engine(url)
    with closing(engine.raw_connection()) as connection:
        connection.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(2):
            assert await store.list() == (order("w1"),)
        connection.rollback()
    engine.dispose()


async def test_a_database_that_fails_is_one_line_and_nothing_is_remembered(tmp_path: Path):
    with closing(SqlOverrideStore(f"sqlite:///{tmp_path / 'missing' / 'control.db'}")) as store:
        for action in (store.put(order()), store.delete("*"), store.list()):
            with pytest.raises(ControlUnavailableError, match="unable to open database file") as caught:
                await action
            assert "\n" not in str(caught.value)
        (tmp_path / "missing").mkdir()
        assert await store.list() == ()


def test_a_url_nobody_can_use_is_a_mistake_in_the_settings():
    with pytest.raises(ConfigurationError, match="database URL"):
        SqlOverrideStore("nonsense")
