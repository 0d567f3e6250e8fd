"""
The keys a site trusts for bundles and drafts: a file with one key a line, and from when until when it counts.

    # release key, handed over on paper
    example.com/releases+1a2b3c4d+AbCd...= not-before=2026-01-01 not-after=2027-06-30

Both dates are days in UTC and included; either may be missing.  The file is the site's own, so a
site decides for itself how long a key counts.  Pure, but for `load_trusted_keys`.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from appliance.audit.checkpoint import VerifierKey, parse_verifier_key
from appliance.audit.cosignature import ED25519
from appliance.errors import AuditKeyError, ConfigurationError

FORM = (
    "a line reads `name+hash+base64 not-before=2026-01-01 not-after=2027-12-31`, the dates left out if open"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """A public key and the days on which it counts."""

    verifier_key: VerifierKey
    not_before: date | None = None
    not_after: date | None = None

    @property
    def name(self) -> str:
        """Whom it stands for."""
        return self.verifier_key.name

    def in_force(self, now: float) -> bool:
        """Whether it counts at this time, in seconds since the epoch."""
        day = datetime.fromtimestamp(now, UTC).date()
        return not (
            (self.not_before is not None and day < self.not_before)
            or (self.not_after is not None and day > self.not_after)
        )

    def complaint(self, now: float) -> str:
        """Why it does not count at this time."""
        day = datetime.fromtimestamp(now, UTC).date()
        if self.not_before is not None and day < self.not_before:
            return (
                f"the key {self.name} counts from {self.not_before} on, and today is {day}: check the clock"
            )
        return (
            f"the key {self.name} counted until {self.not_after}, and today is {day}: ask for the same, "
            "signed with a newer key, or extend not-after if the key is still good"
        )


def load_trusted_keys(path: Path) -> tuple[TrustedKey, ...]:
    """
    Read the trusted keys of a site.

    Raises:
        ConfigurationError: the file cannot be read, or names no usable key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the trusted keys {path} ({error}): put the release key there, or name another"
        raise ConfigurationError(message) from error
    try:
        keys = parse_trusted_keys(text)
    except AuditKeyError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not keys:
        raise ConfigurationError(f"{path} names no key: {FORM}")
    return keys


def parse_trusted_keys(text: str) -> tuple[TrustedKey, ...]:
    """
    Read the lines of a file of trusted keys; empty lines and those that begin with `#` are left out.

    Raises:
        AuditKeyError: a line is none of a key.
    """
    lines = [line.strip() for line in text.splitlines()]
    return tuple(_parse_line(line) for line in lines if line and not line.startswith("#"))


def end_of(day: date) -> int:
    """The first second after a day, in seconds since the epoch."""
    return int(
        datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() + timedelta(days=1).total_seconds()
    )


def _parse_line(line: str) -> TrustedKey:
    encoded, *rest = line.split()
    key = parse_verifier_key(encoded)
    if key.kind != ED25519:
        raise AuditKeyError(f"the key {key.name} does not sign bundles: it must be Ed25519 (type 01)")
    days: dict[str, date] = {}
    for word in rest:
        name, _, value = word.partition("=")
        if name not in {"not-before", "not-after"} or name in days:
            raise AuditKeyError(f"{word} stands behind the key {key.name}: {FORM}")
        try:
            days[name] = date.fromisoformat(value)
        except ValueError as error:
            raise AuditKeyError(f"{word} is no date: {FORM}") from error
    return TrustedKey(verifier_key=key, not_before=days.get("not-before"), not_after=days.get("not-after"))
