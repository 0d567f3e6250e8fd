"""An override holds for the workers that it names, and always ends."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from appliance.control.override import (
    MAXIMUM_SECONDS,
    MINIMUM_SECONDS,
    Override,
    OverrideRequest,
    SqlOverrideStore,
    in_force,
    override_for,
    parse_override,
)
from appliance.errors import ConfigurationError, ControlUnavailableError, InvalidRequestError
from appliance.speculation.values import SpeculationMode
from tests.migrated import migrated

NOW = 1_800_000_000.0
OFF, ON = SpeculationMode.TARGET_ONLY, SpeculationMode.SPECULATIVE


def override(worker: str = "*", mode: SpeculationMode = OFF, *, since: float = NOW, seconds: float = 60.0):
    return Override(worker=worker, mode=mode, actor="k1", note="why", since=since, expires_at=since + seconds)


overrides = st.lists(
    st.builds(
        override, st.sampled_from(["*", "w1", "w2"]), st.sampled_from([OFF, ON]), seconds=st.floats(-100, 100)
    ),
    unique_by=lambda made: made.worker,
)


@given(overrides, st.sampled_from(["w1", "w2", "w3"]))
def test_a_workers_own_override_precedes_the_one_for_all(found, worker):
    in_force_by_worker = {made.worker: made for made in found if made.expires_at > NOW}
    assert override_for(found, worker, NOW) == in_force_by_worker.get(worker, in_force_by_worker.get("*"))
    assert {made.worker for made in in_force(found, NOW)} == set(in_force_by_worker)


def test_an_override_expires_at_its_end_time():
    made = override(seconds=60.0)
    assert override_for([made], "w1", NOW + 59.999) == made
    assert override_for([made], "w1", NOW + 60.0) is None


def test_a_request_becomes_an_override_with_actor_and_end():
    asked = parse_override({"worker": "w1", "mode": "speculative", "seconds": 90, "note": "tuning"})
    assert asked == OverrideRequest(worker="w1", mode=ON, seconds=90, note="tuning")
    assert asked.made_by("k9", NOW) == Override(
        worker="w1", mode=ON, actor="k9", note="tuning", since=NOW, expires_at=NOW + 90
    )


def test_an_override_lasts_one_hour_by_default():
    made = parse_override({"worker": "*", "mode": "target_only"}).made_by("k", NOW)
    assert made is not None
    assert made.expires_at == NOW + 3600


def test_mode_auto_makes_no_override():
    assert parse_override({"worker": "*", "mode": "auto"}).made_by("k", NOW) is None


@given(st.integers())
def test_an_override_lasts_from_one_minute_to_one_week(seconds: int):
    members = {"worker": "*", "mode": "target_only", "seconds": seconds}
    if MINIMUM_SECONDS <= seconds <= MAXIMUM_SECONDS:
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
def test_an_invalid_request_is_refused_naming_the_member(change, param):
    with pytest.raises(InvalidRequestError) as caught:
        parse_override({"worker": "*", "mode": "auto", **change})
    assert caught.value.param == param
    assert param in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.dictionaries(st.sampled_from(["worker", "mode", "seconds", "note", "else"]), st.from_type(object)))
def test_any_members_are_parsed_or_refused(members):
    try:
        parse_override(members)
    except InvalidRequestError:
        return
    assert isinstance(members["worker"], str)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return migrated(tmp_path / "control.db")


@pytest.fixture
def store(url: str) -> Iterator[SqlOverrideStore]:
    with closing(SqlOverrideStore(url)) as opened:
        yield opened


async def test_another_gateway_reads_a_stored_override(store: SqlOverrideStore, url: str):
    await store.put(override("w2"))
    await store.put(override("*", ON))
    with closing(SqlOverrideStore(url)) as other:
        assert await other.list() == (override("*", ON), override("w2"))


async def test_a_new_database_has_no_overrides(store: SqlOverrideStore):
    assert await store.list() == ()
    assert not await store.delete("*")


async def test_an_override_replaces_only_that_of_the_same_worker(store: SqlOverrideStore):
    for made in (override("w1", OFF), override("w2", OFF), override("w1", ON)):
        await store.put(made)
    assert await store.list() == (override("w1", ON), override("w2", OFF))


async def test_delete_removes_one_override_and_reports_whether_it_existed(store: SqlOverrideStore):
    await store.put(override("w1"))
    await store.put(override("*"))
    assert await store.delete("w1")
    assert not await store.delete("w1")
    assert await store.list() == (override("*"),)


async def test_storing_an_override_removes_expired_ones(store: SqlOverrideStore):
    await store.put(override("w1", seconds=60))
    await store.put(override("w2", seconds=61))
    await store.put(override("w3", since=NOW + 60))
    assert [made.worker for made in await store.list()] == ["w2", "w3"]


async def test_concurrent_overrides_are_all_stored(store: SqlOverrideStore):
    made = tuple(override(f"w{number}") for number in range(8))
    await asyncio.gather(*(store.put(each) for each in made))
    assert await store.list() == made


async def test_reading_does_not_wait_for_a_writer(store: SqlOverrideStore, url: str):
    await store.put(override("w1"))
    engine = create_engine(url)
    with closing(engine.raw_connection()) as connection:
        connection.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(2):
            assert await store.list() == (override("w1"),)
        connection.rollback()
    engine.dispose()


async def test_a_database_failure_is_a_one_line_error_and_retried(tmp_path: Path):
    with closing(SqlOverrideStore(f"sqlite:///{tmp_path / 'missing' / 'control.db'}")) as store:
        for action in (store.put(override()), store.delete("*"), store.list()):
            with pytest.raises(ControlUnavailableError, match="unable to open database file") as caught:
                await action
            assert "\n" not in str(caught.value)
        (tmp_path / "missing").mkdir()
        migrated(tmp_path / "missing" / "control.db")
        assert await store.list() == ()


def test_an_invalid_database_url_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="database URL"):
        SqlOverrideStore("nonsense")
