"""Nothing changes without an entry, and no change overwrites another."""

import asyncio
from contextlib import closing

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.control.tenants.registrar import TRIES, Registrar
from appliance.errors import AuditUnavailableError, TenantConflictError, TenantsUnavailableError
from appliance.tenancy import Tenant
from appliance.tenancy.edits import add_key, create_tenant, revoke_key
from appliance.tenancy.store import SqlTenantStore, roster_digest
from tests.fakes import audit_fields
from tests.roster import roster_mac
from tests.unit.tenancy.states import STORED


class Recorder:
    """An audit log that keeps entries, or refuses them."""

    def __init__(self):
        self.entries = []
        self.failure = None
        self.before = lambda: None

    async def append(self, entry_type, **fields):
        self.before()
        if self.failure:
            raise self.failure
        self.entries.append((entry_type, audit_fields(entry_type, fields)))


@pytest.fixture
def store(tmp_path):
    url = f"sqlite:///{tmp_path / 'audit.db'}"
    SqlAuditStore(url).close()
    with closing(SqlTenantStore(url, roster_mac(tmp_path))) as store:
        yield store


@pytest.fixture
def log():
    return Recorder()


@pytest.fixture
def adopted():
    return []


@pytest.fixture
def registrar(store, log, adopted):
    return Registrar(store=store, record=log.append, adopt=adopted.append)


def announced(generation, tenants, actor="me"):
    """The entry of the state that a change leads to."""
    fields = {"generation": generation, "digest": roster_digest(generation, tenants), "actor": actor}
    return EntryType.TENANTS_SEALED, fields


def create(name):
    return lambda tenants: create_tenant(tenants, name, {})


async def test_a_change_is_recorded_kept_and_in_force(registrar, store, log, adopted):
    """In this order: the entry is there before the change is."""
    log.before = lambda: log.entries.append(store.read().tenants)
    after = await registrar.apply(create("acme"), actor="abcd2345")
    assert after.tenants == (Tenant(name="acme"),)
    assert log.entries == [
        (),
        (EntryType.TENANT_CREATED, {"tenant": "acme", "models": ["*"], "actor": "abcd2345"}),
        (),
        announced(1, after.tenants, actor="abcd2345"),
    ]
    assert adopted == [after]
    assert store.read() == after
    assert after.generation == 1


async def test_a_change_that_cannot_be_recorded_is_not_made(registrar, store, log, adopted):
    """The caller gets the log's own error."""
    log.failure = AuditUnavailableError("the disk is full")
    with pytest.raises(AuditUnavailableError):
        await registrar.apply(create("acme"), actor="me")
    assert (store.read().tenants, store.generation(), adopted) == ((), 0, [])


async def test_an_edit_without_a_change_is_not_recorded(registrar, store, log):
    """A file that is imported at every start must not fill the log."""
    await registrar.apply(create("acme"), actor="me")
    await registrar.apply(lambda tenants: tenants, actor="me")
    assert (len(log.entries), store.generation()) == (2, 1)


async def test_a_concurrent_change_is_kept_and_entries_are_not_repeated(registrar, store, log):
    """Another writer comes between read and write: both changes are there."""

    def another_writer():
        log.before = lambda: None
        before = store.read()
        store.write(before, (*before.tenants, Tenant(name="other")))

    log.before = another_writer
    after = await registrar.apply(create("acme"), actor="me")
    assert [tenant.name for tenant in after.tenants] == ["acme", "other"]
    assert log.entries[1:] == [
        announced(1, (Tenant(name="acme"),)),
        announced(2, after.tenants),
    ]
    assert log.entries[0][0] == EntryType.TENANT_CREATED


async def test_two_changes_at_once_are_both_made(registrar, store):
    await asyncio.gather(*(registrar.apply(create(f"t{number}"), actor="me") for number in range(8)))
    assert len(store.read().tenants) == 8


async def test_a_change_gives_up_after_repeated_conflicts(registrar, store, log):

    def another_writer(tenants):
        before = store.read()
        store.write(before, (*before.tenants, Tenant(name=f"t{before.generation}")))
        return create_tenant(tenants, "acme", {})

    with pytest.raises(TenantConflictError, match="all the time"):
        await registrar.apply(another_writer, actor="me")
    assert store.generation() == TRIES
    assert [entry for entry, _ in log.entries] == [
        EntryType.TENANT_CREATED,
        *[EntryType.TENANTS_SEALED] * TRIES,
    ]


async def test_a_reason_goes_into_the_entry_of_a_revocation(registrar, log):
    await registrar.apply(
        lambda tenants: add_key((*tenants, Tenant(name="acme")), "acme", STORED), actor="me"
    )
    await registrar.apply(
        lambda tenants: revoke_key(tenants, STORED.key_id, now=5), actor="me", reason="lost laptop"
    )
    assert log.entries[-2] == (
        EntryType.KEY_REVOKED,
        {"tenant": "acme", "key_id": STORED.key_id, "reason": "lost laptop", "actor": "me"},
    )


async def test_an_unusable_database_is_a_one_line_error(tmp_path, log):
    """Without its tables, or with a foreign value in them."""
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    with (
        closing(SqlTenantStore(url, roster_mac(tmp_path))) as empty,
        pytest.raises(TenantsUnavailableError) as caught,
    ):
        await Registrar(store=empty, record=log.append).apply(create("acme"), actor="me")
    assert "could not be read" in str(caught.value)
    assert "\n" not in str(caught.value)
