"""Changes made elsewhere hold here, and a lost database changes nothing."""

import asyncio

import pytest
import structlog

from appliance.errors import InvalidApiKeyError, TenantsAlteredError, TenantsUnavailableError
from appliance.tenancy import Tenant, TenantDirectory
from appliance.tenancy import watch as watch_module
from appliance.tenancy.roster import Roster
from appliance.tenancy.watch import CHECK_SECONDS, LATE_SECONDS, TenantWatch
from tests.fakes import until
from tests.unit.tenancy.states import KEY, STORED

ACME = Tenant(name="acme", keys=(STORED,))


class MemoryTenantStore:
    """A store that can be told to fail, and counts what it is asked."""

    def __init__(self):
        self.roster = Roster(generation=1, tenants=(ACME,))
        self.failure = self.read_failure = None
        self.reads = 0
        self.during_read = lambda: None

    def generation(self):
        if self.failure:
            raise TenantsUnavailableError(self.failure)
        return self.roster.generation

    def read(self):
        self.reads += 1
        if self.read_failure:
            raise TenantsAlteredError(self.read_failure)
        found = self.roster
        self.during_read()
        return found


@pytest.fixture
def store():
    return MemoryTenantStore()


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def directory():
    return TenantDirectory()


@pytest.fixture
def logged():
    return []


@pytest.fixture
def watch(store, directory, now, logged):
    logger = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=[lambda _logger, _level, event: logged.append(event["event"]) or ""],
        wrapper_class=structlog.make_filtering_bound_logger(0),
    )
    return TenantWatch(
        store=store,
        directory=directory,
        logger=logger,
        clock=lambda: now[0],
        stale_seconds=900,
        seconds=0.001,
    )


async def test_change_on_another_gateway_applies_at_the_next_poll(watch, store, directory):
    await watch.poll()
    assert directory.authenticate(KEY).tenant.name == "acme"
    store.roster = Roster(generation=2)
    await watch.poll()
    with pytest.raises(InvalidApiKeyError):
        directory.authenticate(KEY)
    assert watch.generation == 2


async def test_without_changes_only_the_generation_is_read(watch, store):
    for _ in range(5):
        await watch.poll()
    assert store.reads == 1


async def test_rows_that_changed_under_the_same_number_are_noticed_within_a_minute(watch, store, now):
    """The number alone says nothing about them."""
    await watch.poll()
    store.read_failure = "not written with the MAC key"
    await watch.poll()
    assert watch.warning is None
    for _ in range(int(CHECK_SECONDS + LATE_SECONDS)):
        now[0] += 1
        await watch.poll()
    assert watch.warning == "tenants and keys were last read 6 s ago: not written with the MAC key"
    store.read_failure = None
    await watch.poll()
    assert watch.warning is None


async def test_lost_database_keeps_the_state_and_warns(watch, store, directory, now, logged):
    """What was read last stays in force; operators see since when, and that it is over."""
    await watch.poll()
    store.failure = "disk I/O error"
    for _ in range(3):
        await watch.poll()
    assert directory.authenticate(KEY).tenant.name == "acme"
    assert watch.warning is None
    now[0] += LATE_SECONDS + 2
    assert watch.warning == "tenants and keys were last read 7 s ago: disk I/O error"
    assert watch.age_seconds == 7
    store.failure = None
    await watch.poll()
    assert (watch.warning, watch.age_seconds) == (None, 0)
    assert logged == ["tenants_unavailable", "tenants_available"]


async def test_callers_are_refused_once_revocations_may_be_unknown_for_too_long(watch, store, now):
    """A key that was revoked while the database was away must not work for ever."""
    await watch.poll()
    store.failure = "connection refused"
    now[0] += 900
    await watch.poll()
    watch.refuse_if_stale()
    now[0] += 1
    with pytest.raises(TenantsUnavailableError, match="could not be checked for 901 s"):
        watch.refuse_if_stale()
    store.failure = None
    await watch.poll()
    watch.refuse_if_stale()


async def test_silent_database_warns(watch, now):
    await watch.poll()
    now[0] += 60
    assert watch.warning == "tenants and keys were last read 60 s ago: the database does not answer"


async def test_poll_never_undoes_a_newer_local_change(watch, store, directory):
    """What was read while this gateway wrote is older than what it wrote."""
    store.during_read = lambda: watch.apply(Roster(generation=2))
    await watch.poll()
    assert (watch.generation, directory.tenants) == (2, ())


async def test_watch_polls_repeatedly(watch, store):
    running = asyncio.create_task(watch.run())
    await until(lambda: watch.generation == 1)
    store.roster = Roster(generation=7)
    await until(lambda: watch.generation == 7)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.fixture
def patient(monkeypatch):
    """On a busy machine a poll takes longer than a refused caller waits."""
    monkeypatch.setattr(watch_module, "ASKED_WAIT_SECONDS", 60)


async def test_refused_callers_share_one_poll(watch, store, now, patient):
    """A key that was made a moment ago is found at once; strangers cannot have every request read."""
    await watch.poll()
    polls = []

    def generation():
        polls.append(now[0])
        now[0] += 0.1
        return 2

    store.generation = generation
    store.roster = Roster(generation=2)
    store.reads = 0
    assert all(await asyncio.gather(*(watch.poll_for_refused() for _ in range(500))))
    assert (watch.generation, store.reads) == (2, 1)
    assert not any(await asyncio.gather(*(watch.poll_for_refused() for _ in range(500))))
    # Twice for each: the first poll began when they asked, and may have read before.
    assert len(polls) == 4


async def test_refused_caller_does_not_wait_for_a_database_that_is_away(watch, store):
    store.failure = "connection refused"
    await watch.poll()
    store.generation = None  # calling it fails
    assert not await watch.poll_for_refused()


async def test_refused_caller_waits_for_a_poll_that_began_after_it_asked(watch, store, now, patient):
    """One that was under way may have read the tenants before the key was made."""
    await watch.poll()
    asked = []

    def generation():
        asked.append(now[0])
        now[0] += 1
        return 1 + (len(asked) > 1)

    store.generation = generation
    store.roster = Roster(generation=2)
    first = asyncio.create_task(watch.poll_for_refused())
    await until(lambda: asked)
    assert await watch.poll_for_refused()
    await first
    assert len(asked) == 2
