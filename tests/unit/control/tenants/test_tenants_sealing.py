"""Tenants and keys get a new MAC only as the audit log has them."""

from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text

from appliance.audit.append import append_entry
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.control.tenants.enrolment import seal_upgraded
from appliance.control.tenants.registrar import Registrar
from appliance.control.tenants.sealing import read_plan
from appliance.errors import TenantsAlteredError, TenantsUnavailableError, TenantsUnsealedError
from appliance.tenancy import Limits, Tenant, make_key
from appliance.tenancy.edits import (
    add_key,
    create_tenant,
    import_tenants,
    mint_key,
    revoke_key,
    rotate_key,
)
from appliance.tenancy.store import SqlTenantStore
from tests.roster import roster_mac
from tests.unit.tenancy.states import ADMIN, OTHER, STORED

NOW = 1_800_000_000
INTRUDER = "aaaabbbb"
INSERT = (
    f"INSERT INTO api_keys (key_id, tenant, digest, admin) VALUES ('{INTRUDER}', 'acme', '{'ab' * 32}', 1)"
)
MOVE = "UPDATE tenancy_generation SET generation = generation + 1"


class Site:
    """A database with log, tenants and keys, and the owner's access to it."""

    def __init__(self, stack: ExitStack, directory) -> None:
        self.url = f"sqlite:///{directory / 'audit.db'}"
        self._stack, self.directory = stack, directory
        self.log = stack.enter_context(closing(SqlAuditStore(self.url)))
        self._engine = create_engine(self.url)
        stack.callback(self._engine.dispose)
        self.store = self.machine("data")
        self.registrar = self.registrar_of(self.store)

    def machine(self, name: str) -> SqlTenantStore:
        return self._stack.enter_context(closing(SqlTenantStore(self.url, roster_mac(self.directory / name))))

    def registrar_of(self, store: SqlTenantStore) -> Registrar:
        async def record(entry_type, **fields):
            append_entry(self.log, entry_type, fields, origin="appliance.test/audit", clock=lambda: NOW)

        return Registrar(store=store, record=record)

    def execute(self, *statements: str) -> None:
        with self._engine.begin() as connection:
            for statement in statements:
                connection.execute(text(statement))

    def forget_macs(self) -> None:
        """As a version without MACs would have left everything."""
        self.execute("UPDATE tenancy_generation SET mac = NULL")
        for path in (self.store.mac.key, self.directory / "data" / "tenants.newest"):
            path.unlink(missing_ok=True)
        self.store = self.machine("data")
        self.registrar = self.registrar_of(self.store)

    def plan(self):
        return read_plan(self.store, self.log, NOW)

    def entries(self, *types: EntryType):
        return [dict(entry.fields) for entry in self._decoded() if entry.type in types]

    def _decoded(self):
        return [decode(leaf.leaf) for leaf in self.log.leaves(0, 1000)]

    async def upgrade(self, *, continues: bool = True) -> None:
        """What a start does before it reads the tenants."""
        await seal_upgraded(
            self.registrar,
            self.store,
            self.log,
            continues=continues,
            actor="cli:me",
            clock=lambda: NOW,
        )


@pytest.fixture
def empty(tmp_path):
    with ExitStack() as stack:
        yield Site(stack, tmp_path)


@pytest.fixture
async def site(empty):
    """Keys that were created, rotated and revoked, each with its entries."""
    apply, successor = empty.registrar.apply, OTHER
    await apply(lambda before: create_tenant(before, "acme", {}), actor="cli:me")
    for key in (STORED, ADMIN):
        await apply(lambda before, key=key: add_key(before, "acme", key), actor="cli:me")
    await apply(
        lambda before: rotate_key(before, STORED.key_id, successor, now=NOW, overlap_seconds=0),
        actor="cli:me",
    )
    await apply(lambda before: revoke_key(before, OTHER.key_id, now=NOW), actor="cli:me")
    return empty


async def test_what_the_log_announced_is_sealed_as_it_is(site):
    """After the loss of the key, or its rotation."""
    before = site.store.read()
    site.store.mac.key.write_text("another key of thirty-two characters")
    with pytest.raises(TenantsAlteredError, match="restore that key"):
        site.store.read()
    plan = site.plan()
    assert (plan.is_recorded, plan.was_sealed, plan.findings) == (True, True, ())
    sealed = await site.registrar.seal(plan, actor="cli:me")
    assert sealed == site.store.read() == replace(before, generation=before.generation + 1)
    assert site.entries(EntryType.TENANTS_SEALED)[-1]["generation"] == sealed.generation


async def test_what_the_log_contradicts_is_not_sealed(site):
    """Every correction has an entry, and leaves less access than there was."""
    site.execute(
        INSERT,
        f"UPDATE api_keys SET revoked_at = NULL WHERE key_id = '{OTHER.key_id}'",
        f"UPDATE api_keys SET admin = 1 WHERE key_id = '{STORED.key_id}'",
        "INSERT INTO tenants SELECT 'mine', models, speculation, content, priority, may, limits, disabled "
        "FROM tenants",
        "INSERT INTO api_keys (key_id, tenant, digest, admin) VALUES ('ccccdddd', 'nobody', '', 1)",
        MOVE,
    )
    plan = site.plan()
    assert plan.findings == (
        f"admin key {INTRUDER} of acme: no entry created it so; it is removed",
        f"admin key {STORED.key_id} of acme: no entry created it so; it is removed",
        f"key {OTHER.key_id} of acme: an entry revoked it; it is revoked again",
        "tenant mine: no entry created it; it is removed with its keys",
    )
    assert not plan.is_recorded
    await site.registrar.seal(plan, actor="cli:me")
    roster = site.store.read()
    left = {key.key_id: (key.admin, key.revoked_at) for tenant in roster.tenants for key in tenant.keys}
    assert left == {ADMIN.key_id: (True, None), OTHER.key_id: (False, NOW)}
    revoked = [entry["key_id"] for entry in site.entries(EntryType.KEY_REVOKED)]
    assert {INTRUDER, STORED.key_id} <= set(revoked)


MANAGER = replace(make_key(b"m" * 37)[1], manage_keys=True, limits=Limits(requests_per_minute=60))
NEXT_MANAGER = make_key(b"n" * 37)[1]
MINTED = make_key(b"t" * 37)[1]


@pytest.fixture
async def minting(site):
    """A key that a tenant made, whose maker was rotated since."""
    apply, name = site.registrar.apply, "acme"
    await apply(lambda before: add_key(before, name, MANAGER), actor="cli:me")
    minted = replace(MINTED, limits=Limits(requests_per_minute=6))
    await apply(lambda before: mint_key(before, name, MANAGER, minted, now=NOW), actor=MANAGER.key_id)
    await apply(
        lambda before: rotate_key(before, MANAGER.key_id, NEXT_MANAGER, now=NOW, overlap_seconds=9),
        actor="cli:me",
    )
    return site


async def test_limits_permissions_and_makers_are_as_the_log_has_them(minting):
    """After rotations, too: what nobody changed is sealed without a finding."""
    minting.execute(MOVE)
    plan = minting.plan()
    assert (plan.is_recorded, plan.findings) == (False, ())
    (acme,) = plan.after
    made = {key.key_id: (key.manage_keys, key.made_by) for key in acme.keys}
    assert made[NEXT_MANAGER.key_id] == (True, None)
    assert made[MINTED.key_id] == (False, NEXT_MANAGER.key_id)


@pytest.mark.parametrize("key", [MANAGER, NEXT_MANAGER, MINTED], ids=["maker", "successor", "minted"])
@pytest.mark.parametrize(
    "change",
    [
        "limits = NULL",
        """limits = '{"requests_per_minute": 600}'""",
        """limits = '{"requests_per_minute": 60, "by_model": {"demo": {"tokens_per_day": 1}}}'""",
        "manage_keys = CASE WHEN manage_keys THEN NULL ELSE 1 END",
        f"made_by = '{STORED.key_id}'",
        "made_by = 'jwt:0123456789abcdef'",
        f"made_by = CASE WHEN made_by IS NULL THEN '{ADMIN.key_id}' ELSE NULL END",
    ],
    ids=["no limits", "larger", "another limit", "permission", "another key", "a subject", "one or none"],
)
async def test_a_key_with_other_limits_permissions_or_maker_is_not_sealed(minting, key, change):
    minting.execute(f"UPDATE api_keys SET {change} WHERE key_id = '{key.key_id}'", MOVE)
    plan = minting.plan()
    assert plan.findings == (f"key {key.key_id} of acme: no entry created it so; it is removed",)
    await minting.registrar.seal(plan, actor="cli:me")
    (acme,) = minting.store.read().tenants
    assert key.key_id not in {each.key_id for each in acme.keys}


async def imported(site, key_id, **members):
    """As an administrator does it with a tenants file."""
    (acme,) = site.store.read().tenants
    keys = tuple(replace(key, **members) if key.key_id == key_id else key for key in acme.keys)
    await site.registrar.apply(
        lambda before: import_tenants(before, (acme.with_keys(keys),), prune=False, now=NOW), actor="cli:me"
    )


@pytest.mark.parametrize(
    ("members", "change"),
    [
        ({"limits": Limits(tokens_per_day=5)}, """limits = '{"tokens_per_day": 50}'"""),
        ({"limits": Limits()}, """limits = '{"requests_per_minute": 60}'"""),
        ({"manage_keys": False}, "manage_keys = 1"),
    ],
    ids=["other limits", "no limits", "permission taken"],
)
async def test_what_an_administrator_changed_later_is_compared_too(minting, members, change):
    """Neither other values nor those from before are sealed."""
    await imported(minting, NEXT_MANAGER.key_id, **members)
    minting.execute(MOVE)
    assert minting.plan().findings == ()
    minting.execute(f"UPDATE api_keys SET {change} WHERE key_id = '{NEXT_MANAGER.key_id}'")
    assert minting.plan().findings == (
        f"key {NEXT_MANAGER.key_id} of acme: no entry created it so; it is removed",
    )


async def test_a_change_that_the_log_has_and_the_database_refused_grants_nothing(minting):
    """Whoever can stop the database from being written could have an entry repeated."""
    minting.execute("CREATE TRIGGER stop BEFORE UPDATE ON api_keys BEGIN SELECT RAISE(ABORT, 'no'); END")
    for _ in range(2):
        with pytest.raises(TenantsUnavailableError):
            await imported(minting, NEXT_MANAGER.key_id, manage_keys=False)
    minting.execute("DROP TRIGGER stop", MOVE)
    assert minting.plan().findings == (
        f"key {NEXT_MANAGER.key_id} of acme: no entry created it so; it is removed",
    )


async def test_a_successor_that_may_do_more_is_in_the_log_as_a_new_key(minting):
    """From a tenants file; an entry of a rotation would not say so."""
    wider = replace(make_key(b"w" * 37)[1], replaces=MINTED.key_id, manage_keys=True)
    (acme,) = minting.store.read().tenants
    await minting.registrar.apply(
        lambda before: import_tenants(before, (acme.with_keys((*acme.keys, wider)),), prune=False, now=NOW),
        actor="cli:me",
    )
    created = minting.entries(EntryType.KEY_CREATED)[-1]
    assert (created["key_id"], created["manage_keys"]) == (wider.key_id, True)
    minting.execute(MOVE)
    assert minting.plan().findings == ()


async def test_a_replayed_state_is_corrected_although_the_log_announced_it(site):
    """It was the newest state once; the machine has read a newer one."""
    older = site.store.read()
    stored = site.store.read_unverified().state
    await site.registrar.apply(
        lambda before: revoke_key(before, ADMIN.key_id, now=NOW), actor="cli:me", reason="stolen"
    )
    site.execute(
        f"UPDATE api_keys SET revoked_at = NULL WHERE key_id = '{ADMIN.key_id}'",
        f"UPDATE tenancy_generation SET generation = {stored.generation}, mac = '{stored.mac}'",
    )
    with pytest.raises(TenantsAlteredError, match="older than"):
        site.store.read()
    plan = site.plan()
    assert plan.before == older
    assert plan.findings == (f"admin key {ADMIN.key_id} of acme: an entry revoked it; it is revoked again",)
    sealed = await site.registrar.seal(plan, actor="cli:me")
    assert sealed.generation > older.generation + 1
    assert site.store.read() == sealed


async def test_a_site_of_a_version_without_macs_is_sealed_at_its_first_start(empty):
    """Once, with an entry, because the log agrees."""
    site = empty
    append = site.registrar_of(site.store)._record
    await append(EntryType.TENANT_CREATED, tenant="acme", models=["*"], actor="cli:me")
    await append(EntryType.KEY_CREATED, tenant="acme", key_id=STORED.key_id, admin=False, actor="cli:me")
    site.store.write(site.store.read(), (Tenant(name="acme", keys=(STORED,)),))
    site.forget_macs()
    with pytest.raises(TenantsUnsealedError, match="`appliance tenant seal`"):
        site.store.read()
    await site.upgrade(continues=False)
    with pytest.raises(TenantsUnsealedError):  # this machine does not know that it is the true log
        site.store.read()
    await site.upgrade()
    assert site.store.read().tenants == (Tenant(name="acme", keys=(STORED,)),)
    assert [entry["actor"] for entry in site.entries(EntryType.TENANTS_SEALED)] == ["cli:me"]
    await site.upgrade()
    assert len(site.entries(EntryType.TENANTS_SEALED)) == 1


async def test_an_upgrade_does_not_seal_a_key_that_the_log_does_not_know(empty):
    site = empty
    append = site.registrar_of(site.store)._record
    await append(EntryType.TENANT_CREATED, tenant="acme", models=["*"], actor="cli:me")
    site.store.write(site.store.read(), (Tenant(name="acme", keys=(STORED,)),))
    site.forget_macs()
    await site.upgrade()
    with pytest.raises(TenantsUnsealedError):
        site.store.read()


async def test_a_removed_mac_is_never_computed_by_a_start(site):
    """The log says that there was one, even if every file of the machine is new."""
    site.execute(INSERT)
    site.forget_macs()
    await site.upgrade()
    with pytest.raises(TenantsUnsealedError):
        site.store.read()
    site.execute(f"DELETE FROM api_keys WHERE key_id = '{INTRUDER}'")
    await site.upgrade()
    with pytest.raises(TenantsUnsealedError):
        site.store.read()


async def test_a_key_file_that_others_may_read_or_that_is_short_is_refused(site):
    key = site.store.mac.key
    key.chmod(0o604)
    with pytest.raises(TenantsUnavailableError, match="chmod 600"):
        site.store.read()
    key.chmod(0o600)
    key.write_text("short")
    with pytest.raises(TenantsUnavailableError, match="openssl rand -hex 32"):
        site.store.read()
