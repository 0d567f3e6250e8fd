"""
Bearer tokens (JWT, RFC 7519) of an identity provider: signature, kind, claims and tenant.

PyJWT verifies the signature and the registered claims, with the same `cryptography` as the audit log.  The
allowed algorithms of a key are fixed here, never by the token (RFC 8725).  Only access tokens are
credentials: an ID token tells a client who logged in, and reaches places that access tokens do not.
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
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError
from appliance.tenancy.keys import AdminScope

MAX_TOKEN_CHARACTERS = 16 * 2**10
REQUIRED = ["exp", "iat", "iss", "aud", "sub"]
ACCESS_TOKEN = "at+jwt"  # noqa: S105 - the type of RFC 9068
TYPES = frozenset({ACCESS_TOKEN, "jwt"})
"""Accepted `typ` of a header, in lower case without `application/`; many providers write `JWT` or nothing."""
BEARER = "bearer"
"""The claim `typ` of Keycloak's access tokens; its ID tokens have `ID` there."""
OF_ID_TOKENS = frozenset({"nonce", "at_hash", "c_hash", "s_hash"})
"""Claims that OpenID Connect defines for ID tokens."""
REMEMBERED = 4096
"""Maximum cached tokens; an entry takes about 500 bytes."""
DIGEST_CHARACTERS = 16

REASONS: Mapping[type[jwt.PyJWTError], RefusalReason] = {
    jwt.ExpiredSignatureError: RefusalReason.TOKEN_EXPIRED,
    jwt.ImmatureSignatureError: RefusalReason.TOKEN_NOT_YET_VALID,
    jwt.InvalidAudienceError: RefusalReason.TOKEN_AUDIENCE,
    jwt.InvalidIssuerError: RefusalReason.TOKEN_ISSUER,
    jwt.InvalidAlgorithmError: RefusalReason.TOKEN_ALGORITHM,
    jwt.InvalidSignatureError: RefusalReason.TOKEN_SIGNATURE,
    jwt.MissingRequiredClaimError: RefusalReason.TOKEN_CLAIM_MISSING,
}
"""Reasons of PyJWT's errors; any other is a malformed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    tenant: str
    key_id: str
    """Identifies issuer and subject in the audit log: the same in all tokens of one subject."""
    is_admin: bool
    scopes: frozenset[AdminScope] | None = None
    """Of an admin; None for all of them."""
    manages_keys: bool = False
    """Of a tenant's caller: whether it may make keys."""
    valid_until: float
    """Unix time after which it is refused."""


def verify_token(token: str, keys: KeySet, settings: OidcSettings) -> Bearer:
    """Verify a token and read its content; raises RefusedCallerError.  PyJWT reads the wall clock."""
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise RefusedCallerError(RefusalReason.TOKEN_MALFORMED)
    try:
        header = jwt.get_unverified_header(token)
        algorithm = header.get("alg")
        if algorithm not in settings.algorithms:
            raise RefusedCallerError(RefusalReason.TOKEN_ALGORITHM)
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
        raise RefusedCallerError(REASONS.get(type(error), RefusalReason.TOKEN_MALFORMED)) from error
    except (ValueError, TypeError, RecursionError) as error:
        # A hostile token must not crash the library's caller.
        raise RefusedCallerError(RefusalReason.TOKEN_MALFORMED) from error
    if not _is_access_token(header, claims):
        raise RefusedCallerError(RefusalReason.TOKEN_TYPE)
    if int(claims["exp"]) - int(claims["iat"]) > settings.max_lifetime_seconds:
        raise RefusedCallerError(RefusalReason.TOKEN_LIFETIME)
    return read_claims(claims, settings)


def _is_access_token(header: Mapping[str, Any], claims: Mapping[str, Any]) -> bool:
    """By its type, where it has one; an untyped token must have no claim of an ID token."""
    kind = str(header.get("typ", "JWT")).lower().removeprefix("application/")
    claimed = str(claims.get("typ", "")).lower()
    if kind not in TYPES or claimed not in {"", BEARER}:
        return False
    # Keycloak before 25 writes `nonce` into access tokens too.
    is_typed = kind == ACCESS_TOKEN or claimed == BEARER
    return is_typed or OF_ID_TOKENS.isdisjoint(claims)


def read_claims(claims: Mapping[str, Any], settings: OidcSettings) -> Bearer:
    """The tenant and subject of verified claims; raises RefusedCallerError."""
    admin = _words(claims.get(settings.admin_claim)) if settings.admin_claim is not None else set()
    granted = admin.intersection(settings.admin_values)
    return Bearer(
        tenant=settings.admin_tenant if granted else _tenant_of(claims, settings),
        key_id=subject_id("jwt", claims["iss"], claims["sub"]),
        is_admin=bool(granted),
        scopes=_scopes_of(granted, settings),
        manages_keys=not granted and not _words(_claim(claims, settings)).isdisjoint(settings.manage_values),
        valid_until=int(claims["exp"]) + settings.leeway_seconds,
    )


def subject_id(kind: str, *names: str) -> str:
    """Id of a caller without an API key in the audit log: a digest that holders of the names can compute."""
    digest = hashlib.sha256(json.dumps(names, ensure_ascii=True).encode()).hexdigest()
    return f"{kind}:{digest[:DIGEST_CHARACTERS]}"


def _tenant_of(claims: Mapping[str, Any], settings: OidcSettings) -> str:
    named = _words(claims.get(settings.tenant_claim))
    if settings.tenants:
        named = {settings.tenants[word] for word in named if word in settings.tenants}
    if len(named) != 1:
        raise RefusedCallerError(RefusalReason.TOKEN_TENANT)
    return named.pop()


def _scopes_of(granted: set[str], settings: OidcSettings) -> frozenset[AdminScope] | None:
    if not granted <= settings.admin_scopes.keys():
        return None
    return frozenset(AdminScope(scope) for value in granted for scope in settings.admin_scopes[value])


def _claim(claims: Mapping[str, Any], settings: OidcSettings) -> object:
    return None if settings.manage_claim is None else claims.get(settings.manage_claim)


def _words(claim: object) -> set[str]:
    """The strings in a claim; other values are ignored."""
    if isinstance(claim, str):
        return {claim}
    return {word for word in claim if isinstance(word, str)} if isinstance(claim, list) else set()


class TokenCache:
    """Caches verified tokens by digest, so that a signature is verified once, not for each request."""

    def __init__(self, verify: Callable[[str], Bearer], clock: Callable[[], float]) -> None:
        self._verify, self._clock = verify, clock
        self._known: OrderedDict[bytes, Bearer] = OrderedDict()

    def read(self, token: str) -> Bearer:
        """The content of a token, if it is valid now; raises RefusedCallerError, and caches no refusal."""
        digest = hashlib.sha256(token.encode()).digest()
        known = self._known.get(digest)
        if known is not None:
            if self._clock() < known.valid_until:
                self._known.move_to_end(digest)
                return known
            del self._known[digest]
        bearer = self._verify(token)
        self._known[digest] = bearer
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return bearer

    def forget(self) -> None:
        self._known.clear()
