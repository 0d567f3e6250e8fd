"""Which published keys are used, and for what."""

import json
from itertools import count

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigurationError
from appliance.infra.settings import OidcSettings
from appliance.tenancy.identity.jwks import parse_key_set
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError
from tests.identity_provider import Provider, key_set

ALLOWED = OidcSettings().algorithms
ES, RSA = Provider("e1"), Provider("r1", "RS256")
SECRET = {"kty": "oct", "kid": "s", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA", "alg": "HS256"}


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "ES384", "EdDSA"])
def test_a_key_of_each_kind_is_found_by_its_id(algorithm):
    """RSA, both usual curves, and Ed25519."""
    provider = Provider("k", algorithm)
    assert parse_key_set(key_set(provider.jwk()), ALLOWED).find("k", algorithm).algorithm_name == algorithm


def test_an_rsa_key_serves_both_paddings_unless_it_says_which():
    """RFC 7517: `alg` binds a key, and its absence does not."""
    assert parse_key_set(key_set(RSA.jwk()), ALLOWED).find("r1", "PS256")
    with pytest.raises(RefusedCallerError):
        parse_key_set(key_set(RSA.jwk(alg="RS256")), ALLOWED).find("r1", "PS256")


def test_a_curve_serves_its_own_algorithm_only():
    """A P-256 key checks no ES384 signature."""
    with pytest.raises(RefusedCallerError) as refusal:
        parse_key_set(key_set(ES.jwk()), ALLOWED).find("e1", "ES384")
    assert refusal.value.reason is RefusalReason.TOKEN_KEY_UNKNOWN


def test_unusable_keys_are_skipped_and_counted():
    """Shared secrets, keys to encrypt with, unknown kinds, and keys of algorithms that are not allowed."""
    text = key_set(
        ES.jwk(), SECRET, RSA.jwk(use="enc"), RSA.jwk(key_ops=["encrypt"]), {"kty": "AKP", "kid": "q"},
        Provider("other").jwk(alg="ES256K"), {"kty": "EC", "crv": ["P-256"]}, {"kty": "EC", "crv": "P-256"},
        ES.jwk(kid=7),
    )  # fmt: skip
    found = parse_key_set(text, ALLOWED)
    assert list(found.keys) == [("e1", "ES256")]
    assert found.skipped == 8


def test_weak_key_is_skipped():
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    jwk = jwt.get_algorithm_by_name("RS256").to_jwk(weak.public_key(), as_dict=True)
    with pytest.raises(ConfigurationError, match="2048 bits"):
        parse_key_set(key_set(jwk), ALLOWED)


def test_token_without_key_id_uses_the_only_key():
    """With two of its algorithm it could be either, and is refused."""
    one = parse_key_set(key_set(ES.jwk(), RSA.jwk()), ALLOWED)
    assert one.find(None, "ES256").key_id == "e1"
    two = parse_key_set(key_set(ES.jwk(), Provider("e2").jwk()), ALLOWED)
    with pytest.raises(RefusedCallerError):
        two.find(None, "ES256")


JUNK = st.none() | st.integers() | st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=2)
MEMBERS = ("kty", "crv", "alg", "use", "kid", "n", "e", "x", "y", "key_ops")
ENTRIES = st.dictionaries(st.sampled_from(MEMBERS), JUNK)


@given(ENTRIES, st.sampled_from([ES, RSA, Provider("d", "EdDSA")]))
def test_entry_of_any_shape_is_used_or_skipped(junk, provider):
    """A key that is damaged in a file is no reason to lose the others, nor to crash."""
    found = parse_key_set(key_set({**provider.jwk(), **junk}, Provider("good").jwk()), ALLOWED)
    assert found.find("good", "ES256")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON Web Key Set"),
        ("[]", "not a JSON Web Key Set"),
        ("{}", "not a JSON Web Key Set"),
        ("[" * 5000, "not a JSON Web Key Set"),
        ('{"keys": "k"}', "list of objects"),
        ('{"keys": [1]}', "list of objects"),
        ('{"keys": []}', "none of its 0 keys"),
        (key_set(SECRET), "none of its 1 keys"),
        (key_set(ES.jwk(), Provider("e1").jwk()), "same `kid`"),
        (key_set(ES.jwk(d="AAAA")), "private key"),
    ],
    ids=count(),  # each test process has other keys, and all must agree on the names
)
def test_unusable_key_file_is_refused_in_one_line(text, words):
    """Nothing of the file is quoted: it may hold what should not be there."""
    with pytest.raises(ConfigurationError, match=words) as error:
        parse_key_set(text, ALLOWED)
    assert "\n" not in str(error.value)
    assert "AAAA" not in str(error.value)
    assert json.dumps(SECRET["k"]).strip('"') not in str(error.value)
