"""
Reads the credential from a request's headers.  Pure.

OpenAI clients send `Authorization: Bearer`, Anthropic's `x-api-key`, Azure's `api-key`; all are equivalent.
"""

from collections.abc import Iterable

from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError

BEARER = b"bearer"
KEY_HEADERS = frozenset({b"x-api-key", b"api-key"})
TOKEN_START = "eyJ"  # noqa: S105 - how `{"` begins in base64, and so the header of every token
TOKEN_DOTS = 2


def presented(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """
    The key or token in these headers (names in lower case), or None.

    Raises RefusedCallerError if two headers disagree, or the scheme of `Authorization` is not `Bearer`.
    """
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            if scheme.lower() != BEARER:
                raise RefusedCallerError(RefusalReason.API_KEY)
        elif name in KEY_HEADERS:
            given = value
        else:
            continue
        given = given.strip()
        if found is not None and found != given:
            raise RefusedCallerError(RefusalReason.CREDENTIALS_DISAGREE)
        found = given
    return found.decode("latin-1") if found else None


def is_token(credential: str) -> bool:
    """Whether this has the form of a JWT; API keys contain no dots."""
    return credential.startswith(TOKEN_START) and credential.count(".") == TOKEN_DOTS
