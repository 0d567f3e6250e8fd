"""Keys authenticate their tenants while they are valid."""

import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import InvalidApiKeyError
from appliance.tenancy import KEY_FORMAT, ApiKey, Caller, Tenant, TenantDirectory, digest_key, make_key
from tests.unit.tenancy.states import ADMIN, KEY, OTHER, OTHER_KEY, STORED

NOW = 1_800_000_000
DIRECTORY = TenantDirectory((Tenant(name="demo", keys=(STORED,)),))


def directory(*tenants, now=NOW):
    return TenantDirectory(tenants, clock=lambda: now)


def refusal(of, key):
    with pytest.raises(InvalidApiKeyError) as caught:
        of.authenticate(key)
    return str(caught.value)


@given(st.binary(min_size=37, max_size=37), st.booleans())
def test_a_made_key_has_the_documented_form_and_is_stored_as_a_digest_only(raw, admin):
    """A key carries its id in clear; what is stored has the id, the digest and no secret."""
    key, stored = make_key(raw, admin=admin)
    match = KEY_FORMAT.fullmatch(key)
    assert match is not None
    assert (stored.key_id, stored.digest, stored.admin) == (match["key_id"], digest_key(key), admin)
    assert match["secret"] not in repr(stored)


def test_key_authenticates_its_tenant():
    """The caller of a valid key is the tenant that holds it, with that key."""
    caller = DIRECTORY.authenticate(KEY)
    assert (caller.tenant.name, caller.key) == ("demo", STORED)


def test_every_key_of_a_tenant_authenticates_it():
    both = TenantDirectory((Tenant(name="demo", keys=(STORED, OTHER)),))
    assert {both.authenticate(key).key.key_id for key in (KEY, OTHER_KEY)} == {STORED.key_id, OTHER.key_id}


@pytest.mark.parametrize(
    "presented",
    [
        None, "", "sk-", "Bearer", KEY[:-1], KEY + "A", KEY.upper(), OTHER_KEY, KEY[:12] + OTHER_KEY[12:],
        KEY + "\n",
        "sk-é", "sk-aaaaaaaa-" + "é" * 43, " " + KEY, STORED.digest,
    ],
)  # fmt: skip
def test_every_wrong_key_gets_the_same_message(presented):
    """Missing, malformed, unknown and wrong keys cannot be told apart."""
    assert refusal(DIRECTORY, presented) == refusal(DIRECTORY, None)


@pytest.mark.parametrize(
    "tenant",
    [
        Tenant(name="demo", keys=(replace(STORED, revoked_at=NOW - 1),)),
        Tenant(name="demo", keys=(replace(STORED, expires_at=NOW),)),
        Tenant(name="demo", keys=(replace(STORED, expires_at=NOW - 1, rotated_at=NOW - 2),)),
        Tenant(name="demo", keys=(STORED,), disabled=True),
    ],
    ids=["revoked", "expires now", "expired", "disabled"],
)
def test_invalid_key_is_refused_like_an_unknown_one(tenant):
    """The holder of an old key does not learn why it is refused."""
    assert refusal(directory(tenant), KEY) == refusal(DIRECTORY, None)


def test_a_key_works_until_the_second_it_expires():
    """Expiry is looked at with every request, by this gateway's own clock."""
    now = [NOW - 0.001]
    running = TenantDirectory(
        (Tenant(name="demo", keys=(replace(STORED, expires_at=NOW),)),), clock=lambda: now[0]
    )
    assert running.authenticate(KEY).tenant.name == "demo"
    now[0] += 0.001
    refusal(running, KEY)


@given(st.text())
def test_any_text_as_a_key_is_refused_and_never_an_internal_error(presented):
    """A client controls the header: whatever is in it, the answer is a refusal."""
    refusal(DIRECTORY, presented.encode("utf-8", "replace").decode("latin-1"))


def test_refusal_contains_no_part_of_the_key():
    """A key that was mistyped by one letter must not end up in a log by way of its error."""
    words = refusal(DIRECTORY, KEY[:-1] + ("A" if KEY[-1] != "A" else "B"))
    assert KEY[12:20] not in words
    assert STORED.key_id not in words


def test_directory_is_replaced_as_a_whole():
    """Keys and names that are not in the new state open nothing, those that are do."""
    changing = directory(Tenant(name="old", keys=(STORED,)))
    changing.replace((Tenant(name="new", keys=(OTHER,)),))
    assert changing.authenticate(OTHER_KEY).tenant.name == "new"
    refusal(changing, KEY)
    assert (changing.tenant("old"), changing.tenant("new").keys) == (None, (OTHER,))
    assert [tenant.name for tenant in changing.tenants] == ["new"]


def test_a_disabled_tenant_is_known_and_not_served():
    """Tokens and certificates that name it open nothing either."""
    tenant = Tenant(name="demo", disabled=True)
    assert directory(tenant).tenant("demo") is None
    assert directory(tenant).tenants == (tenant,)


@pytest.mark.parametrize(
    ("models", "asked", "allowed"),
    [
        (("*",), "any", True),
        (("a", "b"), "b", True),
        (("a",), "b", False),
        ((), "a", False),
        (("a",), "*", False),
    ],
)
def test_a_tenant_may_use_the_models_it_is_scoped_to(models, asked, allowed):
    """Named models, or all with `*`; an empty list allows none."""
    assert Tenant(name="t", models=models).may_use(asked) is allowed


@pytest.mark.parametrize(
    ("tenant", "key", "allowed"),
    [
        (("*",), None, True),
        (("a",), None, True),
        (("*",), ("a",), True),
        (("*",), ("b",), False),
        (("*",), (), False),
        (("b",), ("a",), False),
    ],
)
def test_key_restricts_its_tenants_models(tenant, key, allowed):
    caller = Caller(tenant=Tenant(name="t", models=tenant), key=replace(STORED, models=key))
    assert caller.may_use("a") is allowed


def test_key_ids_are_safe_in_a_file_name():
    assert set(STORED.key_id) <= set(string.ascii_lowercase + "234567")
    assert isinstance(ADMIN, ApiKey)


def test_next_expiry_ignores_rotated_keys():
    """Expired, revoked and replaced keys do not count, nor do keys without an expiry."""
    keys = (
        replace(STORED, key_id="endless1", expires_at=None),
        replace(STORED, key_id="ended111", expires_at=NOW - 1),
        replace(STORED, key_id="revoked1", expires_at=NOW + 1, revoked_at=NOW - 5),
        replace(STORED, key_id="rotated1", expires_at=NOW + 2, rotated_at=NOW - 5),
        replace(STORED, key_id="ending11", expires_at=NOW + 3),
        replace(STORED, key_id="later111", expires_at=NOW + 4),
    )
    assert directory(Tenant(name="demo", keys=keys)).next_key_expiry == NOW + 3
    assert directory(Tenant(name="demo", keys=keys[:4])).next_key_expiry == 0
    assert directory(Tenant(name="demo", keys=keys, disabled=True)).next_key_expiry == 0
