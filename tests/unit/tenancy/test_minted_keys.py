"""Keys that tenants make: within what their maker allows, and no longer than it is valid."""

from dataclasses import replace

import pytest

from appliance.errors import (
    InvalidApiKeyError,
    KeyExceedsMakerError,
    TenantConflictError,
    TenantNotFoundError,
)
from appliance.tenancy import ApiKey, Limits, Tenant, TenantDirectory, make_key
from appliance.tenancy.directory import EndedMakerError
from appliance.tenancy.edits import (
    LONGEST_BY_TOKEN_SECONDS,
    MOST_MINTED,
    find_minted_key,
    mint_key,
    revoke_key,
    rotate_key,
    rotate_minted_key,
)
from appliance.tenancy.file import encode_tenants, parse_tenants
from appliance.tenancy.roster import find_key

NOW = 1_000
MAKER = replace(
    make_key(b"m" * 37)[1],
    manage_keys=True,
    models=("demo", "code"),
    limits=Limits(requests_per_minute=60),
    expires_at=5_000,
)
TEXT, MINTED = make_key(b"k" * 37, created_at=NOW)
SUBJECT = ApiKey(key_id="jwt:0123456789abcdef", digest="", manage_keys=True)
TENANTS = (
    Tenant(name="acme", keys=(MAKER,), limits=Limits(tokens_per_day=1_000)),
    Tenant(name="other", keys=(make_key(b"o" * 37)[1],)),
)


def mint(tenants=TENANTS, maker=MAKER, **members):
    return mint_key(tenants, "acme", maker, replace(MINTED, **members), now=NOW)


def minted_of(tenants):
    return find_key(tenants, MINTED.key_id)[1]


def test_what_is_left_out_is_the_makers():
    made = minted_of(mint(manage_keys=True))
    assert (made.models, made.expires_at, made.made_by) == (MAKER.models, 5_000, MAKER.key_id)
    assert not made.manage_keys


@pytest.mark.parametrize(
    ("param", "members"),
    [
        ("models", {"models": ("demo", "secret")}),
        ("limits", {"limits": Limits(requests_per_minute=61)}),
        ("limits", {"limits": Limits(tokens_per_day=1_001)}),
        ("expires_at", {"expires_at": 5_001}),
    ],
)
def test_a_key_beyond_its_maker_or_tenant_is_refused(param, members):
    with pytest.raises(KeyExceedsMakerError) as refused:
        mint(**members)
    assert refused.value.param == param


@pytest.mark.parametrize("expires_at", [None, NOW + LONGEST_BY_TOKEN_SECONDS + 1])
def test_a_key_made_with_a_token_has_a_near_expiry(expires_at):
    with pytest.raises(KeyExceedsMakerError):
        mint(maker=SUBJECT, expires_at=expires_at)
    latest = NOW + LONGEST_BY_TOKEN_SECONDS
    assert minted_of(mint(maker=SUBJECT, expires_at=latest)).made_by == SUBJECT.key_id


def test_a_revoked_or_expired_maker_ends_its_keys():
    tenants, now = mint(expires_at=4_000), [NOW]
    directory = TenantDirectory(tenants, clock=lambda: now[0])
    assert directory.authenticate(TEXT).key.made_by == MAKER.key_id
    directory.replace(revoke_key(tenants, MAKER.key_id, now=NOW))
    with pytest.raises(EndedMakerError):
        directory.authenticate(TEXT)
    shorter = replace(MAKER, expires_at=NOW)
    directory.replace((tenants[0].with_keys((shorter, minted_of(tenants))),))
    with pytest.raises(EndedMakerError):
        directory.authenticate(TEXT)
    directory.replace((tenants[0].with_keys((minted_of(tenants),)),))
    with pytest.raises(InvalidApiKeyError):
        directory.authenticate(TEXT)


def test_a_key_follows_what_its_maker_may_do_later():
    tenants = mint(limits=Limits(requests_per_minute=10))
    narrower = replace(MAKER, models=("code",))
    caller = TenantDirectory(
        (tenants[0].with_keys((narrower, minted_of(tenants))),), clock=lambda: NOW
    ).authenticate(TEXT)
    assert not caller.may_use("demo")
    assert caller.may_use("code")
    assert [each.limits.requests_per_minute for each in caller.key_limits] == [10, 60]


def test_rotating_the_maker_hands_over_its_keys_and_its_used_limits():
    successor = make_key(b"s" * 37, created_at=NOW)[1]
    before = TenantDirectory(mint(), clock=lambda: NOW).authenticate(TEXT)
    rotated = rotate_key(mint(), MAKER.key_id, successor, now=NOW, overlap_seconds=0)
    after = TenantDirectory(rotated, clock=lambda: NOW).authenticate(TEXT)
    assert after.key.made_by == successor.key_id
    assert after.key_limits == before.key_limits
    with pytest.raises(TenantConflictError):
        mint_key(rotated, "acme", MAKER, make_key(b"n" * 37)[1], now=NOW)


def test_only_the_maker_reaches_a_key():
    tenants = mint()
    assert find_minted_key(tenants, "acme", MAKER, MINTED.key_id)
    for name, maker in (("acme", SUBJECT), ("other", MAKER)):
        with pytest.raises(TenantNotFoundError):
            find_minted_key(tenants, name, maker, MINTED.key_id)
    with pytest.raises(TenantNotFoundError):
        find_minted_key(tenants, "acme", MAKER, MAKER.key_id)


def test_a_rotation_does_not_outlive_the_maker():
    successor = make_key(b"s" * 37, created_at=NOW)[1]

    def rotate(key):
        return rotate_minted_key(
            mint(), "acme", MAKER, MINTED.key_id, key, now=NOW + 1_000, overlap_seconds=0
        )

    assert find_key(rotate(successor), successor.key_id)[1].expires_at == 5_000
    with pytest.raises(KeyExceedsMakerError):
        rotate(replace(successor, expires_at=5_001))


def test_ended_keys_give_way_and_valid_ones_do_not():
    tenants = TENANTS
    for number in range(MOST_MINTED):
        key = make_key(bytes([number]) * 37, created_at=NOW)[1]
        tenants = mint_key(tenants, "acme", MAKER, key, now=NOW)
    with pytest.raises(TenantConflictError):
        mint(tenants)
    first = make_key(bytes(37))[1].key_id
    after = mint(revoke_key(tenants, first, now=NOW))
    assert len(after[0].keys) == MOST_MINTED + 1
    assert first not in {key.key_id for key in after[0].keys}


def test_the_tenants_file_has_all_of_it():
    tenants = mint(limits=Limits(requests_per_minute=10))
    assert parse_tenants(encode_tenants(tenants)) == tenants
