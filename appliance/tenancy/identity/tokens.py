"""
Bearer tokens (JWT, RFC 7519) of an identity provider: signature, claims, and whose they are.

PyJWT does the cryptography and the registered claims; it is the most used library for them in Python, under
the MIT licence, and stands on the same `cryptography` as the audit log.  Which algorithms a key may be used
with is settled here before it is asked, never by the token (RFC 8725).
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from appliance.infra.settings import OidcSettings
from appliance.tenancy.identity.jwks import KeySet
from appliance.tenancy.identity.refusal import Reason, RefusedCallerError

MAX_TOKEN_CHARACTERS = 16 * 2**10
REQUIRED = ["exp", "iss", "aud", "sub"]
REMEMBERED = 4096
"""Verified tokens that are remembered; an entry takes some 500 bytes."""
DIGEST_CHARACTERS = 16

REASONS: Mapping[type[jwt.PyJWTError], Reason] = {
    jwt.ExpiredSignatureError: Reason.TOKEN_EXPIRED,
    jwt.ImmatureSignatureError: Reason.TOKEN_NOT_YET_VALID,
    jwt.InvalidAudienceError: Reason.TOKEN_AUDIENCE,
    jwt.InvalidIssuerError: Reason.TOKEN_ISSUER,
    jwt.InvalidAlgorithmError: Reason.TOKEN_ALGORITHM,
    jwt.InvalidSignatureError: Reason.TOKEN_SIGNATURE,
    jwt.MissingRequiredClaimError: Reason.TOKEN_CLAIM_MISSING,
}
"""What each of PyJWT's errors means; any other is a token that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """What a verified token says."""

    tenant: str
    key_id: str
    """Stands for issuer and subject in the audit log: the same in every token of one subject."""
    is_admin: bool
    good_until: float
    """Unix time after which it is not believed any more."""


def verify_token(token: str, keys: KeySet, settings: OidcSettings) -> Bearer:
    """
    Check a token and read what it says; the wall clock is PyJWT's own.

    Raises:
        RefusedCallerError: with the reason.
    """
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise RefusedCallerError(Reason.TOKEN_MALFORMED)
    try:
        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if algorithm not in settings.algorithms:
            raise RefusedCallerError(Reason.TOKEN_ALGORITHM)
        claims = jwt.decode(
            token,
            keys.find(header.get("kid"), algorithm),
            algorithms=[algorithm],
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=settings.leeway_seconds,
            options={"require": REQUIRED},
        )
    except jwt.PyJWTError as error:
        raise RefusedCallerError(REASONS.get(type(error), Reason.TOKEN_MALFORMED)) from error
    except (ValueError, TypeError, RecursionError) as error:
        # What a library lets through of a hostile token must not become a crash, and is no caller.
        raise RefusedCallerError(Reason.TOKEN_MALFORMED) from error
    return read_claims(claims, settings)


def read_claims(claims: Mapping[str, Any], settings: OidcSettings) -> Bearer:
    """
    Whose a token with these verified claims is.

    Raises:
        RefusedCallerError: its claim names no tenant, or several.
    """
    admin = _words(claims.get(settings.admin_claim)) if settings.admin_claim is not None else set()
    is_admin = not admin.isdisjoint(settings.admin_values)
    return Bearer(
        tenant=settings.admin_tenant if is_admin else _tenant_of(claims, settings),
        key_id=subject_id("jwt", claims["iss"], claims["sub"]),
        is_admin=is_admin,
        good_until=int(claims["exp"]) + settings.leeway_seconds,
    )


def subject_id(kind: str, *names: str) -> str:
    """What the audit log calls a caller without an API key: a digest anyone who knows the names can make."""
    digest = hashlib.sha256(json.dumps(names, ensure_ascii=True).encode()).hexdigest()
    return f"{kind}:{digest[:DIGEST_CHARACTERS]}"


def _tenant_of(claims: Mapping[str, Any], settings: OidcSettings) -> str:
    named = _words(claims.get(settings.tenant_claim))
    if settings.tenants:
        named = {settings.tenants[word] for word in named if word in settings.tenants}
    if len(named) != 1:
        raise RefusedCallerError(Reason.TOKEN_TENANT)
    return named.pop()


def _words(claim: object) -> set[str]:
    """The words in a claim; anything else in it says nothing."""
    if isinstance(claim, str):
        return {claim}
    return {word for word in claim if isinstance(word, str)} if isinstance(claim, list) else set()


class TokenCache:
    """Remembers verified tokens by digest, so that a signature is checked once and not for each request."""

    def __init__(self, verify: Callable[[str], Bearer], clock: Callable[[], float]) -> None:
        self._verify = verify
        self._clock = clock
        self._known: OrderedDict[bytes, Bearer] = OrderedDict()

    def read(self, token: str) -> Bearer:
        """
        What the token says, if it is good now.

        Raises:
            RefusedCallerError: with the reason; refusals are not remembered.
        """
        digest = hashlib.sha256(token.encode()).digest()
        known = self._known.get(digest)
        if known is not None:
            if self._clock() < known.good_until:
                self._known.move_to_end(digest)
                return known
            del self._known[digest]
        bearer = self._verify(token)
        self._known[digest] = bearer
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return bearer

    def forget(self) -> None:
        """Check every token anew: the keys have changed."""
        self._known.clear()
