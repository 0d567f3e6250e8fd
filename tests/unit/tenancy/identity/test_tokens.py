"""Which claims of a token are accepted, and for how long."""

import base64
import hmac
import json
import time
from datetime import UTC, datetime
from itertools import count
from types import SimpleNamespace
from typing import get_args

import jwt.api_jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.infra.settings import OidcSettings, ScopeName
from appliance.tenancy.directory import REFUSAL
from appliance.tenancy.identity.jwks import parse_key_set
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError
from appliance.tenancy.identity.tokens import (
    REMEMBERED,
    REQUIRED,
    Bearer,
    TokenCache,
    subject_id,
    verify_token,
)
from appliance.tenancy.keys import AdminScope
from tests.clock import Clock
from tests.identity_provider import AUDIENCE, ISSUER, Provider, key_set

PROVIDER, STRANGER = Provider("k1"), Provider("k1")
RSA = Provider("r1", "RS256")
SETTINGS = OidcSettings(jwks_file="keys.json", issuer=ISSUER, audience=AUDIENCE)
KEYS = parse_key_set(key_set(PROVIDER.jwk(), RSA.jwk()), SETTINGS.algorithms)
NOW = int(time.time())  # noqa: TID251 - as the tokens below, which are made when this is read


class Frozen(datetime):
    """The time at which this file was read: tests that wait their turn must not see tokens expire."""

    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(NOW, tz or UTC)


@pytest.fixture(autouse=True)
def _frozen(monkeypatch):
    monkeypatch.setattr(jwt.api_jwt, "datetime", Frozen)
    monkeypatch.setattr("tests.identity_provider.time", SimpleNamespace(time=lambda: NOW))


def settings(**fields) -> OidcSettings:
    return OidcSettings(jwks_file="keys.json", issuer=ISSUER, audience=AUDIENCE, **fields)


def refusal(token: str, given: OidcSettings = SETTINGS) -> RefusalReason:
    with pytest.raises(RefusedCallerError) as error:
        verify_token(token, KEYS, given)
    assert str(error.value) == REFUSAL
    return error.value.reason


def b64(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def test_token_names_its_tenant():
    bearer = verify_token(PROVIDER.token(exp=NOW + 100), KEYS, SETTINGS)
    assert (bearer.tenant, bearer.is_admin, bearer.valid_until) == ("acme", False, NOW + 130)
    assert bearer.key_id == subject_id("jwt", ISSUER, "ada")


def test_an_audience_may_be_one_of_several():
    """RFC 7519, 4.1.3."""
    assert verify_token(RSA.token(aud=["other", AUDIENCE]), KEYS, SETTINGS).tenant == "acme"


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (STRANGER.token(), RefusalReason.TOKEN_SIGNATURE),
        (PROVIDER.token(header={"kid": "k9"}), RefusalReason.TOKEN_KEY_UNKNOWN),
        (PROVIDER.token(exp=NOW - 31), RefusalReason.TOKEN_EXPIRED),
        (PROVIDER.token(nbf=NOW + 90), RefusalReason.TOKEN_NOT_YET_VALID),
        (PROVIDER.token(iat=NOW + 90), RefusalReason.TOKEN_NOT_YET_VALID),
        (PROVIDER.token(iss=ISSUER + "/"), RefusalReason.TOKEN_ISSUER),
        (PROVIDER.token(aud="another"), RefusalReason.TOKEN_AUDIENCE),
        (PROVIDER.token(aud=[]), RefusalReason.TOKEN_CLAIM_MISSING),
        *((PROVIDER.token(without=(name,)), RefusalReason.TOKEN_CLAIM_MISSING) for name in REQUIRED),
        (PROVIDER.token(exp="soon"), RefusalReason.TOKEN_MALFORMED),
        (PROVIDER.token(sub=7), RefusalReason.TOKEN_MALFORMED),
        (PROVIDER.token(header={"crit": ["x"], "x": 1}), RefusalReason.TOKEN_MALFORMED),
        (PROVIDER.token(without=("tenant",)), RefusalReason.TOKEN_TENANT),
        (PROVIDER.token(tenant=["acme", "other"]), RefusalReason.TOKEN_TENANT),
        (PROVIDER.token(tenant={"acme": 1}), RefusalReason.TOKEN_TENANT),
        ("eyJ.e30.c2ln", RefusalReason.TOKEN_MALFORMED),
        (f"{b64({'alg': 'ES256', 'kid': ['k1']})}.{b64({})}.c2ln", RefusalReason.TOKEN_MALFORMED),
        (f"{b64({'alg': ['ES256']})}.{b64({})}.c2ln", RefusalReason.TOKEN_ALGORITHM),
        (f"{b64({'alg': 'ES256', 'kid': 'k1'})}.{'A' * 20_000}.c2ln", RefusalReason.TOKEN_MALFORMED),
    ],
    ids=count(),  # each test process has other tokens, and all must agree on the names
)  # fmt: skip
def test_invalid_token_is_refused_with_its_reason(token, reason):
    """The words are always the same; the reason is for the operator's log."""
    assert refusal(token) is reason


@pytest.mark.parametrize(
    "token",
    [
        PROVIDER.token(nonce="n"),
        PROVIDER.token(at_hash="h", header={"typ": "JWT"}),
        PROVIDER.token(c_hash="h"),
        PROVIDER.token(typ="ID", nonce="n"),
        PROVIDER.token(typ="ID"),
        PROVIDER.token(typ="Refresh"),
        PROVIDER.token(typ="DPoP"),
        PROVIDER.token(typ="ID", header={"typ": "at+jwt"}),
        PROVIDER.token(header={"typ": "logout+jwt"}),
        PROVIDER.token(header={"typ": "dpop+jwt"}),
        PROVIDER.token(header={"typ": "application/id+jwt"}),
    ],
    ids=count(),
)
def test_a_token_that_is_no_access_token_is_refused(token):
    """It was made for a client that logs somebody in, for another audience of the same name."""
    assert refusal(token) is RefusalReason.TOKEN_TYPE


@pytest.mark.parametrize(
    "token",
    [
        PROVIDER.token(header={"typ": "at+jwt"}),
        PROVIDER.token(header={"typ": "application/AT+JWT"}),
        PROVIDER.token(header={"typ": "JWT"}),
        PROVIDER.token(header={"typ": None}),
        PROVIDER.token(typ="Bearer", azp="chat", acr="1", auth_time=NOW),
        PROVIDER.token(typ="Bearer", nonce="n"),
        PROVIDER.token(**{"kubernetes.io": {"namespace": "wards"}}, header={"typ": None}),
    ],
    ids=count(),
)
def test_access_tokens_of_common_providers_are_accepted(token):
    """RFC 9068, Keycloak (with a nonce before version 25), Entra ID, Kubernetes."""
    assert verify_token(token, KEYS, SETTINGS).tenant == "acme"


def test_a_token_of_too_long_a_lifetime_is_refused():
    """However fresh it is: nothing withdraws it before its end."""
    given = settings(max_lifetime_seconds=600)
    assert verify_token(PROVIDER.token(iat=NOW - 300, exp=NOW + 300), KEYS, given)
    assert refusal(PROVIDER.token(iat=NOW, exp=NOW + 601), given) is RefusalReason.TOKEN_LIFETIME
    assert refusal(PROVIDER.token(exp=NOW + 10 * 365 * 86400)) is RefusalReason.TOKEN_LIFETIME


def test_an_unsigned_token_is_refused():
    """`none` is no algorithm (RFC 8725, 2.1)."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": NOW + 100, "tenant": "acme"}
    for name in ("none", "None", "nOnE"):
        assert refusal(f"{b64({'alg': name, 'typ': 'JWT'})}.{b64(claims)}.") is RefusalReason.TOKEN_ALGORITHM


def test_public_key_is_not_accepted_as_a_shared_secret():
    """A token signed with HMAC under what is published is refused (RFC 8725, 2.1)."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": NOW + 100, "tenant": "acme"}
    signed = f"{b64({'alg': 'HS256', 'kid': 'r1'})}.{b64(claims)}"
    made = hmac.digest(json.dumps(RSA.jwk()).encode(), signed.encode(), "sha256")
    signature = base64.urlsafe_b64encode(made).rstrip(b"=").decode()
    assert refusal(f"{signed}.{signature}") is RefusalReason.TOKEN_ALGORITHM


def test_key_inside_the_token_is_not_trusted():
    """Neither `jwk` nor `jku` nor `x5c` of a header chooses the key."""
    header = {"jwk": STRANGER.jwk(), "jku": "http://127.0.0.1/keys", "x5u": "http://127.0.0.1/keys"}
    assert refusal(STRANGER.token(header=header)) is RefusalReason.TOKEN_SIGNATURE


def test_an_algorithm_the_operator_did_not_allow_is_refused():
    """However good the signature is."""
    assert refusal(PROVIDER.token(), settings(algorithms=("RS256",))) is RefusalReason.TOKEN_ALGORITHM


def test_clocks_may_differ_by_the_leeway():
    """Expired within the leeway still counts, and not a second longer."""
    assert verify_token(PROVIDER.token(exp=NOW - 5), KEYS, settings(leeway_seconds=60))
    assert refusal(PROVIDER.token(exp=NOW - 61), settings(leeway_seconds=60)) is RefusalReason.TOKEN_EXPIRED


@pytest.mark.parametrize(
    ("groups", "tenant"),
    [("ward-7", "hospital"), (["staff", "ward-7", "ward-8"], "hospital"), (["staff", "lab"], "research")],
)
def test_groups_map_to_tenants(groups, tenant):
    """Groups that are not listed are ignored; several may map to the same tenant."""
    given = settings(
        tenant_claim="groups", tenants={"ward-7": "hospital", "ward-8": "hospital", "lab": "research"}
    )
    assert verify_token(PROVIDER.token(groups=groups), KEYS, given).tenant == tenant


@pytest.mark.parametrize("groups", [["staff"], [], ["ward-7", "lab"], "hospital", None, 3])
def test_groups_of_no_tenant_or_of_two_are_refused(groups):
    """With a list of values, a value that happens to be a tenant's name is none of them."""
    given = settings(tenant_claim="groups", tenants={"ward-7": "hospital", "lab": "research"})
    assert refusal(PROVIDER.token(groups=groups), given) is RefusalReason.TOKEN_TENANT


def test_claim_grants_the_admin_api():
    """Such a token belongs to the operators, whatever its tenant claim says."""
    given = settings(admin_claim="roles", admin_values=("gateway-admin",))
    admin = verify_token(PROVIDER.token(roles=["x", "gateway-admin"], without=("tenant",)), KEYS, given)
    assert (admin.is_admin, admin.tenant) == (True, "operator")
    for roles in (["x"], "gateway-admin-not", None, {"gateway-admin": True}):
        assert verify_token(PROVIDER.token(roles=roles), KEYS, given).is_admin is False


@pytest.mark.parametrize(
    ("roles", "scopes"),
    [
        (["operators"], None),
        (["auditors"], {"read"}),
        (["auditors", "records"], {"read", "retention"}),
        (["auditors", "operators"], None),
        (["auditors", "unlisted"], {"read"}),
    ],
)
def test_the_values_of_the_claim_give_the_scopes(roles, scopes):
    """A value without scopes of its own has all of them."""
    given = settings(
        admin_claim="roles",
        admin_values=("operators", "auditors", "records"),
        admin_scopes={"auditors": ("read",), "records": ("retention",)},
    )
    bearer = verify_token(PROVIDER.token(roles=roles), KEYS, given)
    assert (bearer.is_admin, bearer.scopes) == (True, scopes)


def test_the_settings_name_every_scope():
    assert get_args(ScopeName) == tuple(AdminScope)


def test_no_claim_grants_the_admin_api_by_default():
    assert verify_token(PROVIDER.token(admin=True, roles=["admin"]), KEYS, SETTINGS).is_admin is False


MANAGING = {"manage_claim": "groups", "manage_values": ("key-makers", "leads")}


@pytest.mark.parametrize(
    ("groups", "manages"),
    [
        ("key-makers", True),
        (["staff", "leads"], True),
        ("key-makers leads", False),
        (["staff"], False),
        ([], False),
        ([["leads"]], False),
        ([True, 1], False),
        (None, False),
        (True, False),
        ({"leads": True}, False),
    ],
)
def test_claim_grants_the_making_of_keys(groups, manages):
    """Present, absent, or of another type."""
    token = PROVIDER.token(groups=groups)
    assert verify_token(token, KEYS, settings(**MANAGING)).manages_keys is manages
    assert verify_token(token, KEYS, SETTINGS).manages_keys is False
    assert verify_token(PROVIDER.token(), KEYS, settings(**MANAGING)).manages_keys is False


def test_an_admins_token_makes_no_keys_of_a_tenant():
    """Even if both claims are one, with a value for each."""
    given = settings(admin_claim="groups", admin_values=("admins",), **MANAGING)
    admin = verify_token(PROVIDER.token(groups=["admins", "leads"]), KEYS, given)
    assert (admin.is_admin, admin.manages_keys) == (True, False)
    lead = verify_token(PROVIDER.token(groups=["leads"]), KEYS, given)
    assert (lead.is_admin, lead.manages_keys) == (False, True)


def test_subject_id_is_stable_and_opaque():
    """One subject has one id over all its tokens; subjects and issuers that look alike do not share one."""
    ids = {
        subject_id("jwt", *names) for names in (("a", "b"), ("ab", ""), ("a,b", ""), ("", "ab"), ("b", "a"))
    }
    assert len(ids) == 5
    assert subject_id("jwt", "a", "b") in ids
    assert all(len(made) == len("jwt:") + 16 for made in ids)


@given(st.text(alphabet="eyJabc.-_=", max_size=60) | st.text(max_size=40))
def test_any_text_is_verified_or_refused(text):
    refusal(text)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def cache(clock, asked) -> TokenCache:
    def verify(token: str) -> Bearer:
        asked.append(token)
        if token.startswith("bad"):
            raise RefusedCallerError(RefusalReason.TOKEN_SIGNATURE)
        return Bearer(tenant=token, key_id="jwt:x", is_admin=False, valid_until=clock.now + 60)

    return TokenCache(verify, clock)


def test_token_is_verified_once_while_valid(cache, clock, asked):
    for _ in range(3):
        assert cache.read("t").tenant == "t"
    assert asked == ["t"]
    clock.now += 60
    cache.read("t")
    assert asked == ["t", "t"]


def test_refusals_are_not_cached(cache, asked):
    for _ in range(2):
        with pytest.raises(RefusedCallerError):
            cache.read("bad")
    assert asked == ["bad", "bad"]


def test_token_cache_is_bounded(cache, asked):
    for number in range(REMEMBERED):
        cache.read(str(number))
    cache.read("0")
    cache.read("one more")
    cache.read("0")
    assert len(asked) == REMEMBERED + 1
    cache.read("1")
    assert len(asked) == REMEMBERED + 2


def test_token_cache_can_be_cleared(cache, asked):
    cache.read("t")
    cache.forget()
    cache.read("t")
    assert asked == ["t", "t"]
