"""State that gateways share besides the log: who controls the workers, overrides of operators, tenants."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from appliance.control.approvals import SqlApprovalStore
from appliance.control.override import Override, SqlOverrideStore
from appliance.errors import InvalidApiKeyError
from appliance.infra.lease import SqlLease
from appliance.infra.logs import configure_logs
from appliance.infra.settings import LogSettings
from appliance.speculation.values import SpeculationMode
from appliance.tenancy import Limits, Tenant, TenantDirectory, make_key
from appliance.tenancy.directory import EndedMakerError
from appliance.tenancy.edits import mint_key, revoke_key, rotate_key
from appliance.tenancy.store import SqlTenantStore
from appliance.tenancy.watch import TenantWatch
from tests.clock import Clock
from tests.roster import roster_mac

NOW = 1_800_000_000.0

SECONDS = 10.0


@pytest.fixture
def holder(url, open_store):
    """Make leases of several gateways on one database, which has its tables."""
    open_store(url)
    clock, made = Clock(NOW), []

    def make(name):
        made.append(SqlLease(url, name="control", holder=name, seconds=SECONDS, clock=clock))
        return made[-1]

    make.clock = clock
    yield make
    for lease in made:
        lease.close()


async def test_one_of_several_holds_the_lease_and_the_next_one_has_a_larger_number(holder):
    """Held, released, expired: never two holders at once, and the newer of two overrides is known."""
    one, two, three = holder("one"), holder("two"), holder("three")
    held = await asyncio.gather(one.hold(), two.hold(), three.hold())
    assert sum(held) == 1
    leader, other, third = sorted((one, two, three), key=lambda lease: not lease._held_until > 0)
    assert await leader.hold()
    assert not await other.hold()
    await leader.release()
    assert await other.hold()
    assert other.epoch > leader.epoch
    holder.clock.now += SECONDS + 1
    assert await third.hold()
    assert third.epoch > other.epoch
    assert not await other.hold()
    assert [lease.failure for lease in (leader, other, third)] == [None] * 3


def test_a_pending_approval_is_taken_by_one_gateway_only(url, open_store):
    """It survives a restart of the gateway that added it, and ends at its expiry."""
    open_store(url)
    with closing(SqlApprovalStore(url)) as first:
        first.add("gone", int(NOW), NOW - 1)
        first.add("a", int(NOW) + 10, NOW)
        first.add("b", int(NOW) + 20, NOW)
    stores = [SqlApprovalStore(url) for _ in range(4)]
    assert stores[0].pending(NOW) == {"a": int(NOW) + 10, "b": int(NOW) + 20}
    with ThreadPoolExecutor(len(stores)) as threads:
        taken = list(threads.map(lambda store: store.take("a", NOW), stores))
    assert sorted(taken) == [False, False, False, True]
    assert not stores[0].take("b", NOW + 20)
    assert stores[0].pending(NOW + 20) == {}
    for store in stores:
        store.close()


async def test_an_override_is_visible_to_every_gateway_until_it_is_removed(url, open_store):
    """One gateway receives the request, another one applies it."""
    open_store(url)
    asked, acting = SqlOverrideStore(url), SqlOverrideStore(url)
    order = Override(
        worker="w1",
        mode=SpeculationMode.TARGET_ONLY,
        actor="a",
        note="why",
        since=NOW,
        expires_at=NOW + 60,
    )
    await asked.put(order)
    await asked.put(order)
    assert await acting.list() == (order,)
    assert await acting.delete("w1")
    assert not await asked.delete("w1")
    assert await asked.list() == ()
    asked.close()
    acting.close()


async def test_a_revoked_maker_ends_its_keys_on_every_gateway_when_it_ends_itself(url, open_store, tmp_path):
    """At the same poll; and a rotation of the maker leaves its keys as they are."""
    open_store(url)
    now, clock = int(NOW), Clock(NOW)
    text, maker = make_key(b"m" * 37)
    minted_text, minted = make_key(b"t" * 37)
    next_text, successor = make_key(b"n" * 37)
    maker = replace(maker, manage_keys=True, limits=Limits(requests_per_minute=60))
    with (
        closing(SqlTenantStore(url, roster_mac(tmp_path))) as acting,
        closing(SqlTenantStore(url, roster_mac(tmp_path))) as polling,
    ):
        roster = acting.write(acting.read(), (Tenant(name="acme", keys=(maker,)),))
        made = mint_key(roster.tenants, "acme", maker, minted, now=now)
        roster = acting.write(roster, made)
        other = TenantDirectory(clock=clock)
        watch = TenantWatch(
            store=polling,
            directory=other,
            logger=configure_logs(LogSettings(level="error"), terminal=False),
            clock=clock,
            stale_seconds=900,
            seconds=1.0,
        )
        await watch.poll()
        ledgers = [
            [(each.ledger, each.limits) for each in other.authenticate(key).key_limits]
            for key in (text, minted_text)
        ]
        assert ledgers[0] == ledgers[1] != []
        rotated = rotate_key(roster.tenants, maker.key_id, successor, now=now, overlap_seconds=0)
        roster = acting.write(roster, rotated)
        await watch.poll()
        with pytest.raises(InvalidApiKeyError):
            other.authenticate(text)
        assert other.authenticate(minted_text).maker == other.authenticate(next_text).key
        acting.write(roster, revoke_key(roster.tenants, successor.key_id, now=now))
        assert other.authenticate(minted_text)
        assert other.authenticate(next_text)
        await watch.poll()
        with pytest.raises(InvalidApiKeyError):
            other.authenticate(next_text)
        with pytest.raises(EndedMakerError):
            other.authenticate(minted_text)
