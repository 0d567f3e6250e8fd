"""Tenants and keys in both databases: what is written is read, and no change undoes another."""

import shutil
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from appliance.audit.append import append_entry
from appliance.audit.entry_types import EntryType
from appliance.audit.migrate import copy_log
from appliance.audit.store import Head
from appliance.errors import TenantConflictError, TenantsAlteredError, TenantsUnavailableError
from appliance.infra import schema
from appliance.infra.schema import grants
from appliance.tenancy import AdminScope, ApiKey, Limits, Tenant, encode_tenants, parse_tenants
from appliance.tenancy.edits import add_key, create_tenant, import_tenants, revoke_key, rotate_key
from appliance.tenancy.roster import Roster, sorted_tenants
from appliance.tenancy.store import SqlTenantStore
from tests.grower import Grower
from tests.roster import roster_mac
from tests.unit.tenancy.states import ADMIN, STORED, TENANTS
from tests.unit.tenancy.states import OTHER as SUCCESSOR

ACME = Tenant(name="acme", keys=(STORED,))


@pytest.fixture
def open_tenants(open_store, tmp_path):
    """Open stores of tenants on databases that have their tables."""
    opened = []

    def open_(url, machine="machine"):
        opened.append(SqlTenantStore(url, roster_mac(tmp_path / machine)))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(url, open_store, open_tenants):
    open_store(url)
    return open_tenants(url)


def test_new_store_has_no_tenants(store):
    """An empty store marks the first start."""
    assert store.read() == Roster(generation=0, tenants=())
    assert store.generation() == 0


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TENANTS)
def test_tenants_survive_write_read_export_and_import(store, tenants):
    """Policy, limits, keys and their history, from any state before."""
    before = store.read()
    written = store.write(before, tenants)
    assert written == Roster(generation=before.generation + 1, tenants=tenants)
    assert store.read() == written
    exported = parse_tenants(encode_tenants(written.tenants))
    emptied = store.write(written, ())
    imported = import_tenants(emptied.tenants, exported, prune=False, now=0)
    assert store.write(emptied, imported).tenants == store.read().tenants == tenants


def test_of_two_changes_of_the_same_state_one_is_refused(url, store, open_tenants):
    """The second one would undo the first."""
    other, before = open_tenants(url), store.read()
    other.write(before, (ACME,))
    with pytest.raises(TenantConflictError):
        store.write(before, (Tenant(name="mine"),))
    assert store.read() == Roster(generation=1, tenants=(ACME,))


def test_changes_from_many_sides_are_all_kept(url, store, open_tenants):
    """Every change that was not refused is there in the end, and each moved the generation by one."""

    def change(number):
        mine = open_tenants(url)
        for step in range(5):
            while True:
                before = mine.read()
                after = create_tenant(before.tenants, f"t{number}-{step}", {})
                try:
                    mine.write(before, after)
                    break
                except TenantConflictError:
                    continue

    threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    roster = store.read()
    assert (roster.generation, len(roster.tenants)) == (20, 20)


def test_change_writes_only_changed_rows(store, url, execute):
    """A damaged row is not overwritten in passing, and its damage is reported."""
    roster = store.write(store.read(), (ACME, Tenant(name="other")))
    execute(url, "UPDATE tenants SET priority = 'urgent' WHERE name = 'other'")
    store.write(roster, revoke_key(roster.tenants, STORED.key_id, now=5))
    with pytest.raises(TenantsAlteredError, match="MAC key"):
        store.read()


@pytest.mark.parametrize("column", ["models", "may", "limits"])
def test_unreadable_row_is_an_error_and_never_a_default(store, url, execute, column):
    """A limit that cannot be read must not be no limit."""
    store.write(store.read(), (ACME,))
    execute(url, f"UPDATE tenants SET {column} = 'nonsense'")
    with pytest.raises(TenantsAlteredError) as caught:
        store.read()
    assert "\n" not in str(caught.value)


def test_a_log_from_before_tenants_gets_their_tables(
    empty_url, old_tables, open_store, open_tenants, monkeypatch
):
    """Entries stay; no tenant exists yet."""
    old_tables(empty_url, "0001")
    with monkeypatch.context() as patch:
        patch.setattr(schema, "NEWEST", "0001")
        grower = Grower(open_store(empty_url))
        grower.append((EntryType.AUDIT_READ, None))
    schema.upgrade_database(empty_url)
    assert open_store(empty_url).head() == Head.of(grower.tree)
    assert open_tenants(empty_url).read() == Roster()


def test_an_admin_key_without_scopes_has_all_of_them(store):
    """As keys of versions without scopes are after the upgrade.  Also after a rotation."""
    before = store.write(store.read(), (Tenant(name="operator", keys=(ADMIN,)),))
    store.write(before, rotate_key(before.tenants, ADMIN.key_id, SUCCESSOR, now=5, overlap_seconds=5))
    (operator,) = store.read().tenants
    assert [key.scopes for key in operator.keys] == [None, None]
    assert [key.has_scope(scope) for key in operator.keys for scope in AdminScope] == [True] * 10


def test_an_admin_key_from_before_scopes_has_all_of_them(empty_url, old_tables, open_tenants, execute):
    """As the upgrade leaves it, before the tenants are sealed."""
    old_tables(empty_url, "0005")
    execute(
        empty_url,
        "INSERT INTO tenants VALUES ('operator', '[]', 'auto', 'none', 'standard', '[]', '{}', false)",
    )
    execute(
        empty_url,
        "INSERT INTO api_keys (key_id, tenant, digest, admin)"
        f" VALUES ('{ADMIN.key_id}', 'operator', '{ADMIN.digest}', true)",
    )
    schema.upgrade_database(empty_url)
    (operator,) = open_tenants(empty_url).read_unverified().roster.tenants
    assert [key.has_scope(scope) for key in operator.keys for scope in AdminScope] == [True] * 5


@pytest.mark.parametrize("scopes", ["nonsense", '["all"]', '"read"', "5"])
def test_scopes_that_cannot_be_read_are_an_error_and_never_all_of_them(
    store, url, execute, scopes, monkeypatch
):
    """Even with a right MAC."""
    store.write(store.read(), (Tenant(name="operator", keys=(ADMIN,)),))
    execute(url, f"UPDATE api_keys SET scopes = '{scopes}'")
    monkeypatch.setattr(type(store.mac), "check", lambda *_, **__: None)
    with pytest.raises(TenantsUnavailableError, match="cannot be understood"):
        store.read()


@pytest.mark.parametrize(
    "limits", ["nonsense", "null", "[]", '{"tokens": 1}', '{"requests_per_minute": "60"}', '{"by_model": 1}']
)
def test_limits_of_a_key_that_cannot_be_read_are_an_error_and_never_none(
    store, url, execute, limits, monkeypatch
):
    """Even with a right MAC."""
    store.write(store.read(), (ACME,))
    execute(url, f"UPDATE api_keys SET limits = '{limits}'")
    monkeypatch.setattr(type(store.mac), "check", lambda *_, **__: None)
    with pytest.raises(TenantsUnavailableError, match="cannot be understood"):
        store.read()


OLD_MAC_KEY = "a key of thirty-two characters or more"
OLD_MAC = "e83499da0128d4dd61ad810cb93f2b81e675860b3c7d8b6c1c1b858909f8df8e"
"""As a version before limits of keys computed it for these rows and generation 7."""
OLD_TENANTS = (
    """('acme', '["demo"]', 'auto', 'none', 'standard', '[]', '{"requests_per_minute": 60}', false)""",
    "('operator', '[]', 'auto', 'none', 'standard', '[]', '{}', false)",
)
OLD_SCOPES = '["read", "tenants"]'
OLD_KEYS = (
    f"""('aaaaaaaa', 'acme', '{"aa" * 32}', false, '["demo"]', NULL, 1, 9, 3, NULL, NULL)""",
    f"""('bbbbbbbb', 'acme', '{"bb" * 32}', false, '["demo"]', 'aaaaaaaa', 3, NULL, NULL, 5, NULL)""",
    f"""('cccccccc', 'operator', '{"cc" * 32}', true, NULL, NULL, 2, NULL, NULL, NULL, '{OLD_SCOPES}')""",
)


def test_tenants_from_before_limits_of_keys_keep_their_mac(empty_url, old_tables, open_tenants, execute):
    """No seal is needed after the upgrade, and no key may do more than before."""
    old_tables(empty_url, "0012")
    execute(empty_url, f"INSERT INTO tenants VALUES {', '.join(OLD_TENANTS)}")
    execute(
        empty_url,
        "INSERT INTO api_keys (key_id, tenant, digest, admin, models, replaces, created_at, expires_at, "
        f"rotated_at, revoked_at, scopes) VALUES {', '.join(OLD_KEYS)}",
    )
    execute(empty_url, f"UPDATE tenancy_generation SET generation = 7, mac = '{OLD_MAC}'")
    schema.upgrade_database(empty_url)
    store = open_tenants(empty_url)
    store.mac.key.write_text(OLD_MAC_KEY)
    store.mac.key.chmod(0o600)
    roster = store.read()
    acme, operator = roster.tenants
    demo = {"models": ("demo",)}
    assert acme.keys == (
        ApiKey(key_id="aaaaaaaa", digest="aa" * 32, **demo, created_at=1, expires_at=9, rotated_at=3),
        ApiKey(key_id="bbbbbbbb", digest="bb" * 32, **demo, created_at=3, replaces="aaaaaaaa", revoked_at=5),
    )
    scopes = frozenset({AdminScope.READ, AdminScope.TENANTS})
    assert operator.keys == (
        ApiKey(key_id="cccccccc", digest="cc" * 32, admin=True, scopes=scopes, created_at=2),
    )
    changed = store.write(roster, revoke_key(roster.tenants, "cccccccc", now=5))
    assert store.read() == changed


def test_the_role_of_gateways_may_change_tenants(postgres, postgres_url, open_tenants, execute):
    """The printed rights are enough; the number of changes can be moved, not removed."""
    execute(postgres_url, "CREATE ROLE registrar LOGIN")
    execute(postgres_url, grants("registrar"))
    url = postgres.url_of(postgres_url.rpartition("/")[2], role="registrar")
    store = open_tenants(url)
    one = store.write(store.read(), (ACME,))
    two = store.write(one, add_key(one.tenants, "acme", ADMIN))
    store.write(two, ())
    assert store.read() == Roster(generation=3)
    with pytest.raises(Exception, match="permission denied"):
        execute(url, "DELETE FROM tenancy_generation")


def test_tenants_move_with_the_log(postgres, sqlite_url, open_store, open_tenants):
    """A move to PostgreSQL keeps every key, and the next start is not a first one."""
    append_entry(
        open_store(sqlite_url),
        EntryType.TENANT_DELETED,
        {"tenant": "old", "actor": "cli:me"},
        origin="appliance.test/audit",
        clock=lambda: 1_800_000_000.0,
    )
    store = open_tenants(sqlite_url)
    written = store.write(store.read(), sorted_tenants((ACME, Tenant(name="operator", keys=(ADMIN,)))))
    target = postgres.new_database()
    schema.upgrade_database(target)
    copy_log(sqlite_url, target, progress=lambda _done, _total: None)
    moved = open_tenants(target)
    assert moved.read() == written


INSERTED = (
    "INSERT INTO api_keys (key_id, tenant, digest, admin) "
    f"VALUES ('aaaabbbb', 'acme', '{STORED.digest}', {{yes}})"
)
REVOKED_KEY, MANAGER_KEY, MINTED_KEY = "ccccdddd", "eeeeffff", "gggghhhh"
ATTACKS = {
    "insert an admin key": (INSERTED,),
    "make a key an admin key": (f"UPDATE api_keys SET admin = {{yes}} WHERE key_id = '{STORED.key_id}'",),
    "un-revoke a key": (f"UPDATE api_keys SET revoked_at = NULL WHERE key_id = '{REVOKED_KEY}'",),
    "un-expire a key": (f"UPDATE api_keys SET expires_at = NULL WHERE key_id = '{REVOKED_KEY}'",),
    "swap digests": (f"UPDATE api_keys SET digest = '{'ab' * 32}' WHERE key_id = '{ADMIN.key_id}'",),
    "move a key to another tenant": ("UPDATE api_keys SET tenant = 'other'",),
    "give models": ("UPDATE tenants SET models = '[\"*\"]' WHERE name = 'other'",),
    "lift limits": ("UPDATE tenants SET limits = '{{}}' WHERE name = 'other'",),
    "lift a key's limits": (f"UPDATE api_keys SET limits = NULL WHERE key_id = '{MANAGER_KEY}'",),
    "raise a key's limits": (
        """UPDATE api_keys SET limits = '{{"requests_per_minute": 61}}' WHERE limits IS NOT NULL""",
    ),
    "limit a key": ("""UPDATE api_keys SET limits = '{{"requests_per_minute": 0}}' WHERE limits IS NULL""",),
    "let a key make keys": (f"UPDATE api_keys SET manage_keys = {{yes}} WHERE key_id = '{STORED.key_id}'",),
    "let a key make no keys": (f"UPDATE api_keys SET manage_keys = NULL WHERE key_id = '{MANAGER_KEY}'",),
    "free a key of its maker": (f"UPDATE api_keys SET made_by = NULL WHERE key_id = '{MINTED_KEY}'",),
    "give a key another maker": (
        f"UPDATE api_keys SET made_by = '{STORED.key_id}' WHERE key_id = '{MINTED_KEY}'",
    ),
    "hand a key to a manager": (
        f"UPDATE api_keys SET made_by = '{MANAGER_KEY}' WHERE key_id = '{STORED.key_id}'",
    ),
    "delete a key": (f"DELETE FROM api_keys WHERE key_id = '{REVOKED_KEY}'",),
    "delete a tenant": ("DELETE FROM tenants WHERE name = 'other'",),
    "add a tenant": (
        (
            "INSERT INTO tenants SELECT 'mine', models, speculation, content, priority, may, limits, "
            "disabled FROM tenants WHERE name = 'acme'"
        ),
    ),
    "begin again without tenants": (
        "DELETE FROM api_keys",
        "DELETE FROM tenants",
        "UPDATE tenancy_generation SET generation = 0, mac = NULL",
    ),
    "remove the MAC": (INSERTED, "UPDATE tenancy_generation SET mac = NULL, generation = generation + 1"),
}
OTHER = Tenant(name="other", models=("demo",), limits=Limits(requests_per_minute=1))
REVOKED = replace(STORED, key_id=REVOKED_KEY, revoked_at=5, expires_at=9)
MANAGER = replace(STORED, key_id=MANAGER_KEY, manage_keys=True, limits=Limits(requests_per_minute=60))
MINTED = replace(STORED, key_id=MINTED_KEY, made_by=MANAGER_KEY)


@pytest.fixture
def written(store):
    """Tenants and keys that were written in order."""
    keys = (STORED, REVOKED, ADMIN, MANAGER, MINTED)
    return store.write(store.read(), sorted_tenants((Tenant(name="acme", keys=keys), OTHER)))


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_the_owner_of_the_database_changes_is_refused(
    url, store, written, execute, open_tenants, attack
):
    """By the machine that wrote before and by another one with the same key, under the old number and new."""
    for statement in ATTACKS[attack]:
        execute(url, statement.format(yes="true" if "postgresql" in url else "1"))
    for opened in (
        store,
        store if attack == "begin again without tenants" else joined(open_tenants, url, store),
    ):
        with pytest.raises(TenantsAlteredError) as caught:
            opened.read()
        assert "`appliance tenant seal`" in str(caught.value)
        assert "\n" not in str(caught.value)
        execute(url, "UPDATE tenancy_generation SET generation = generation + 1")


def test_a_complete_older_state_is_refused(url, store, written, execute, open_tenants):
    """Its MAC is right; what knows better is the memory of the machine, also after a restart."""
    newer = store.write(written, revoke_key(written.tenants, STORED.key_id, now=5))
    mac = store.read_unverified().state.mac
    older = joined(open_tenants, url, store, "another")
    older.rewrite(newer.generation, written.generation, written.tenants)
    for opened in (store, open_tenants(url)):
        with pytest.raises(TenantsAlteredError, match="older than"):
            opened.read()
        with pytest.raises(TenantsAlteredError, match="older than"):
            opened.generation()
    older.rewrite(written.generation, newer.generation, newer.tenants)
    assert store.read_unverified().state.mac == mac
    assert store.read() == newer


def test_another_state_of_the_same_generation_is_refused(url, store, written, open_tenants):
    """A machine without a memory was shown an older state, and changed that."""
    joined(open_tenants, url, store, "another").rewrite(
        written.generation, written.generation, written.tenants[1:]
    )
    with pytest.raises(TenantsAlteredError, match="differ"):
        store.generation()


def test_gateways_with_one_key_read_each_others_changes(url, store, written, open_tenants):
    other = joined(open_tenants, url, store)
    assert other.read() == written
    changed = other.write(written, revoke_key(written.tenants, STORED.key_id, now=5))
    assert store.read() == changed


def test_without_the_key_nothing_is_read_or_written(url, store, written, open_tenants):
    other = open_tenants(url, "without")
    for attempt in (other.read, lambda: other.write(written, ())):
        with pytest.raises(TenantsUnavailableError, match=r"does not exist: copy it from another gateway"):
            attempt()
    assert store.read() == written


def test_the_role_of_gateways_alone_makes_no_key_valid(url, store, written, execute):
    """It may write the tables; the key is what counts."""
    execute(url, "UPDATE tenancy_generation SET mac = '" + "0" * 64 + "', generation = generation + 1")
    with pytest.raises(TenantsAlteredError):
        store.read()


def joined(open_tenants, url, store, machine="joined"):
    """The store of another machine with the same key, which has read nothing yet."""
    other = open_tenants(url, machine)
    shutil.copy2(store.mac.key, other.mac.key)
    return other
