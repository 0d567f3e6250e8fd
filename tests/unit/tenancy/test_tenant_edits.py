"""Promises of edits and of what the audit log says of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit.entry_types import REGISTRY
from appliance.control.tenants.tenant_changes import changes_between
from appliance.errors import ConfigurationError, TenantConflictError, TenantNotFoundError
from appliance.tenancy import (
    ANY_MODEL,
    ContentPolicy,
    Limits,
    Tenant,
    encode_tenants,
    make_key,
    parse_tenants,
)
from appliance.tenancy.edits import (
    add_key,
    change_tenant,
    create_tenant,
    delete_tenant,
    import_tenants,
    merge_patch,
    revoke_key,
    rotate_key,
)
from appliance.tenancy.roster import find_key, find_tenant, sorted_tenants
from tests.unit.tenancy.states import ADMIN, KEY, OTHER, STORED, TENANTS

NOW = 1_800_000_000
DAY = 86400
ACME = Tenant(name="acme", models=("a",), keys=(STORED,))
OPERATOR = Tenant(name="operator", models=(), keys=(ADMIN,))
BOTH = (ACME, OPERATOR)


def recorded(before, after, reason=None):
    """What the log says: types with their fields."""
    return [(change.type, dict(change.fields)) for change in changes_between(before, after, reason=reason)]


def rotated(key, *, expires_at=None, overlap=DAY, now=NOW):
    """All tenants, and the two keys, after the key of `acme` was rotated."""
    successor = replace(OTHER, created_at=now, expires_at=expires_at)
    before = (replace(ACME, keys=(key,)), OPERATOR)
    after = rotate_key(before, key.key_id, successor, now=now, overlap_seconds=overlap)
    return before, after, *(find_key(after, each.key_id)[1] for each in (key, successor))


def test_a_tenant_is_created_without_keys():
    """Members are those of the tenants file; existing tenants stay unchanged."""
    after = create_tenant(BOTH, "new", {"models": ["b"], "limits": {"requests_per_minute": 5}})
    assert after[:2] == BOTH
    assert after[2] == Tenant(name="new", models=("b",), limits=Limits(requests_per_minute=5))
    assert recorded(BOTH, after) == [("tenant.created", {"tenant": "new", "models": ["b"]})]


def test_tenant_is_not_created_twice():
    """A second tenant of a name would take over the first one's limits and keys."""
    with pytest.raises(TenantConflictError, match="'acme' exists already"):
        create_tenant(BOTH, "acme", {})


def test_change_keeps_members_that_are_not_named():
    before = (replace(ACME, limits=Limits(requests_per_minute=5, tokens_per_day=7)),)
    after = change_tenant(before, "acme", {"content": "digest", "limits": {"tokens_per_day": None}})
    assert after == (replace(ACME, content=ContentPolicy.DIGEST, limits=Limits(requests_per_minute=5)),)
    assert recorded(before, after) == [
        ("tenant.changed", {"tenant": "acme", "changes": ["content", "limits"]})
    ]


def test_null_resets_a_member_to_its_default():
    (after,) = change_tenant((ACME,), "acme", {"models": None})
    assert after.models == (ANY_MODEL,)


def test_unknown_member_is_refused():
    for members in ({"keys": []}, {"limit": {}}):
        with pytest.raises(ConfigurationError, match="is not a known member"):
            change_tenant(BOTH, "acme", members)


def test_the_keys_of_a_deleted_tenant_are_revoked_in_the_log():
    """A reader of the log need not know which keys the tenant had."""
    after = delete_tenant(BOTH, "acme")
    assert after == (OPERATOR,)
    assert recorded(BOTH, after, "contract ended") == [
        ("key.revoked", {"tenant": "acme", "key_id": STORED.key_id, "reason": "contract ended"}),
        ("tenant.deleted", {"tenant": "acme"}),
    ]


@pytest.mark.parametrize(
    "edit",
    [
        lambda: change_tenant(BOTH, "unknown", {}),
        lambda: delete_tenant(BOTH, "unknown"),
        lambda: add_key(BOTH, "unknown", OTHER),
        lambda: revoke_key(BOTH, OTHER.key_id, now=NOW),
        lambda: rotate_key(BOTH, OTHER.key_id, OTHER, now=NOW, overlap_seconds=0),
        lambda: find_tenant(BOTH, "unknown"),
    ],
)
def test_unknown_tenant_or_key_cannot_be_changed(edit):
    with pytest.raises(TenantNotFoundError):
        edit()


def test_a_whole_key_in_place_of_its_id_is_not_repeated():
    """What is typed by mistake must not get into a log by way of the error."""
    with pytest.raises(TenantNotFoundError) as caught:
        revoke_key(BOTH, KEY, now=NOW)
    assert KEY[12:20] not in str(caught.value)


def test_a_new_key_leaves_the_policy_of_its_tenant_as_it_was():
    """Creating a key must not opt a tenant in."""
    after = add_key(BOTH, "acme", OTHER)
    assert after == (replace(ACME, keys=(STORED, OTHER)), OPERATOR)
    assert recorded(BOTH, after) == [
        ("key.created", {"tenant": "acme", "key_id": OTHER.key_id, "admin": False})
    ]


def test_rotated_key_is_valid_for_the_overlap():
    before, after, old, new = rotated(replace(STORED, models=("a",), admin=True))
    assert (old.rotated_at, old.expires_at) == (NOW, NOW + DAY)
    assert old.is_valid_at(NOW + DAY - 1)
    assert not old.is_valid_at(NOW + DAY)
    assert (new.models, new.admin, new.replaces, new.expires_at) == (("a",), True, STORED.key_id, None)
    assert recorded(before, after) == [
        (
            "key.rotated",
            {"tenant": "acme", "key_id": OTHER.key_id, "previous_key_id": STORED.key_id},
        )
    ]


def test_rotation_never_extends_a_key():
    """The old key ends when it would have; the new one lives as long as the old one was made for."""
    _, _, old, new = rotated(replace(STORED, created_at=NOW - 3 * DAY, expires_at=NOW + 60))
    assert (old.expires_at, new.expires_at) == (NOW + 60, NOW + 3 * DAY + 60)
    _, _, _, unknown_age = rotated(replace(STORED, expires_at=NOW + 60))
    assert unknown_age.expires_at == NOW + 60
    _, _, _, told = rotated(replace(STORED, expires_at=NOW + 60), expires_at=NOW + DAY)
    assert told.expires_at == NOW + DAY


@pytest.mark.parametrize(
    "key",
    [
        replace(STORED, revoked_at=NOW - 1),
        replace(STORED, expires_at=NOW),
        replace(STORED, rotated_at=NOW - 1, expires_at=NOW + 60),
    ],
    ids=["revoked", "expired", "rotated"],
)
def test_invalid_key_is_not_rotated(key):
    with pytest.raises(TenantConflictError):
        rotated(key)


def test_a_revocation_is_final_and_can_be_repeated():
    """The first moment counts; nothing is recorded a second time."""
    once = revoke_key(BOTH, STORED.key_id, now=NOW)
    assert find_key(once, STORED.key_id)[1].revoked_at == NOW
    assert revoke_key(once, STORED.key_id, now=NOW + 5) == once
    assert recorded(BOTH, once, "lost") == [
        ("key.revoked", {"tenant": "acme", "key_id": STORED.key_id, "reason": "lost"})
    ]
    assert recorded(once, once) == []


@given(TENANTS, st.booleans())
def test_importing_what_was_exported_changes_nothing(tenants, prune):
    """Into the appliance it came from, and into an empty one, it is the same state."""
    exported = parse_tenants(encode_tenants(tenants))
    # Pruning insists on an admin key, which is another promise.
    anchor = (Tenant(name="zz-operator", keys=(ADMIN,)),) if prune else ()
    if any(key.key_id == ADMIN.key_id for tenant in tenants for key in tenant.keys):
        return
    for before in (tenants, ()):
        merged = import_tenants((*before, *anchor), (*exported, *anchor), prune=prune, now=NOW)
        assert sorted_tenants(merged) == sorted_tenants((*tenants, *anchor))


def test_an_import_adds_and_changes_and_leaves_the_rest():
    """Without `prune` nothing is ever removed: neither tenants nor keys."""
    wanted = (Tenant(name="acme", models=("b",), keys=(OTHER,)), Tenant(name="new"))
    after = import_tenants(BOTH, wanted, prune=False, now=NOW)
    assert sorted_tenants(after) == sorted_tenants(
        (Tenant(name="acme", models=("b",), keys=(STORED, OTHER)), Tenant(name="new"), OPERATOR)
    )


def test_pruning_removes_what_the_file_does_not_name():
    """Keys as well; the log says which."""
    wanted = (Tenant(name="acme", models=("a",), keys=(OTHER,)), OPERATOR)
    before = (*BOTH, Tenant(name="old"))
    after = import_tenants(before, wanted, prune=True, now=NOW)
    assert after == wanted
    assert recorded(before, after) == [
        ("key.created", {"tenant": "acme", "key_id": OTHER.key_id, "admin": False}),
        ("key.revoked", {"tenant": "acme", "key_id": STORED.key_id, "reason": "removed"}),
        ("tenant.deleted", {"tenant": "old"}),
    ]


def test_prune_keeps_a_valid_admin_key():
    """A file without a valid admin key is refused, but only with `prune`."""
    for operator in ((), (replace(ADMIN, expires_at=NOW),)):
        with pytest.raises(TenantConflictError, match="no valid admin key"):
            import_tenants((ACME,), (ACME, Tenant(name="operator", keys=operator)), prune=True, now=NOW)
    assert import_tenants((ACME,), (ACME,), prune=False, now=NOW) == (ACME,)


def test_import_does_not_undo_revocation_or_rotation():
    """It may be older than the revocation, and is imported at every start."""
    revoked = revoke_key(BOTH, STORED.key_id, now=NOW)
    for prune in (False, True):
        assert sorted_tenants(import_tenants(revoked, BOTH, prune=prune, now=NOW)) == sorted_tenants(revoked)
    before, after, old, _ = rotated(STORED)
    again = import_tenants(after, before, prune=False, now=NOW)
    assert find_key(again, STORED.key_id)[1] == old


def test_import_may_revoke_a_key_or_change_its_expiry():
    """Revoking and expiring by file is what a site without commands does."""
    expiring = (replace(ACME, keys=(replace(STORED, expires_at=NOW + 5),)), OPERATOR)
    after = import_tenants(BOTH, expiring, prune=False, now=NOW)
    assert after == expiring
    assert recorded(BOTH, after) == [
        ("tenant.changed", {"tenant": "acme", "changes": [f"keys.{STORED.key_id}.expires_at"]})
    ]
    assert import_tenants(expiring, BOTH, prune=False, now=NOW) == BOTH


@pytest.mark.parametrize(
    "wanted",
    [
        Tenant(name="other", keys=(STORED,)),
        Tenant(name="acme", keys=(replace(STORED, digest="0" * 64),)),
        Tenant(name="acme", keys=(replace(STORED, admin=True),)),
    ],
    ids=["tenant", "digest", "purpose"],
)
def test_import_never_changes_a_keys_owner_digest_or_purpose(wanted):
    with pytest.raises(TenantConflictError, match="make a new key"):
        import_tenants(BOTH, (wanted,), prune=False, now=NOW)


@given(TENANTS, TENANTS)
def test_every_change_is_recorded_without_digests(before, after):
    """The log's entries are closed: an unknown type or field would refuse the change."""
    changes = changes_between(before, after)
    assert bool(changes) == (before != after)
    for change in changes:
        schema = REGISTRY[change.type].fields
        assert {*change.fields, "actor"} <= set(schema)
        assert {name for name, field in schema.items() if field.required} <= {*change.fields, "actor"}
    said = repr(changes)
    assert not [key.digest for tenant in after for key in tenant.keys if key.digest in said]


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": [1]}, {"a": [2]}, {"a": [2]}),
        ({"a": 1}, {"a": {"b": None}}, {"a": {}}),
        (1, {"a": 1}, {"a": 1}),
        ({}, 5, 5),
    ],
)
def test_a_patch_is_applied_as_rfc_7396_has_it(target, patch, result):
    """Its own examples, in short."""
    assert merge_patch(target, patch) == result


def test_keys_come_by_age():
    """So that a list reads like a history, whatever the database gives first."""
    young = replace(make_key(b"y" * 37)[1], created_at=NOW)
    assert sorted_tenants((replace(ACME, keys=(young, STORED)),))[0].keys == (STORED, young)
