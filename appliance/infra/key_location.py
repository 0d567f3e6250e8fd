"""
Where a signing key is: in a file, or in a PKCS#11 token that an RFC 7512 URI names.

    pkcs11:token=audit;object=audit-2027?module-path=/usr/lib/vendor.so&pin-source=/etc/appliance/pin

The module is always named: no code that signs is looked up elsewhere.  The PIN is in a file, since a
command line and an environment can be read by others.  Pure.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote, unquote

SCHEME = "pkcs11:"
FORM = "pkcs11:token=LABEL;object=LABEL?module-path=/PATH&pin-source=/PATH"
_PATH, _QUERY = frozenset({"token", "serial", "object"}), frozenset({"module-path", "pin-source"})
_OPTIONAL = frozenset({"serial"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenKey:
    """An Ed25519 key pair in a token; both halves have the same label."""

    uri: str
    token: str
    """Label of the token."""
    serial: str | None
    """Its serial number, if several have the label."""
    object: str
    """Label of the key pair."""
    module: Path
    """Library of the vendor."""
    pin: Path
    """File with the PIN."""

    def __str__(self) -> str:
        return self.uri


KeyLocation: TypeAlias = Path | TokenKey


def parse_key_location(text: str) -> KeyLocation:
    """Read a path or a URI; raises ValueError if the URI is malformed."""
    return _parse_uri(text) if text.startswith(SCHEME) else Path(text)


def mldsa_path(location: KeyLocation) -> Path:
    """
    Return the path of the post-quantum key of a signing key: `audit-mldsa.key` for `audit.key`.

    It is a file in any case.  That of a key in a token is next to the PIN, named after the object.
    """
    if isinstance(location, TokenKey):
        return location.pin.with_name(f"{quote(location.object, safe=' ')}-mldsa.key")
    return location.with_name(f"{location.stem}-mldsa{location.suffix}")


def secret_files(location: KeyLocation) -> tuple[Path, Path]:
    """What only the signing process may read: the key or the PIN of its token, and the post-quantum key."""
    return location.pin if isinstance(location, TokenKey) else location, mldsa_path(location)


def _parse_uri(uri: str) -> TokenKey:
    path, _, query = uri.removeprefix(SCHEME).partition("?")
    found: dict[str, str] = {}
    parts = [*((_PATH, part) for part in path.split(";")), *((_QUERY, part) for part in query.split("&"))]
    for names, part in parts:
        name, equals, value = part.partition("=")
        if name == "pin-value":
            raise ValueError(
                "pin-value would show the PIN to others: put it in a file and name it in pin-source"
            )
        if name not in names or not equals or name in found or not value:
            raise ValueError(f"{part!r} is not a part of a key's URI, or is there twice: write {FORM}")
        found[name] = unquote(value, errors="strict")
    if missing := sorted((_PATH | _QUERY) - _OPTIONAL - set(found)):
        raise ValueError(f"the key's URI has no {missing[0]}: write {FORM}")
    return TokenKey(
        uri=uri,
        token=found["token"],
        serial=found.get("serial"),
        object=found["object"],
        module=_absolute("module-path", found["module-path"]),
        pin=_absolute("pin-source", found["pin-source"].removeprefix("file:")),
    )


def _absolute(name: str, text: str) -> Path:
    if not text.startswith("/"):
        raise ValueError(f"{name} must be the absolute path of a file, not {text!r}")
    return Path("/" + text.lstrip("/"))
