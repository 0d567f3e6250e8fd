"""
The auditor's verifier: says whether a log, or a receipt, is what the key's owner signed, and whole.

    python -m appliance.audit.verify EXPORT --key KEY [--held CHECKPOINT] [--witness KEY] [--state FILE]
                                          [--timestamp-cert FILE] [--json]
    python -m appliance.audit.verify RECEIPT.tlog-proof --leaf LEAF --key KEY
    python -m appliance.audit.verify --stream FILE --key KEY

It needs Python and `cryptography`, no network and nothing of ours: this file may be copied out and run alone.
It therefore repeats, on purpose, the little hashing and parsing that the writer has too; a mistake there must
not be repeated here, and external vectors pin both.  That is also why it is longer than other files.

The keys must come to the auditor by another way than the export does; every one that is given must have
signed.  A key that was rotated is followed to its successor, which the old key signed for.  Without a
checkpoint that another party held (`--held`) or cosigned (`--witness`), a valid log only shows that its
operator is consistent.

Memory does not grow with the log.  With `--state FILE` a run reads only what is newer than the file
remembers, and shows that the log continues it (sections 5 and 8).

Exit codes: 0 valid, 10 valid with erased payloads or disposed entries, 1 cannot be used (arguments, files),
2 invalid, 3 diverged from what was held, cosigned or verified before, 4 incomplete, 5 not cosigned by as many
witnesses as were asked for, 6 keys acted that no entry created, 7 without the time stamps that were asked
for.  It fails closed: what it cannot read is invalid.
"""

import argparse
import base64
import hashlib
import hmac
import json
import re
import shlex
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from functools import lru_cache, partial
from html import escape
from itertools import chain
from operator import lt
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS, PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512, HashAlgorithm
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID

FORMAT_VERSION = 1
MAX_LEAF_BYTES = 4096
LIMIT = 2**53
"""Integers are smaller, so that every JSON reader has them exactly."""
MAX_FILE_BYTES = 2**25
TILE_WIDTH = 256
HASH_BYTES = 32
ED25519, COSIGNATURE, MLDSA44 = 0x01, 0x04, 0x06
KEY_BYTES = {ED25519: 32, COSIGNATURE: 32, MLDSA44: 1312}
KIND_NAMES = {ED25519: "Ed25519", COSIGNATURE: "Ed25519 cosignature", MLDSA44: "ML-DSA-44"}
TIME_BYTES = 8
TOLERANCE_MS = 300_000
"""Difference between clocks that is not reported."""
LONGEST_NAME = 255
SHOW_SECONDS = 0.5
"""Time between two lines of progress."""
SHOWN = 20
"""Problems and requests that are listed for a person; the rest is counted."""
LISTED = 10_000
"""The same for a program."""

_Thing = TypeVar("_Thing")
_ROTATION = b'"signer.rotated"'
_KEY_ID = re.compile(r"[a-z2-7]{8}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)


class ExitCode(IntEnum):
    VALID = 0
    UNUSABLE = 1
    INVALID = 2
    DIVERGED = 3
    INCOMPLETE = 4
    UNWITNESSED = 5
    UNKNOWN_KEYS = 6
    UNTIMED = 7
    ERASED = 10


MEANINGS = {
    ExitCode.VALID: "valid and complete",
    ExitCode.UNUSABLE: "nothing was verified: arguments or files cannot be used",
    ExitCode.INVALID: "invalid: altered, damaged or not signed with this key",
    ExitCode.DIVERGED: "diverged: not a continuation of what was held, cosigned or verified before",
    ExitCode.INCOMPLETE: "authentic but incomplete: requests without an end, or an admitted gap",
    ExitCode.UNWITNESSED: "authentic, but cosigned by fewer witnesses than were asked for",
    ExitCode.UNKNOWN_KEYS: "authentic, but API keys acted that no entry created",
    ExitCode.UNTIMED: "authentic, but without the time stamps that were asked for",
    ExitCode.ERASED: "valid and complete; payloads were erased or entries disposed of, which entries say",
}


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Audit log: {verdict}</title>
<style>
body {{ font: 15px/1.4 sans-serif; max-width: 60em; margin: 2em auto }}
h1 {{ font-size: 1.4em; padding: .6em; color: white; background: #9a6700 }}
h1.good {{ background: #1a7f37 }} h1.bad {{ background: #b3261e }}
th {{ text-align: left; vertical-align: top; padding-right: 1em; white-space: nowrap }}
td, code {{ font-family: monospace; overflow-wrap: anywhere }}
</style>
<h1 class="{level}">{verdict}</h1>
<table>
{rows}</table>
<p>Made at {time} by <code>verify.py</code>, SHA-256 <code>{digest}</code>, with the arguments
<code>{arguments}</code></p>
</html>
"""


LEVELS = {
    ExitCode.VALID: "good",
    ExitCode.ERASED: "good",
    ExitCode.INVALID: "bad",
    ExitCode.DIVERGED: "bad",
}


class UnusableError(Exception):
    """Arguments or files that cannot be used; nothing was verified."""


class InvalidError(Exception):
    """Evidence that does not hold."""


class _DamagedError(InvalidError):
    """Entries that are not all there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A public key, and the name it signs under: the origin of a log, or a witness."""

    name: str
    kind: int
    material: bytes
    """Type byte and public key."""

    @property
    def key_id(self) -> bytes:
        """Tells, with the name, which key made a signature."""
        return hashlib.sha256(self.name.encode() + b"\n" + self.material).digest()[:4]

    @property
    def line(self) -> str:
        return f"{self.name}+{self.key_id.hex()}+{_show_hash(self.material)}"

    @property
    def short(self) -> str:
        """The key as an entry names it: an ML-DSA-44 key is too long and is named by its hash."""
        if self.kind == MLDSA44:
            digest = hashlib.sha256(self.line.encode()).hexdigest()
            return f"{self.name}+{self.key_id.hex()}+sha256:{digest}"
        return self.line

    def check(self, signature: bytes, message: bytes) -> None:
        """Check a bare signature; raises InvalidError."""
        public_key: Any = Ed25519PublicKey
        if self.kind == MLDSA44:
            public_key = _mldsa()
        try:
            public_key.from_public_bytes(self.material[1:]).verify(signature, message)
        except (InvalidSignature, ValueError) as error:
            raise InvalidError("a signature is wrong") from error

    def check_note(self, signature: bytes, text: str) -> int:
        """Check a signature line's content; return the time it states (0: none); raises InvalidError."""
        if self.kind == ED25519:
            self.check(signature, text.encode())
            return 0
        time = int.from_bytes(signature[:TIME_BYTES])
        message = f"cosignature/v1\ntime {time}\n{text}".encode()
        if self.kind == MLDSA44:
            message = _mldsa_message(self.name, time, text)
        self.check(signature[TIME_BYTES:], message)
        return time


Keys = Key | Sequence[Key]
"""One key, or several that must all have signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnesses:
    """Whose cosignatures are looked for, and how many witnesses must have cosigned."""

    keys: tuple[Key, ...] = ()
    needed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the witnesses; one may have several keys, and then cosigns with all of them."""
        return tuple(dict.fromkeys(key.name for key in self.keys))


NO_WITNESSES = Witnesses()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosigned:
    """What one witness has stated about this log."""

    size: int
    time: int
    """By the witness's clock, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    size: int
    root: bytes


@dataclass(slots=True, kw_only=True)
class Payloads:
    """What the log says about content kept outside the tree, and what was found of it (section 11)."""

    named: int = 0
    """Payloads that entries name."""
    erased_ranges: dict[str, list["ErasedRange"]] = field(default_factory=dict)
    """By tenant, the erasures by time and of everything; without those that a later one includes."""
    held: set[str] = field(default_factory=set)
    """Tenants under a legal hold."""
    checked: int = 0
    """Payloads that are here and have the digest the log names."""
    erased: int = 0
    """Payloads that are gone, and an erasure says so."""
    opened: int = 0
    """Payloads that were decrypted and are what the log commits to."""
    is_looked_at: bool = False
    """Whether the payloads themselves were compared."""
    compared: int = 0
    """Size of the log when its payloads were last compared."""
    compared_before: int = 0
    """Payloads, of those intact or erased, that an earlier run compared and this one did not."""
    ahead: int = 0
    """Payloads of requests with ids of a time after the newest entry: a clock was ahead."""
    last_time: str = ""
    """Of the newest entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedRange:
    """What an erasure by time, or of everything, covers."""

    index: int
    """Of its entry: what later entries name was kept after it."""
    before_id: str
    """Smallest id of a request that it does not cover."""
    before_intent: int
    """Smallest index of an intent that it does not cover."""
    is_exact: bool
    """Whether earlier entries name all that it covers; version 0.1.0 went by time alone."""

    def covers(self, request: str, intent: int) -> bool:
        return request < self.before_id and intent < self.before_intent

    def includes(self, other: "ErasedRange") -> bool:
        """Whether it covers all that an earlier one does."""
        wider = self.before_id >= other.before_id and self.before_intent >= other.before_intent
        return wider and (other.is_exact or not self.is_exact)

    def erases(self, request: str, intent: int, index: int) -> bool:
        """Whether a payload that entry `index` names must be gone."""
        return index < self.index and self.covers(request, intent)

    def explains(self, request: str, intent: int, index: int) -> bool:
        """Whether a payload that entry `index` names may be gone."""
        return self.covers(request, intent) and (index < self.index or not self.is_exact)


@dataclass(slots=True, kw_only=True)
class Report:
    subject: str
    origin: str
    size: int = 0
    root: str = ""
    checkpoint_verified: bool = False
    state: "State" = field(default_factory=lambda: State())  # noqa: PLW0108 - it is defined below
    """What later entries are checked against."""
    verified_before: int = 0
    """Entries that earlier runs verified, which this one did not read."""
    continued: str | None = None
    """What comparing with the state of earlier runs showed, or None without one."""
    entries_by_type: Counter[str] = field(default_factory=Counter)
    created_keys: set[str] = field(default_factory=set)
    """Ids of API keys that `key.created` and `key.rotated` introduced."""
    unknown_keys: dict[str, int] = field(default_factory=dict)
    """Other keys that acted, and the index of the first entry that names them."""
    unrecorded_keys: dict[str, int] = field(default_factory=dict)
    """The same before the first key was introduced: this log may not record keys."""
    missing_entries: int = 0
    """Entries that `audit.gap` admits are missing."""
    erased_payloads: int = 0
    sequences: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By gateway, the newest start and the number of entries of its sequence."""
    payloads: Payloads = field(default_factory=Payloads)
    gone_below: int = 0
    """Entries with a smaller index were disposed of: they are not in the export (section 15)."""
    disposed_below: int = 0
    """The same as the newest entry says, whether or not they are here."""
    disposed_by: int = 0
    """Index of that entry."""
    disposed_at: str = ""
    """Its time."""
    disposed_newest: str = ""
    """Latest time of a disposed entry, as these entries say."""
    kept_entries: int = 0
    """Entries below that are here, because later ones are judged by them."""
    left_entries: int = 0
    """Entries below that are here with their whole bundle: their removal has not ended."""
    rotations: list[str] = field(default_factory=list)
    """Keys that took over from a given one, in order."""
    witnesses: Witnesses = NO_WITNESSES
    cosigned: dict[str, Cosigned] = field(default_factory=dict)
    """By witness, the largest part of this log it has cosigned."""
    timestamps: "Timestamps" = field(default_factory=lambda: Timestamps())  # noqa: PLW0108 - defined below
    first_time: str | None = None
    last_time: str | None = None
    held: str | None = None
    """What comparing with the held checkpoint showed, or None without one."""
    diverged: bool = False
    problems: list[str] = field(default_factory=list)
    """The first problems, `LISTED` at most."""
    unlisted_problems: int = 0

    def add_problem(self, text: str) -> None:
        if len(self.problems) < LISTED:
            self.problems.append(text)
        else:
            self.unlisted_problems += 1

    @property
    def open_requests(self) -> dict[str, int]:
        """Requests with an intent and no end, and the index of the intent; the first, `LISTED` at most."""
        return self.state.open_requests()

    @property
    def gaps(self) -> int:
        return self.entries_by_type["audit.gap"]

    @property
    def witnessed_size(self) -> int:
        """Entries that as many witnesses as needed (at least one) have cosigned."""
        sizes = sorted((cosigned.size for cosigned in self.cosigned.values()), reverse=True)
        needed = max(1, self.witnesses.needed)
        return sizes[needed - 1] if len(sizes) >= needed else 0

    @property
    def exit_code(self) -> ExitCode:
        """The verdict; the gravest finding decides."""
        findings = (
            (self.problems, ExitCode.INVALID),
            (self.diverged, ExitCode.DIVERGED),
            (self.unknown_keys, ExitCode.UNKNOWN_KEYS),
            (len(self.cosigned) < self.witnesses.needed, ExitCode.UNWITNESSED),
            (self.timestamps.are_missing, ExitCode.UNTIMED),
            (self.state.open_count() or self.gaps, ExitCode.INCOMPLETE),
            (self.entries_by_type["erasure"] or self.gone_below, ExitCode.ERASED),
        )
        return next((code for found, code in findings if found), ExitCode.VALID)


# 1. Keys, notes and tree heads: c2sp.org/signed-note, c2sp.org/tlog-checkpoint.


def parse_key(text: str) -> Key:
    """Read a verifier key, `name+hash+base64`; raises UnusableError."""
    name, _, rest = text.strip().partition("+")
    key_hash, _, encoded = rest.partition("+")
    try:
        material = _base64(encoded)
    except InvalidError:
        material = b""
    if not name or not material or len(material) != 1 + KEY_BYTES.get(material[0], -1):
        raise UnusableError("a key must read name+hash+base64 and be of type Ed25519 or ML-DSA-44")
    key = Key(name=name, kind=material[0], material=material)
    if key.key_id.hex() != key_hash:
        raise UnusableError("the key does not match its own hash: it was altered or mistyped")
    if key.kind == MLDSA44:
        _mldsa()
    return key


def parse_keys(text: str) -> tuple[Key, ...]:
    """Read keys, one a line; empty lines and comments (`#`) are skipped; raises UnusableError."""
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(parse_key(line) for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UnusableError("there is no key: a key reads name+hash+base64")
    return keys


def verify_note(note: bytes, keys: Keys) -> Head:
    """Return the tree head in a signed note once every key is seen to have signed; raises InvalidError."""
    text, lines = split_note(note)
    given = (keys,) if isinstance(keys, Key) else keys
    for key in given:
        if not times_signed(text, lines, key):
            raise InvalidError(f"the checkpoint is not signed with this {KIND_NAMES[key.kind]} key")
    head = parse_head(text, {key.name for key in given})
    if not given:
        raise InvalidError("no key was given")
    return head


def split_note(note: bytes) -> tuple[str, list[tuple[str, bytes]]]:
    """Return a signed note's text and its lines as (name, key id and signature); raises InvalidError."""
    try:
        content = note.decode()
    except UnicodeDecodeError as error:
        raise InvalidError("the checkpoint is not text") from error
    text, blank, block = content.rpartition("\n\n")
    if not blank or not block.endswith("\n"):
        raise InvalidError("the checkpoint is no signed note")
    lines = []
    for line in block[:-1].split("\n"):
        dash, name, encoded = (*line.split(" "), "", "")[:3]
        signature = _base64(encoded)
        if dash != "\u2014" or not name or line != f"{dash} {name} {encoded}":
            raise InvalidError("the checkpoint has a malformed signature line")
        lines.append((name, signature))
    return f"{text}\n", lines


def times_signed(text: str, lines: Sequence[tuple[str, bytes]], key: Key) -> list[int]:
    """Return the times the key states in its signatures; all must be right; raises InvalidError."""
    times = []
    for name, signature in lines:
        if (name, signature[:4]) == (key.name, key.key_id):  # others are not known here, and mean nothing
            try:
                times.append(key.check_note(signature[4:], text))
            except InvalidError as error:
                raise InvalidError(f"the checkpoint's signature of {_show(key.name)} is wrong") from error
    return times


def parse_head(text: str, origins: set[str]) -> Head:
    """Return the tree head in the text of a checkpoint of one of these logs; raises InvalidError."""
    lines = text.split("\n")
    if len(lines) != 4 or {lines[0]} != origins or not _DECIMAL.fullmatch(lines[1]):  # noqa: PLR2004
        raise InvalidError("the checkpoint does not name this log, a size and a root")
    return Head(size=int(lines[1]), root=_hash(lines[2]))


def _mldsa() -> Any:  # noqa: ANN401 - the class, where the library has it
    try:
        from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey  # noqa: PLC0415
    except ImportError as error:
        raise UnusableError("this `cryptography` has no ML-DSA-44: install 47 or newer") from error
    return MLDSA44PublicKey


# 2. Witnesses: c2sp.org/tlog-cosignature.


def _mldsa_message(name: str, time: int, text: str) -> bytes:
    """Return what an ML-DSA-44 key signs: a structure that names signer, time, log, size and root."""
    origin = text.partition("\n")[0]
    head = parse_head(text, {origin})
    names = [part.encode() for part in (name, origin)]
    if any(len(part) > LONGEST_NAME for part in names):
        raise InvalidError("a name that is too long to be signed")
    signer, log = (bytes([len(part)]) + part for part in names)
    numbers = (0).to_bytes(8) + head.size.to_bytes(8)
    return b"subtree/v1\n\0" + signer + time.to_bytes(8) + log + numbers + head.root


def see_cosignatures(report: Report, note: bytes) -> Head | None:
    """Record which witnesses cosigned the note; return its head if any did; raises InvalidError."""
    text, lines = split_note(note)
    by_name: dict[str, list[int]] = {}
    for key in report.witnesses.keys:
        times = [time for time in times_signed(text, lines, key) if time]
        by_name.setdefault(key.name, []).append(max(times, default=0))
    if not any(all(times) for times in by_name.values()):
        return None
    head = parse_head(text, {report.origin})
    for name, times in by_name.items():
        known = report.cosigned.get(name)
        if all(times) and (known is None or (known.size, known.time) < (head.size, min(times))):
            report.cosigned[name] = Cosigned(size=head.size, time=min(times))
    return head


# 3. The tree: RFC 6962, section 2.1.


def hash_leaf(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + leaf).digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """A growing tree: `(height, root)` of its perfect subtrees, largest first."""

    def __init__(self) -> None:
        self.size = 0
        self._subtrees: list[tuple[int, bytes]] = []

    def append(self, node: bytes, height: int = 0) -> None:
        """Add a leaf, or a perfect subtree that is no higher than the last one."""
        self.size += 1 << height
        while self._subtrees and self._subtrees[-1][0] == height:
            node = hash_node(self._subtrees.pop()[1], node)
            height += 1
        self._subtrees.append((height, node))

    def root(self) -> bytes:
        if not self._subtrees:
            return hashlib.sha256(b"").digest()
        *rest, (_, node) = self._subtrees
        for _, left in reversed(rest):
            node = hash_node(left, node)
        return node


def root_from_path(
    node: bytes,
    index: int,
    size: int,
    path: Sequence[bytes],
    spans: dict[tuple[int, int], bytes] | None = None,
) -> bytes:
    """
    Return the root that an inclusion path leads to; raises InvalidError when its length is wrong.

    `spans` collects the root of every range of leaves that the path shows.
    """
    if not 0 <= index < size:
        raise InvalidError(f"there is no entry {index} among {size}")
    siblings, last, height = iter(path), size - 1, 0
    shown = {} if spans is None else spans
    shown[index, index + 1] = node
    while last:
        # On the right edge a node may have no sibling; it is then handed up as it is.
        if index & 1 or index < last:
            sibling = next(siblings, None)
            if sibling is None:
                raise InvalidError("the receipt's path is too short")
            start = (index ^ 1) << height
            shown[start, min(start + (1 << height), size)] = sibling
            node = hash_node(sibling, node) if index & 1 else hash_node(node, sibling)
        index, last, height = index >> 1, last >> 1, height + 1
    if next(siblings, None) is not None:
        raise InvalidError("the receipt's path is too long")
    shown[0, size] = node
    return node


def root_from_spans(spans: dict[tuple[int, int], bytes], start: int, end: int) -> bytes | None:
    """Return the root over a range of leaves if ranges that are known add up to it, else None."""
    if (start, end) in spans or end - start <= 1:
        return spans.get((start, end))
    middle = start + (1 << (end - start - 1).bit_length() - 1)
    left, right = root_from_spans(spans, start, middle), root_from_spans(spans, middle, end)
    return hash_node(left, right) if left and right else None


# 4. One leaf: canonical JSON (RFC 8785), flat, without floats.


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no integer")


_decode = json.JSONDecoder(parse_float=_refuse, parse_constant=_refuse).decode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def parse_leaf(leaf: bytes, origin: str) -> dict[str, Any]:
    """Read one leaf of the log `origin`; raises InvalidError."""
    if len(leaf) > MAX_LEAF_BYTES:
        raise InvalidError(f"is {len(leaf)} bytes long")
    try:
        entry = _decode(leaf.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidError("is not JSON of this format") from error
    if not isinstance(entry, dict) or canonical(entry) != leaf:
        raise InvalidError("is not in canonical form")
    _check_envelope(entry, origin)
    return entry


def canonical(entry: dict[str, Any]) -> bytes | None:
    """Return the canonical bytes of an entry, or None when it holds what no entry may hold."""
    if not _are_plain(entry.values(), or_lists=True):
        return None
    try:
        # RFC 8785 orders by UTF-16 code units, Python by code points.
        ordered = dict(sorted(entry.items(), key=lambda member: _utf16(member[0])))
        return _encode(ordered).encode()
    except UnicodeEncodeError:
        return None


def parse_leaves(leaves: Sequence[bytes], origin: str) -> list[dict[str, Any]] | None:
    """
    Read leaves together, several times as fast as one by one; None when one of them may be wrong.

    What is read from all of them at once, and is flat, can only be split where the line ends are: a line
    begins with `{`, which follows a comma only between entries.
    """
    if max(map(len, leaves)) > MAX_LEAF_BYTES or not all(leaf.startswith(b"{") for leaf in leaves):
        return None
    try:
        lines, together = b",\n".join(leaves).decode(), b",".join(leaves).decode()
        entries = _decode(f"[{lines}]")
        if len(entries) != len(leaves) or _encode(entries) != f"[{together}]":
            return None
        for entry in entries:
            if not (_are_plain(entry.values(), or_lists=True) and _is_in_order(tuple(entry))):
                return None
            _check_envelope(entry, origin)
    except (ValueError, RecursionError, AttributeError, InvalidError):
        return None
    return entries  # type: ignore[no-any-return]


def _check_envelope(entry: dict[str, Any], origin: str) -> None:
    if type(entry.get("v")) is not int or entry["v"] != FORMAT_VERSION:
        raise InvalidError(f"is not of format {FORMAT_VERSION}, the one this verifier reads")
    for name in ("log", "id", "type", "time"):
        if not isinstance(entry.get(name), str):
            raise InvalidError("has no log, id, type or time")
    if entry["log"] != origin:
        raise InvalidError(f"belongs to another log, {_show(entry['log'])}")
    if not _TIME.fullmatch(entry["time"]):
        raise InvalidError("has no proper time")


def _are_plain(values: Iterable[Any], *, or_lists: bool = False) -> bool:
    """Whether values are strings, integers below 2^53 or booleans, or else lists of these."""
    for value in values:
        kind = type(value)
        if kind is str or kind is bool or (kind is int and -LIMIT < value < LIMIT):
            continue
        if not (or_lists and kind is list and _are_plain(value)):
            return False
    return True


@lru_cache(maxsize=1024)
def _is_in_order(names: tuple[str, ...]) -> bool:
    keys = [_utf16(name) for name in names]
    return all(map(lt, keys, keys[1:]))


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be")


# 5. What later checks need of earlier entries: in one SQLite file, so that memory does not grow with the log.

STATE_VERSION = 1
REBUILD = "delete it, and the next run verifies the whole log"
STATE_ID = 0x6C6F6773
"""Marks an SQLite file as a state (`application_id`)."""
CACHE_KIB = 2**15
OPEN_IN_MEMORY = 50_000
_TABLES = """
CREATE TABLE log (origin TEXT, size INTEGER, root BLOB, tiles TEXT, findings TEXT);
CREATE TABLE ids (name TEXT PRIMARY KEY, entry INTEGER) WITHOUT ROWID;
CREATE TABLE requests (name TEXT PRIMARY KEY, entry INTEGER) WITHOUT ROWID;
CREATE TABLE open_requests (name TEXT PRIMARY KEY, entry INTEGER) WITHOUT ROWID;
CREATE TABLE rotations (entry INTEGER PRIMARY KEY, leaf BLOB);
CREATE TABLE payloads (
    entry INTEGER PRIMARY KEY, request TEXT, part TEXT, tenant TEXT, intent INTEGER, digest TEXT,
    commitment TEXT, found TEXT, UNIQUE (request, part)
);
CREATE INDEX payloads_intact ON payloads (tenant, request) WHERE found = 'intact';
CREATE TABLE erased_requests (
    tenant TEXT, request TEXT, entry INTEGER, PRIMARY KEY (tenant, request)
) WITHOUT ROWID;
CREATE INDEX erased_requests_by_entry ON erased_requests (entry);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A log as an earlier run verified it."""

    size: int = 0
    root: bytes = b""
    tiles: list[list[bytes]] = field(default_factory=list)
    """Hashes in the newest, partial tile of each level: they determine the root."""
    rotations: list[tuple[int, bytes]] = field(default_factory=list)
    findings: dict[str, Any] = field(default_factory=dict)


class State:
    """
    Names, open requests and payloads of the entries verified so far.

    In the file of `--state`, or else in a temporary file that the operating system removes.  One run is one
    transaction: if it does not end, or finds a problem, the file stays as it was.  The file is as
    trustworthy as the place where its owner keeps it, like a held checkpoint.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.tiles: list[list[bytes]] = []
        self._open: dict[str, int] = {}
        self._database: sqlite3.Connection | None = None

    @property
    def database(self) -> sqlite3.Connection:
        if self._database is None:
            # SQLite keeps a database without a name in its cache and, beyond that, in a temporary file.
            self._database = sqlite3.connect(self.path or "", isolation_level=None)
            self._database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            if self.path is None:
                self._database.execute("PRAGMA journal_mode = OFF")
            self._database.execute("BEGIN IMMEDIATE")
            self._prepare(self._database)
        return self._database

    def _prepare(self, database: sqlite3.Connection) -> None:
        (found,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (found, version, tables) == (0, 0, 0):
            for statement in _TABLES.split(";"):
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {STATE_ID}")
            database.execute(f"PRAGMA user_version = {STATE_VERSION}")
        elif found != STATE_ID:
            raise UnusableError(f"{self.path} is another program's file, not the state of a verification")
        elif version != STATE_VERSION:
            raise UnusableError(f"{self.path} is of another version of this verifier: {REBUILD}")

    def remembered(self, origin: str) -> Remembered:
        """Return the log as it was verified before; raises UnusableError if that was another log."""
        row = self.database.execute("SELECT * FROM log").fetchone()
        if row is None:
            return Remembered()
        if row[0] != origin:
            raise UnusableError(f"{self.path} is the state of another log, {_show(row[0])}")
        try:
            return Remembered(
                size=row[1],
                root=row[2],
                tiles=[[_hash(node) for node in level] for level in json.loads(row[3])],
                rotations=self.database.execute("SELECT * FROM rotations ORDER BY entry").fetchall(),
                findings=json.loads(row[4]),
            )
        except (ValueError, TypeError, InvalidError) as error:
            raise UnusableError(f"{self.path} is damaged: {REBUILD}") from error

    def save(self, report: Report) -> bool:
        """Remember a log that verified without a problem; return whether it did."""
        if report.problems or report.diverged:
            return False
        self._spill()
        tiles = [[_show_hash(node) for node in level] for level in self.tiles]
        row = (
            report.origin,
            report.size,
            base64.b64decode(report.root),
            *map(json.dumps, (tiles, findings(report))),
        )
        self.database.execute("DELETE FROM log")
        self.database.execute("INSERT INTO log VALUES (?, ?, ?, ?, ?)", row)
        self.database.execute("COMMIT")
        return True

    def forget(self) -> None:
        """Begin again: what was disposed of since cannot be made up for."""
        for (table,) in self.database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ).fetchall():
            self.database.execute(f"DELETE FROM {table}")  # noqa: S608 - names of ours

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def add(self, table: str, names: list[tuple[str, int]]) -> set[int]:
        """Remember names and the entries that have them; return the entries with an earlier one's name."""
        insert = f"INSERT OR IGNORE INTO {table} VALUES (?, ?)"  # noqa: S608 - a constant
        if not names or self.database.executemany(insert, names).rowcount == len(names):
            return set()
        return {entry for name, entry in names if self._entry(table, name) != entry}

    def _entry(self, table: str, name: str) -> int | None:
        query = f"SELECT entry FROM {table} WHERE name = ?"  # noqa: S608 - a constant
        row = self.database.execute(query, (name,)).fetchone()
        return row[0] if row else None

    def open(self, request: str, entry: int) -> None:
        self._open[request] = entry
        if len(self._open) > OPEN_IN_MEMORY:
            self._spill()

    def end(self, request: str) -> None:
        """End a request; raises InvalidError if it is not open."""
        if self._open.pop(request, None) is not None:
            return
        if not self.database.execute("DELETE FROM open_requests WHERE name = ?", (request,)).rowcount:
            again = self._entry("requests", request) is not None
            raise InvalidError(
                f"ends request {request}{' a second time' if again else ', which never began'}"
            )

    def open_requests(self) -> dict[str, int]:
        self._spill()
        rows = self.database.execute("SELECT * FROM open_requests ORDER BY entry LIMIT ?", (LISTED,))
        return dict(rows.fetchall())

    def open_count(self) -> int:
        (count,) = self.database.execute("SELECT count(*) FROM open_requests").fetchone()
        return int(count) + len(self._open)

    def _spill(self) -> None:
        self.database.executemany("INSERT INTO open_requests VALUES (?, ?)", self._open.items())
        self._open.clear()


_FINDINGS = (
    *("entries_by_type", "created_keys", "unknown_keys", "unrecorded_keys", "missing_entries"),
    *("erased_payloads", "sequences", "first_time", "last_time"),
    *("disposed_below", "disposed_by", "disposed_at", "disposed_newest"),
)
_PAYLOAD_FINDINGS = ("named", "held", "checked", "erased", "compared", "last_time")


def findings(report: Report) -> dict[str, Any]:
    """Return what a later run reports of these entries, as JSON can hold it."""

    def plain(value: Any) -> Any:  # noqa: ANN401
        return sorted(value) if isinstance(value, set) else value

    payloads = report.payloads
    return {
        "report": {name: plain(getattr(report, name)) for name in _FINDINGS},
        "payloads": {name: plain(getattr(payloads, name)) for name in _PAYLOAD_FINDINGS},
        "erased_ranges": {
            tenant: [asdict(each) for each in ranges] for tenant, ranges in payloads.erased_ranges.items()
        },
    }


def resume(report: Report, state: State, before: Remembered) -> None:
    """Begin with what an earlier run found, if there was one."""
    report.state, kept = state, before.findings
    if not kept:
        return
    for target, part in (report, "report"), (report.payloads, "payloads"):
        for name, value in kept[part].items():
            kind = type(getattr(target, name))
            setattr(target, name, kind(value) if kind in {Counter, set} else value)
    report.payloads.erased_ranges = {
        tenant: [ErasedRange(**each) for each in ranges] for tenant, ranges in kept["erased_ranges"].items()
    }
    report.verified_before = before.size


# 6. Entries in order: ids are used once, requests begin once and end once, keys act after their creation.


class EntryCheck:
    """Follows entries in order."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def see(self, start: int, leaves: Sequence[bytes]) -> None:
        """Judge leaves, the first of which is entry `start`, given everything before them."""
        report, problems = self._report, dict[int, str]()
        entries = self._read(start, leaves, problems)
        if entries:
            self._follow(entries, problems)
        for index in sorted(problems):
            report.add_problem(f"entry {index} {problems[index]}")

    def _read(
        self, start: int, leaves: Sequence[bytes], problems: dict[int, str]
    ) -> list[tuple[int, dict[str, Any]]]:
        origin = self._report.origin
        entries = parse_leaves(leaves, origin)
        if entries is not None:
            return list(enumerate(entries, start))
        read = []
        for index, leaf in enumerate(leaves, start):
            try:
                read.append((index, parse_leaf(leaf, origin)))
            except InvalidError as error:
                problems[index] = str(error)
        return read

    def _follow(self, entries: list[tuple[int, dict[str, Any]]], problems: dict[int, str]) -> None:
        report, state = self._report, self._report.state
        report.entries_by_type.update([entry["type"] for _, entry in entries])
        times = [entry["time"] for _, entry in entries]
        report.first_time = min(report.first_time or times[0], *times)
        report.last_time = max(report.last_time or times[0], *times)
        used = state.add("ids", [(entry["id"], index) for index, entry in entries])
        again = state.add(
            "requests",
            [
                (entry["request_id"], index)
                for index, entry in entries
                if entry["type"] == "request.intent"
                and index not in used
                and type(entry.get("request_id")) is str
            ],
        )
        for index, entry in entries:
            if index in used:
                problems[index] = "has an id that was used before"
                continue
            report.payloads.last_time = entry["time"]
            try:
                self._see(index, entry, again)
                see_keys(report, index, entry)
                see_place(report, index, entry)
            except InvalidError as error:
                problems[index] = str(error)

    def _see(self, index: int, entry: dict[str, Any], again: set[int]) -> None:
        report, state = self._report, self._report.state
        match entry["type"]:
            case "request.intent":
                request = _text(entry, "request_id")
                if index in again:
                    raise InvalidError(f"begins request {request} a second time")
                state.open(request, index)
                see_payload(report, index, entry)
            case "request.outcome" | "request.aborted":
                state.end(_text(entry, "request_id"))
                see_payload(report, index, entry)
            case "audit.gap":
                report.missing_entries += _number(entry, "entries")
            case "erasure":
                report.erased_payloads += _number(entry, "payloads")
                see_payload(report, index, entry)
            case "hold.placed" | "hold.released":
                see_payload(report, index, entry)
            case "audit.disposed":
                see_disposal(report, index, entry)
            case "signer.rotated":
                state.database.execute("INSERT INTO rotations VALUES (?, ?)", (index, canonical(entry)))


def see_keys(report: Report, index: int, entry: dict[str, Any]) -> None:
    """Follow which API keys entries introduce, and which act; tokens, certificates and commands have none."""
    named = [str(entry.get("actor", "")).removeprefix("console:")]
    if entry["type"] in {"key.created", "key.rotated"}:
        report.created_keys.add(_text(entry, "key_id"))
    elif entry["type"] != "key.revoked":
        named.append(str(entry.get("key_id", "")))
    for key in named:
        if key and key not in report.created_keys and _KEY_ID.fullmatch(key):
            found = report.unknown_keys if report.created_keys else report.unrecorded_keys
            found.setdefault(key, index)


# 7. Rotation of the signing key.


def follow_rotations(
    directory: Path, note: bytes, keys: Keys, report: Report, before: Remembered
) -> list[Key]:
    """
    Return the keys that must have signed now, given the ones that were trusted first.

    Each rotation carries a signature of the key that goes, so it is believed before the log is.
    Raises InvalidError when that signature is wrong; UnusableError when the new key is not to be had.
    """
    current = [keys] if isinstance(keys, Key) else list(keys)
    try:
        size = parse_head(split_note(note)[0], {report.origin}).size
        kept = [(index, leaf) for index, leaf in before.rotations if index < size]
        for index, leaf in chain(kept, _rotations(directory, size, before.size, report.gone_below)):
            current = _rotated(directory, index, leaf, current, report)
    except _DamagedError:
        pass  # missing entries are found, and named, when the log is checked
    return list(dict.fromkeys(current))


def _rotations(directory: Path, size: int, known: int, below: int) -> Iterator[tuple[int, bytes]]:
    for index, content in kept_entries(directory, below):
        if index >= known and _ROTATION in content:
            yield index, content[PATH_BYTES:]
    known = max(known, below)
    for number in range(known // TILE_WIDTH, -(-size // TILE_WIDTH)):
        if _ROTATION in read_bundle(directory, number, size):
            for index, leaf in enumerate(split_bundle(directory, number, size), number * TILE_WIDTH):
                if index >= known and _ROTATION in leaf:
                    yield index, leaf


def _rotated(directory: Path, index: int, leaf: bytes, keys: list[Key], report: Report) -> list[Key]:
    try:
        entry = parse_leaf(leaf, report.origin)
    except InvalidError:
        return keys
    old = next((key for key in keys if key.short == entry.get("previous_key")), None)
    if entry["type"] != "signer.rotated" or old is None:
        return keys
    successor, signature = _text(entry, "key"), _base64(_text(entry, "signature"))
    try:
        old.check(signature, rotation_message(report.origin, old.short, successor))
    except InvalidError as error:
        raise InvalidError(f"entry {index} names a new signing key without the old key's consent") from error
    new = _find_key(directory, successor, keys)
    if (new.name, new.kind) != (old.name, old.kind):
        raise InvalidError(f"entry {index} hands over to a key of another kind")
    report.rotations.append(f"{new.name}+{new.key_id.hex()}, named by entry {index}")
    return [new if key == old else key for key in keys]


def rotation_message(origin: str, previous: str, successor: str) -> bytes:
    """Return what the old key signs; no checkpoint can read like this, having a number in line two."""
    return f"signer.rotated/v1\n{origin}\n{previous}\n{successor}\n".encode()


def _find_key(directory: Path, short: str, given: Sequence[Key]) -> Key:
    """Return the key an entry names; a long one comes from elsewhere and is recognised by its hash."""
    if "+sha256:" not in short:
        return parse_key(short)
    found = parse_keys(_read(directory / "vkey").decode(errors="replace"))
    match = next((key for key in (*given, *found) if key.short == short), None)
    if match is None:
        raise UnusableError(f"{_show(short)} took over, and is not in the export's `vkey`: give it as --key")
    return match


# 8. Exports: c2sp.org/tlog-tiles.


class Tiles:
    """The hash tiles of the leaves that were read; those of the export must be the same."""

    def __init__(self, directory: Path, report: Report, before: Remembered) -> None:
        self._directory = directory
        self._report = report
        self.levels = [list(nodes) for nodes in before.tiles]
        """The newest tile of each level: partial."""
        self._numbers = [before.size >> 8 * (level + 1) for level in range(len(self.levels))]
        """How many full tiles each level has."""
        if self.levels:
            self.levels[0].clear()  # its leaves are read again

    def append(self, nodes: Sequence[bytes], level: int = 0) -> None:
        """Add hashes of a level, within one tile; a full tile becomes one hash of the level above."""
        if level == len(self.levels):
            self.levels.append([])
            self._numbers.append(0)
        tile = self.levels[level]
        tile += nodes
        if len(tile) == TILE_WIDTH:
            self._compare(level)
            root = tile_root(tile)
            tile.clear()
            self._numbers[level] += 1
            self.append([root], level + 1)

    def finish(self) -> bytes:
        """Compare the partial tiles at the right edge; return the root."""
        for level, nodes in enumerate(self.levels):
            if nodes:
                self._compare(level)
        return root_from_tiles(self.levels)

    def root_at(self, size: int) -> bytes:
        """Return the root that the log had when it was smaller; raises InvalidError if tiles do not match."""
        return root_from_tiles(edge(size, self._tile))

    def node(self, level: int, number: int) -> bytes:
        """Return one hash of the tree; raises InvalidError if tiles do not match."""
        return self._tile(level, number // TILE_WIDTH)[number % TILE_WIDTH]

    def _tile(self, level: int, number: int) -> list[bytes]:
        if number == self._numbers[level]:
            return self.levels[level]
        nodes = read_tile(self._directory, level, number, TILE_WIDTH)
        parent = self._tile(level + 1, number // TILE_WIDTH)
        if len(nodes) != TILE_WIDTH or tile_root(nodes) != parent[number % TILE_WIDTH]:
            raise InvalidError(f"{tile_path(str(level), number, TILE_WIDTH)} does not match the tree")
        return nodes

    def _compare(self, level: int) -> None:
        nodes, number = self.levels[level], self._numbers[level]
        path = tile_path(str(level), number, len(nodes))
        try:
            content = _read(self._directory / path)
        except UnusableError:
            self._report.add_problem(f"{path} is missing")
            return
        if content != b"".join(nodes):
            stored = _hashes(content)
            wrong = next((at for at, node in enumerate(nodes) if stored[at : at + 1] != [node]), len(nodes))
            what = f"hash {number * TILE_WIDTH + wrong}" if level else f"entry {number * TILE_WIDTH + wrong}"
            self._report.add_problem(f"{what} does not match {path}")


def edge(size: int, tile: Callable[[int, int], list[bytes]]) -> list[list[bytes]]:
    """Return the hashes in the partial tiles of a log of some size; `tile` reads one by level and number."""
    levels: list[list[bytes]] = []
    while size:
        size, width = divmod(size, TILE_WIDTH)
        levels.append(tile(len(levels), size)[:width] if width else [])
    return levels


def root_from_tiles(levels: Sequence[Sequence[bytes]]) -> bytes:
    tree = Tree()
    for level in reversed(range(len(levels))):
        for node in levels[level]:
            tree.append(node, 8 * level)
    return tree.root()


def tile_root(nodes: Sequence[bytes]) -> bytes:
    """Return the root of a full tile."""
    while len(nodes) > 1:
        nodes = list(map(hash_node, nodes[::2], nodes[1::2]))
    return nodes[0]


def read_tile(directory: Path, level: int, number: int, width: int) -> list[bytes]:
    """Return the hashes in a tile of the export, whatever they are; raises InvalidError if it is missing."""
    path = tile_path(str(level), number, width)
    try:
        return _hashes(_read(directory / path))
    except UnusableError as error:
        raise InvalidError(f"{path} is missing") from error


def stored_tile(directory: Path, size: int) -> Callable[[int, int], list[bytes]]:
    """Return what reads a tile, by level and number, from the export of a log of some size."""

    def tile(level: int, number: int) -> list[bytes]:
        there = (size >> 8 * level) - number * TILE_WIDTH
        return read_tile(directory, level, number, min(there, TILE_WIDTH))

    return tile


def _hashes(content: bytes) -> list[bytes]:
    return [content[at : at + HASH_BYTES] for at in range(0, len(content), HASH_BYTES)]


def tile_path(level: str, number: int, width: int) -> str:
    parts = [f"{number % 1000:03d}"]
    while number := number // 1000:
        parts.insert(0, f"x{number % 1000:03d}")
    return f"tile/{level}/{'/'.join(parts)}" + ("" if width == TILE_WIDTH else f".p/{width}")


def verify_export(
    directory: Path,
    keys: Keys,
    held: Head | None,
    witnesses: Witnesses = NO_WITNESSES,
    state: State | None = None,
    timestamps: "Timestamps | None" = None,
) -> Report:
    """Check a whole log, or what is newer than the state; raises UnusableError if it is no export."""
    report = Report(subject="export", origin=_origin(keys), witnesses=witnesses)
    report.timestamps = timestamps or report.timestamps
    note = _read(directory / "checkpoint")
    before, seen = state.remembered(report.origin) if state else Remembered(), ""
    try:
        report.gone_below = read_disposal(directory, note, report.origin)
        head = verify_note(note, follow_rotations(directory, note, keys, report, before))
        report.checkpoint_verified, report.size, report.root = True, head.size, _show_hash(head.root)
        cosigned = _cosigned_heads(directory, note, report)
        compare_remembered(directory, report, before, head)
        if report.diverged:
            before = Remembered()  # the state is of another log than this one, which is read alone
        elif state:
            if before.size < report.gone_below:
                seen = before.findings.get("report", {}).get("last_time") or ""
                state.forget()
                before = Remembered()
            resume(report, state, before)
        tiles = check_entries(directory, report, skip_disposed(directory, report, before, head), head)
        check_disposed(directory, report, tiles, seen)
        if held and held.size % TILE_WIDTH and held.size < report.gone_below:
            report.held = f"of {held.size} entries, the newest of which were disposed of: not comparable"
        elif held:
            compare_held(report, held, tiles.root_at(held.size) if held.size <= head.size else None)
        for other in cosigned:
            if other.size > head.size or tiles.root_at(other.size) != other.root:
                report.diverged = True
                report.cosigned.clear()
                report.held = f"a witness cosigned another log of {other.size} entries than this one"
        check_timestamps(report, directory, tiles)
    except InvalidError as error:
        report.add_problem(str(error))
    return report


def check_entries(directory: Path, report: Report, before: Remembered, head: Head) -> Tiles:
    """Check the entries that are newer than those verified before, and that both have the signed root."""
    entries, tiles = EntryCheck(report), Tiles(directory, report, before)
    bundles = range(before.size // TILE_WIDTH, -(-head.size // TILE_WIDTH))
    for number in _watched(bundles, len(bundles), "bundles of entries"):
        start, leaves = number * TILE_WIDTH, split_bundle(directory, number, head.size)
        new = max(0, before.size - start)
        if new < len(leaves):
            entries.see(start + new, leaves[new:])
        tiles.append([hash_leaf(leaf) for leaf in leaves])
    report.state.tiles = tiles.levels
    if tiles.finish() != head.root:
        report.add_problem("the entries are not the ones that were signed: the root differs")
    count_ahead(report)
    return tiles


def compare_remembered(directory: Path, report: Report, before: Remembered, head: Head) -> None:
    """
    Say whether the log continues the one of the state, by the tiles that both must have.

    That the tiles of the export are those of its root shows later, when new leaves lead from them to it.
    """
    if not before.size:
        return
    if head.size < before.size:
        report.diverged = True
        report.continued = f"{before.size} entries were verified before, {head.size} are here"
    elif before.size < report.gone_below:
        compare_disposed(directory, report, before, head)
    elif edge(before.size, stored_tile(directory, head.size)) != before.tiles or (
        head.size == before.size and head.root != before.root
    ):
        report.diverged = True
        report.continued = f"the first {before.size} entries are not those that were verified before"
    else:
        report.continued = f"the first {before.size} entries, not read again: the log continues them"


def _cosigned_heads(directory: Path, note: bytes, report: Report) -> list[Head]:
    """Return the heads that witnesses cosigned: the export's own, and those kept with it."""
    kept = sorted((directory / "witnessed").glob("*")) if report.witnesses.keys else []
    heads = [see_cosignatures(report, other) for other in (note, *map(_read, kept))]
    return [head for head in heads if head]


def compare_held(report: Report, held: Head, root: bytes | None) -> None:
    """Say whether the log continues the tree head the auditor held; `root` is what it had at that size."""
    if held.size > report.size:
        report.diverged = True
        report.held = f"{held.size} entries were signed before, {report.size} are here"
    elif root != held.root:
        report.diverged = True
        report.held = f"the first {held.size} entries are not those of the held checkpoint"
    else:
        report.held = f"continues the held checkpoint of {held.size} entries"


def read_leaves(directory: Path, size: int) -> Iterator[bytes]:
    """Yield the leaves of an export in order; raises InvalidError when they are not all there."""
    for number in range(-(-size // TILE_WIDTH)):
        yield from split_bundle(directory, number, size)


def read_bundle(directory: Path, number: int, size: int) -> bytes:
    """Return the entry bundle `number` of a log of `size` entries; raises InvalidError if it is missing."""
    start = number * TILE_WIDTH
    path = tile_path("entries", number, min(TILE_WIDTH, size - start))
    try:
        return _read(directory / path)
    except UnusableError as error:
        raise _DamagedError(f"{path} is missing, so entries from {start} on are") from error


def split_bundle(directory: Path, number: int, size: int) -> list[bytes]:
    """Return the leaves in a bundle; raises InvalidError when they are not all there."""
    content, start = read_bundle(directory, number, size), number * TILE_WIDTH
    width, leaves, at = min(TILE_WIDTH, size - start), list[bytes](), 0
    path = tile_path("entries", number, width)
    for index in range(start, start + width):
        end = at + 2 + int.from_bytes(content[at : at + 2])
        if at + 2 > len(content) or end > len(content):
            raise _DamagedError(f"{path} ends before entry {index}")
        leaves.append(content[at + 2 : end])
        at = end
    if at != len(content):
        raise _DamagedError(f"{path} holds more than its {width} entries")
    return leaves


# 9. Receipts: c2sp.org/tlog-proof.


def verify_receipt(
    text: bytes, leaf: bytes, keys: Keys, held: Head | None, witnesses: Witnesses = NO_WITNESSES
) -> Report:
    """Check that a receipt shows one leaf to be in the signed log."""
    report = Report(subject="receipt", origin=_origin(keys), witnesses=witnesses)
    spans: dict[tuple[int, int], bytes] = {}
    try:
        _check_receipt(report, text, leaf, keys, spans)
    except InvalidError as error:
        report.problems.append(str(error))
        return report
    if held is None:
        return report
    root = root_from_spans(spans, 0, held.size) if 0 < held.size <= report.size else None
    if root:
        compare_held(report, held, root)
    else:
        report.held = "of another size, which this receipt cannot show; an export can"
    return report


def _check_receipt(
    report: Report, text: bytes, leaf: bytes, keys: Keys, spans: dict[tuple[int, int], bytes]
) -> None:
    content, blank, note = text.partition(b"\n\n")
    header, *lines = content.decode(errors="replace").split("\n")
    if lines and lines[0].startswith("extra "):
        del lines[0]  # not signed, so it means nothing
    word, _, number = lines[0].partition(" ") if lines else ("", "", "")
    if (header, word) != ("c2sp.org/tlog-proof@v1", "index") or not blank or not _DECIMAL.fullmatch(number):
        raise InvalidError("the receipt is no c2sp.org/tlog-proof@v1")
    head = verify_note(note, keys)
    report.checkpoint_verified, report.size, report.root = True, head.size, _show_hash(head.root)
    path = [_hash(line) for line in lines[1:]]
    if root_from_path(hash_leaf(leaf), int(number), head.size, path, spans) != head.root:
        raise InvalidError(f"the leaf is not entry {number} of the signed log")
    see_cosignatures(report, note)
    entry = parse_leaf(leaf, report.origin)
    report.entries_by_type[entry["type"]] += 1
    report.first_time = report.last_time = entry["time"]


def _origin(keys: Keys) -> str:
    names = {key.name for key in ((keys,) if isinstance(keys, Key) else keys)}
    if len(names) != 1:
        raise UnusableError("the keys must be of one log: they do not have one name")
    return names.pop()


# 10. The command line.  (Sections 11 to 15: kept content, time stamps, streams, sequences, disposed entries.)


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify what the command line names, report on standard output, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.stream:
            return _main_of_stream(options)
        with closing(State(options.state)) as state:
            report = _verify(options, state)
            text = render_json(report) if options.json else render(report)
            if options.html:
                _write(options.html, render_page(report, sys.argv[1:] if arguments is None else arguments))
            code = report.exit_code
            if options.state:
                state.save(report)
    except (UnusableError, sqlite3.Error) as error:
        where = f"{options.state or 'the temporary file'}: " if isinstance(error, sqlite3.Error) else ""
        sys.stderr.write(f"verify: {where}{error}\n")
        return ExitCode.UNUSABLE
    sys.stdout.write(text)
    return code


def render(report: Report) -> str:
    """Return the report for a person to read."""
    return "".join(f"{name:<20} {value}\n" for name, value in _report_lines(report))


def render_page(report: Report, arguments: Sequence[str]) -> str:
    """Return the report as a page to file: it also says by which program, when and with what it was made."""
    *rows, (_, verdict) = _report_lines(report)
    table = "".join(f"<tr><th>{escape(name)}<td>{escape(value)}\n" for name, value in rows)
    return PAGE.format(
        level=LEVELS.get(report.exit_code, "doubt"),
        verdict=escape(verdict),
        rows=table,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        digest=hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        arguments=escape(shlex.join(arguments)),
    )


def _report_lines(report: Report) -> list[tuple[str, str]]:
    count = report.state.open_count()
    lines = [
        ("log", _show(report.origin)),
        ("checkpoint", "signature verified" if report.checkpoint_verified else "NOT verified"),
        ("size", f"{report.size} entries"),
        ("root", report.root),
        ("time", f"{report.first_time} to {report.last_time}" if report.first_time else "no entries"),
        *((_show(name), str(number)) for name, number in sorted(report.entries_by_type.items())),
        *(("rotated to", _show(key)) for key in report.rotations),
        *([("state", report.continued)] if report.continued else []),
        ("held", report.held or "nothing held: no older head was compared"),
        ("witnesses", _witness_line(report)),
        *(
            ("", f"{_show(name)}, the first {seen.size} entries at {_show_time(seen.time)}")
            for name, seen in report.cosigned.items()
        ),
        *(("time stamps", line) for line in _timestamp_lines(report)),
        ("open", f"{count} requests without an end" if count else "no request without an end"),
        *(
            ("", f"{_show(name)}, begun by entry {at}")
            for name, at in [*report.open_requests.items()][:SHOWN]
        ),
    ]
    lines += [
        ("UNKNOWN KEY", f"{_show(key)}, which no entry created, acts in entry {at}")
        for key, at in [*report.unknown_keys.items()][:SHOWN]
    ]
    if report.unrecorded_keys:
        lines.append(
            ("keys", f"{len(report.unrecorded_keys)} acted before the first one that an entry created")
        )
    if report.gaps:
        lines.append(("gaps", f"{report.gaps}, admitting {report.missing_entries} missing entries"))
    if report.entries_by_type["erasure"]:
        lines.append(("erased", f"{report.erased_payloads} payloads"))
    lines += [("payloads", line) for line in _payload_lines(report)]
    lines += [("disposed", line) for line in _disposal_lines(report)]
    lines += [("PROBLEM", _show(problem)) for problem in report.problems[:SHOWN]]
    more = len(report.problems) + report.unlisted_problems - SHOWN
    if more > 0:
        lines.append(("PROBLEM", f"and {more} more"))
    lines.append(("verdict", f"{MEANINGS[report.exit_code]} (exit code {report.exit_code})"))
    return lines


def _witness_line(report: Report) -> str:
    if not report.witnesses.keys:
        return "none named: only the operator's consistency was checked"
    count = f"{len(report.cosigned)} of {len(report.witnesses.names)} cosigned"
    newer = f", {report.size - report.witnessed_size} newer entries not" if report.cosigned else ""
    return f"{count}{newer} ({report.witnesses.needed} needed)"


def render_json(report: Report) -> str:
    """Return the report for a program to read."""
    content = {
        "verdict": report.exit_code.name.lower(),
        "exit_code": int(report.exit_code),
        "subject": report.subject,
        "log": report.origin,
        "size": report.size,
        "root": report.root,
        "checkpoint_verified": report.checkpoint_verified,
        "entries_by_type": dict(sorted(report.entries_by_type.items())),
        "verified_before": report.verified_before,
        "state": report.continued,
        "open_requests": list(report.open_requests),
        "open_request_count": report.state.open_count(),
        "unknown_keys": list(report.unknown_keys),
        "unrecorded_keys": list(report.unrecorded_keys),
        "aborted_requests": report.entries_by_type["request.aborted"],
        "gaps": report.gaps,
        "missing_entries": report.missing_entries,
        "erased_payloads": report.erased_payloads,
        "payloads": {
            "named": report.payloads.named,
            "compared": report.payloads.is_looked_at,
            "intact": report.payloads.checked,
            "erased": report.payloads.erased,
            "compared_before": report.payloads.compared_before,
            "opened": report.payloads.opened,
            "ahead": report.payloads.ahead,
            "held_tenants": sorted(report.payloads.held),
        },
        "disposed": {
            "below": report.disposed_below,
            "by_entry": report.disposed_by,
            "time": report.disposed_at,
            "gone_below": report.gone_below,
            "kept": report.kept_entries,
            "left": report.left_entries,
        },
        "first_time": report.first_time,
        "last_time": report.last_time,
        "held": report.held,
        "rotations": report.rotations,
        "witnesses": {
            name: {"size": seen.size, "time": _show_time(seen.time)} for name, seen in report.cosigned.items()
        },
        "witnesses_named": len(report.witnesses.names),
        "witnesses_needed": report.witnesses.needed,
        "witnessed_size": report.witnessed_size,
        "timestamps": _timestamps_json(report),
        "problems": report.problems,
        "problem_count": len(report.problems) + report.unlisted_problems,
    }
    return json.dumps(content, indent=2) + "\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with our own code: argparse would leave with 2, which means invalid here."""
        self.print_usage(sys.stderr)
        self.exit(ExitCode.UNUSABLE, f"verify: {message}\n")


def _parser() -> argparse.ArgumentParser:
    codes = ", ".join(f"{code.value} {meaning}" for code, meaning in MEANINGS.items())
    parser = _Parser(prog="verify", description="Verify an exported audit log or one receipt.", epilog=codes)
    parser.add_argument("path", type=Path, help="directory of an export, a .tlog-proof file or a stream")
    parser.add_argument(
        "--key", required=True, action="append", help="verifier key, or a file with one or more; repeatable"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="PATH is what a SIEM stored of the log, an event a line",
    )
    parser.add_argument("--leaf", type=Path, help="the leaf a receipt is for")
    parser.add_argument("--held", type=Path, help="checkpoint kept from earlier, to compare with")
    parser.add_argument(
        "--witness", action="append", default=[], help="witness's key, or a file with its keys; repeatable"
    )
    parser.add_argument(
        "--witnesses-needed", type=int, metavar="N", help="how many must have cosigned; default: all named"
    )
    parser.add_argument(
        "--timestamp-cert",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="certificate of a time-stamp authority, or of who issued it (PEM); repeatable",
    )
    parser.add_argument("--timestamp-policy", metavar="OID", help="policy of the time stamps that count")
    parser.add_argument(
        "--timestamps-needed",
        type=int,
        metavar="N",
        help="how many there must be; default: 1 with a certificate",
    )
    parser.add_argument("--payload-keys", type=Path, help="data keys (JSON): open the payloads they are of")
    parser.add_argument("--no-payloads", action="store_true", help="kept content is not in this export")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="verify only what is newer than this file remembers, once the log is shown to continue it; a log"
        " without a problem is remembered in it. Payloads that were compared before are not compared again,"
        " unless a newer entry erases them or --payload-keys has their keys",
    )
    parser.add_argument(
        "--all-payloads", action="store_true", help="with --state: compare all payloads again"
    )
    parser.add_argument("--json", action="store_true", help="report as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the report as a page, to file it"
    )
    return parser


def _verify(options: argparse.Namespace, state: State) -> Report:
    keys = [key for text in options.key for key in _keys(text)]
    witnesses, timestamps = _witnesses(options), _read_timestamps(options)
    held = None
    if options.held:
        try:
            held = _held(_read(options.held), keys)
        except InvalidError as error:
            raise UnusableError(f"the held checkpoint cannot be used: {error}") from error
    if options.path.is_dir():
        report = verify_export(options.path, keys, held, witnesses, state, timestamps)
        if not options.no_payloads:
            data_keys = read_data_keys(options.payload_keys) if options.payload_keys else {}
            check_payloads(report, options.path, data_keys, again=options.all_payloads)
        return report
    if options.state:
        raise UnusableError("a receipt has no state: --state is for exports")
    if options.leaf is None:
        raise UnusableError("a receipt is verified together with its leaf: give --leaf")
    return verify_receipt(_read(options.path), _read(options.leaf), keys, held, witnesses)


def _keys(text: str) -> tuple[Key, ...]:
    """Read keys given as text or as the name of a file."""
    try:
        return parse_keys(text if "+" in text else _read(Path(text)).decode())
    except UnicodeDecodeError as error:
        raise UnusableError(f"{text} holds no verifier key") from error


def _witnesses(options: argparse.Namespace) -> Witnesses:
    keys = tuple(key for text in options.witness for key in _keys(text))
    if any(key.kind == ED25519 for key in keys):
        raise UnusableError("a witness's key must be of a cosignature type (04 or 06), not of type 01")
    named = Witnesses(keys=keys)
    needed = len(named.names) if options.witnesses_needed is None else options.witnesses_needed
    if not 0 <= needed <= len(named.names):
        raise UnusableError(f"{needed} witnesses cannot be needed of the {len(named.names)} that are named")
    return Witnesses(keys=keys, needed=needed)


def _held(note: bytes, keys: Sequence[Key]) -> Head:
    """Return a head the auditor kept: one key suffices, others may have come or gone since."""
    text, lines = split_note(note)
    signed = [key for key in keys if times_signed(text, lines, key)]
    return verify_note(note, signed or keys)


def _watched(
    things: Iterable[_Thing], total: int, name: str, size_of: Callable[[_Thing], int] = lambda _: 1
) -> Iterator[_Thing]:
    """Yield what is passed; a terminal on standard error shows how much of it was, and the time left."""
    if not sys.stderr.isatty():
        yield from things
        return
    began = shown = monotonic()
    done = 0
    try:
        for each in things:
            yield each
            done += size_of(each)
            now = monotonic()
            if now - shown >= SHOW_SECONDS:
                shown, left = now, (now - began) * max(0, total - done) / max(1, done)
                sys.stderr.write(f"\r\x1b[K{done} of {total} {name}, {left:.0f} s left")
                sys.stderr.flush()
    finally:
        if shown != began:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"cannot write {path}: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UnusableError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise UnusableError(f"{path} is larger than anything an export holds")
    return content


def _base64(text: str) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:
        content = b""
    if not content or base64.b64encode(content).decode() != text:
        raise InvalidError("base64 that is not well formed")
    return content


def _hash(text: str) -> bytes:
    content = _base64(text)
    if len(content) != HASH_BYTES:
        raise InvalidError("a hash that is not 32 bytes long")
    return content


def _text(entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise InvalidError(f"has no proper {name}")
    return value


def _number(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or value < 0:
        raise InvalidError(f"has no proper {name}")
    return value


def _show(text: str) -> str:
    """Return text so that it cannot control the auditor's terminal."""
    return json.dumps(text)[1:-1]


def _show_time(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s after 1970"


def _show_hash(content: bytes) -> str:
    return base64.b64encode(content).decode()


# 11. Kept content: outside the tree, encrypted, named by leaves, and erased by destroying keys.

NONCE_BYTES = 12
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_ULID_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_AFTER_ALL_IDS = "~"
_INTACT, _ERASED = "intact", "erased"
_PARTS = {"request.intent": "request", "request.outcome": "response", "request.aborted": "response"}


def see_payload(report: Report, index: int, entry: dict[str, Any]) -> None:
    """Follow what one entry says about kept content; raises InvalidError."""
    payloads = report.payloads
    match entry["type"]:
        case "request.intent" | "request.outcome" | "request.aborted":
            if "payload_digest" in entry:
                _see_named(report, index, entry)
            elif entry.get("content_mode") == "encrypted":
                raise InvalidError("says that content is kept, and names none")
        case "hold.placed":
            payloads.held.add(_text(entry, "tenant"))
        case "hold.released":
            payloads.held.discard(_text(entry, "tenant"))
        case "erasure":
            _see_erasure(report, index, entry)


def _see_named(report: Report, index: int, entry: dict[str, Any]) -> None:
    request, part = _text(entry, "request_id"), _PARTS[entry["type"]]
    if not _ULID.fullmatch(request):
        raise InvalidError("names a payload by something that is no request id")
    database, tenant, intent = report.state.database, entry.get("tenant"), index
    if part == "request":
        tenant = _text(entry, "tenant")
    else:
        query = "SELECT tenant, intent FROM payloads WHERE request = ? AND part = 'request'"
        known = database.execute(query, (request,)).fetchone()
        if known is None:
            raise InvalidError("names a payload of a request whose intent names none")
        tenant, intent = known
    digest, commitment = _text(entry, "payload_digest"), _text(entry, "payload_commitment")
    row = (index, request, part, tenant, intent, digest, commitment)
    database.execute("INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?, NULL)", row)
    report.payloads.named += 1


def _see_erasure(report: Report, index: int, entry: dict[str, Any]) -> None:
    tenant, payloads = _text(entry, "tenant"), report.payloads
    if "requests" in entry:
        if not isinstance(entry["requests"], list):
            raise InvalidError("has no proper requests")
        rows = [(tenant, str(each), index) for each in entry["requests"]]
        report.state.database.executemany("INSERT OR REPLACE INTO erased_requests VALUES (?, ?, ?)", rows)
    elif "before" in entry:
        erased = _erased_range(index, entry)
        ranges = payloads.erased_ranges.setdefault(tenant, [])
        ranges[:] = [*(each for each in ranges if not erased.includes(each)), erased]
    if tenant in payloads.held:
        raise InvalidError(f"erases content of {tenant}, which is under a legal hold")


def _erased_range(index: int, entry: dict[str, Any]) -> ErasedRange:
    before_id = _first_id(_text(entry, "before"))
    if entry.get("everything"):
        return ErasedRange(index=index, before_id=_AFTER_ALL_IDS, before_intent=index, is_exact=True)
    if "before_index" in entry:
        before_index = _number(entry, "before_index")
        return ErasedRange(index=index, before_id=before_id, before_intent=before_index, is_exact=True)
    # What comes later than the entry is not covered by it, whatever it says.
    before_id = min(before_id, _first_id(_text(entry, "time"), later_ms=1))
    return ErasedRange(index=index, before_id=before_id, before_intent=sys.maxsize, is_exact=False)


def check_payloads(
    report: Report, directory: Path, data_keys: dict[str, bytes], *, again: bool = False
) -> None:
    """
    Compare the payloads of an export with what the log names, and open those whose keys are given.

    Those that an earlier run compared are compared `again` only if that is asked for, if a newer entry
    erases them, or if their keys are given.
    """
    payloads, database = report.payloads, report.state.database
    payloads.is_looked_at = True
    payloads.compared_before = payloads.checked + payloads.erased
    _select_payloads(report, data_keys, since=0 if again else payloads.compared)
    rows = database.execute(
        "SELECT payloads.*, erased_requests.entry FROM due JOIN payloads USING (entry)"
        " LEFT JOIN erased_requests USING (tenant, request) ORDER BY due.entry"
    )
    (due,) = database.execute("SELECT COUNT(*) FROM due").fetchone()
    for row in _watched(rows, due, "payloads"):
        index, request, part, tenant, intent, digest, commitment, before, named_at = row
        ranges = payloads.erased_ranges.get(tenant, [])
        place = request, intent, index
        _count(payloads, before, -1)
        payloads.compared_before -= before is not None
        try:
            blob = _read(directory / "payloads" / f"{request}.{part}")
        except UnusableError:
            if named_at is not None or any(each.explains(*place) for each in ranges):
                _found(report, index, _ERASED)
            else:
                report.add_problem(f"the payload that entry {index} names is missing")
            continue
        if hashlib.sha256(blob).hexdigest() != digest:
            report.add_problem(f"the payload that entry {index} names was altered")
            continue
        _found(report, index, _INTACT)
        erased_at = [each.index for each in ranges if each.erases(*place)]
        if named_at is not None and index < named_at:
            erased_at.append(named_at)
        if erased_at:
            report.add_problem(f"entry {erased_at[-1]} says that the payload of entry {index} was erased")
        key = data_keys.get(f"{request}/{part}")
        if key is not None:
            try:
                open_payload(blob, f"{report.origin}/{request}/{part}".encode(), key, commitment)
                payloads.opened += 1
            except InvalidError as error:
                report.add_problem(f"the payload that entry {index} names {error}")
    payloads.compared = report.size
    count_ahead(report)


def _select_payloads(report: Report, data_keys: dict[str, bytes], since: int) -> None:
    """Fill the table `due`: payloads named from entry `since` on, erased since, or to be opened."""
    database, select = report.state.database, "INSERT OR IGNORE INTO due SELECT payloads.entry FROM payloads "
    database.execute("CREATE TEMP TABLE IF NOT EXISTS due (entry INTEGER PRIMARY KEY)")
    database.execute("DELETE FROM due")
    database.execute(f"{select} WHERE entry >= ?", (since,))
    database.execute(
        f"{select} JOIN erased_requests USING (tenant, request) WHERE erased_requests.entry >= ?", (since,)
    )
    for tenant, ranges in report.payloads.erased_ranges.items():
        for each in ranges:
            if each.index >= since:
                bounds = tenant, each.before_id, each.before_intent
                where = "WHERE found = 'intact' AND tenant = ? AND request < ? AND intent < ?"
                database.execute(f"{select} {where}", bounds)
    names = [name.partition("/")[::2] for name in data_keys]
    database.executemany(f"{select} WHERE request = ? AND part = ?", names)


def _found(report: Report, index: int, what: str) -> None:
    report.state.database.execute("UPDATE payloads SET found = ? WHERE entry = ?", (what, index))
    _count(report.payloads, what, 1)


def _count(payloads: Payloads, what: str | None, number: int) -> None:
    payloads.checked += number * (what == _INTACT)
    payloads.erased += number * (what == _ERASED)


def count_ahead(report: Report) -> None:
    payloads = report.payloads
    try:
        first = _first_id(payloads.last_time, later_ms=TOLERANCE_MS)
    except InvalidError:  # no such date
        return
    query = "SELECT count(*) FROM payloads WHERE request >= ?"
    (payloads.ahead,) = report.state.database.execute(query, (first,)).fetchone()


def open_payload(blob: bytes, place: bytes, data_key: bytes, commitment: str) -> bytes:
    """Return the content of a payload if it is what the log commits to; raises InvalidError."""

    def derived(purpose: bytes) -> bytes:
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(data_key)

    try:
        cipher = AESGCM(derived(b"appliance payload encryption v1"))
        content = cipher.decrypt(blob[:NONCE_BYTES], blob[NONCE_BYTES:], place)
    except (InvalidTag, ValueError) as error:
        raise InvalidError("does not open with this key") from error
    key = derived(b"appliance payload commitment v1")
    found = hmac.new(key, place + b"\0" + content, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(found.encode(), commitment.encode()):
        raise InvalidError("opens, but to something the log does not commit to")
    return content


def read_data_keys(path: Path) -> dict[str, bytes]:
    """Read data keys, `{"<request id>/<part>": base64}`; raises UnusableError."""
    try:
        return {name: _base64(text) for name, text in json.loads(_read(path)).items()}
    except (ValueError, AttributeError, TypeError, InvalidError) as error:
        raise UnusableError(f"{path} holds no data keys") from error


def _first_id(time: str, later_ms: int = 0) -> str:
    """Return the beginning of the smallest request id of a time; raises InvalidError."""
    try:
        moment = datetime.strptime(time, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError as error:
        raise InvalidError("has no proper before") from error
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    number = (since.days * 86400 + since.seconds) * 1000 + since.microseconds // 1000 + later_ms
    return "".join(_ULID_DIGITS[number >> shift & 31] for shift in range(45, -1, -5))


def _payload_lines(report: Report) -> list[str]:
    payloads = report.payloads
    if not payloads.named:
        return []
    count = f"{payloads.named} named by entries"
    if not payloads.is_looked_at:
        return [f"{count}, not looked at"]
    lines = [f"{count}: {payloads.checked} intact, {payloads.erased} erased, {payloads.opened} opened"]
    if payloads.compared_before:
        lines.append(f"{payloads.compared_before} of these were compared by earlier runs, not again")
    if payloads.ahead:
        lines.append(
            f"WARNING: {payloads.ahead} have ids of a time after the newest entry: a clock was ahead"
        )
    return lines + [f"{_show(tenant)} is under a legal hold" for tenant in sorted(payloads.held)]


# 12. Time stamps: RFC 3161 over the text of a checkpoint, in CMS (RFC 5652).

MAX_TIMESTAMP_BYTES = 2**16
MIN_RSA_BITS, MIN_EC_BITS = 2048, 256
_INTEGER, _OCTETS, _OID, _TIME_VALUE, _SEQUENCE, _SET, _CONTEXT = 2, 4, 6, 0x18, 0x30, 0x31, 0xA0
_SIGNED_DATA, _TST_INFO = "1.2.840.113549.1.7.2", "1.2.840.113549.1.9.16.1.4"
_CONTENT_TYPE, _MESSAGE_DIGEST = "1.2.840.113549.1.9.3", "1.2.840.113549.1.9.4"
_SIGNER_SHA1, _SIGNER = "1.2.840.113549.1.9.16.2.12", "1.2.840.113549.1.9.16.2.47"
_RSA, _PSS, _ECDSA = "1.2.840.113549.1.1.1", "1.2.840.113549.1.1.10", "1.2.840.10045."
_SHA256 = "2.16.840.1.101.3.4.2.1"
_HASHES: dict[str, HashAlgorithm] = {
    _SHA256: SHA256(),
    "2.16.840.1.101.3.4.2.2": SHA384(),
    "2.16.840.1.101.3.4.2.3": SHA512(),
}
_SIGNATURES = {
    _RSA: None,
    _PSS: None,
    "1.2.840.113549.1.1.11": "sha256",
    "1.2.840.113549.1.1.12": "sha384",
    "1.2.840.113549.1.1.13": "sha512",
    "1.2.840.10045.4.3.2": "sha256",
    "1.2.840.10045.4.3.3": "sha384",
    "1.2.840.10045.4.3.4": "sha512",
}
"""Signature algorithms and the hash that their names imply: it must be the one the signer states."""
_GENERALIZED = re.compile(rb"(\d{14})(?:\.\d*[1-9])?Z")
_STAMP_NAME = re.compile(r"[1-9]\d*-(0|[1-9]\d{0,18})\.tsr", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a time stamp states."""

    time: int
    """When its authority made it, in seconds since the epoch."""
    policy: str
    imprint: bytes
    """SHA-256 of what it is about."""
    nonce: int | None
    signer: x509.Certificate

    def check(self, content: bytes) -> None:
        """Raise InvalidError if it is about something else."""
        if self.imprint != hashlib.sha256(content).digest():
            raise InvalidError("is of something other than the first entries of this log")

    def is_of(self, certificates: Sequence[x509.Certificate]) -> bool:
        """Whether one of these certificates made it, or is of the authority that issued the maker's."""
        return any(self.signer == each or _issued(each, self) for each in certificates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A time stamp of a trusted authority, and the entries it covers."""

    size: int
    time: int
    policy: str


@dataclass(slots=True, kw_only=True)
class Timestamps:
    """Which time stamps are trusted and needed, and what was found."""

    certificates: tuple[x509.Certificate, ...] = ()
    policy: str | None = None
    """The one an auditor asks for; None for any."""
    needed: int = 0
    trusted: list[Timed] = field(default_factory=list)
    unknown: int = 0
    """Those that verify, of an authority whose certificate was not given."""
    ahead: list[int] = field(default_factory=list)
    """Sizes whose entries have a later time than the time stamp that covers them."""

    @property
    def wanted(self) -> list[Timed]:
        """Those that count: of the policy, if one was asked for."""
        return [timed for timed in self.trusted if self.policy in {None, timed.policy}]

    @property
    def level(self) -> str:
        if not self.trusted:
            return "untimed"
        return "timed by a named policy" if self.policy and self.wanted else "timed"

    @property
    def newest(self) -> Timed | None:
        return max(self.wanted or self.trusted, key=lambda timed: timed.size, default=None)

    @property
    def are_missing(self) -> bool:
        return len(self.wanted) < self.needed


def timestamp_files(directory: Path, report: Report) -> dict[Path, int]:
    """Return the time stamps of an export with the sizes they are said to cover."""
    found = {}
    for path in sorted((directory / "timestamps").glob("*")):
        match = _STAMP_NAME.fullmatch(path.name)
        if match is None:
            report.add_problem(f"timestamps/{path.name} is no time stamp's name")
        else:
            found[path] = int(match[1])
    return found


def check_timestamps(report: Report, directory: Path, tiles: Tiles) -> None:
    """Check every time stamp against the entries it covers, whether or not its authority is trusted."""
    found = report.timestamps
    for path, size in timestamp_files(directory, report).items():
        name = f"timestamps/{path.name}"
        if size > report.size:
            report.add_problem(f"{name} is of {size} entries, and {report.size} are here")
            continue
        try:
            content = f"{report.origin}\n{size}\n{_show_hash(tiles.root_at(size))}\n".encode()
            stamp = open_timestamp(_read(path))
            stamp.check(content)
        except InvalidError as error:
            report.add_problem(f"{name} {error}")
            continue
        if not stamp.is_of(found.certificates):
            found.unknown += 1
            continue
        found.trusted.append(Timed(size=size, time=stamp.time, policy=stamp.policy))
        latest = None if size <= report.gone_below else _time_of_entry(directory, size - 1, report.size)
        if latest is not None and latest > stamp.time * 1000 + TOLERANCE_MS:
            found.ahead.append(size)


def _time_of_entry(directory: Path, index: int, size: int) -> int | None:
    """The time of an entry in milliseconds; None if it is none, which other checks report."""
    if index < 0:
        return None
    leaf = split_bundle(directory, index // TILE_WIDTH, size)[index % TILE_WIDTH]
    try:
        return _milliseconds(_text(json.loads(leaf), "time"))
    except (InvalidError, ValueError, AttributeError):
        return None


def open_timestamp(response: bytes) -> Stamp:
    """
    Return what a TimeStampResp states; raises InvalidError.

    Its signature is right then, and made with the certificate it carries; `Stamp.is_of` says whose that is.
    """
    if len(response) > MAX_TIMESTAMP_BYTES:
        raise InvalidError("is longer than any time stamp")
    try:
        return _open_timestamp(response)
    except UnsupportedAlgorithm as error:
        raise InvalidError("uses an algorithm that is not known here") from error


def _open_timestamp(response: bytes) -> Stamp:
    reply = _Der(response).only(_SEQUENCE)
    status = reply.inside(_SEQUENCE).integer()
    if status not in {0, 1}:
        raise InvalidError(f"is a refusal of the authority (status {status})")
    token = reply.inside(_SEQUENCE)
    reply.end()
    if token.oid() != _SIGNED_DATA:
        raise InvalidError("is no signed data")
    signed = token.inside(_CONTEXT).only(_SEQUENCE)
    token.end()
    signed.integer()
    signed.value(_SET)  # hashes that are used: said again by the signer
    encapsulated = signed.inside(_SEQUENCE)
    if encapsulated.oid() != _TST_INFO:
        raise InvalidError("holds something other than a time")
    info = encapsulated.inside(_CONTEXT).only(_OCTETS).rest()
    encapsulated.end()
    carried = signed.inside(_CONTEXT) if signed.tag == _CONTEXT else _Der(b"")
    if signed.tag == _CONTEXT + 1:
        signed.value(_CONTEXT + 1)  # revocation lists
    signer = signed.inside(_SET).only(_SEQUENCE)
    signed.end()
    attributes, algorithm, signature = _read_signer(signer, info)
    certificate = _signing_certificate(attributes, carried)
    _check_signature(certificate, signature, b"\x31" + attributes.content[1:], *algorithm)
    return _read_info(info, certificate)


class _Attributes:
    """The signed attributes of a signer: each once, with one value."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        """As they stand, with their tag."""
        self._values: dict[str, bytes] = {}
        each = _Der(content).only(_CONTEXT)
        while each.tag is not None:
            attribute = each.inside(_SEQUENCE)
            name, value = attribute.oid(), attribute.value(_SET)
            attribute.end()
            if name in self._values:
                raise InvalidError("has an attribute twice")
            self._values[name] = value

    def get(self, name: str, tag: int) -> "_Der | None":
        value = self._values.get(name)
        return None if value is None else _Der(value).only(tag)


def _read_signer(signer: "_Der", info: bytes) -> tuple[_Attributes, tuple[str, HashAlgorithm], bytes]:
    """Return signed attributes, algorithms and signature, once the attributes name the content."""
    signer.integer()
    signer.value(signer.tag or 0)  # who signed, unsigned: the attributes say it
    digest = signer.inside(_SEQUENCE).oid()
    attributes = _Attributes(signer.whole(_CONTEXT))
    signature_name = signer.inside(_SEQUENCE).oid()
    signature = signer.value(_OCTETS)
    if signer.tag == _CONTEXT + 1:
        signer.value(_CONTEXT + 1)  # unsigned attributes
    signer.end()
    if digest not in _HASHES or signature_name not in _SIGNATURES:
        raise InvalidError("uses an algorithm that is not known here")
    algorithm = _HASHES[digest]
    if _SIGNATURES[signature_name] not in {None, algorithm.name}:
        raise InvalidError("names two hashes")
    kind, named = attributes.get(_CONTENT_TYPE, _OID), attributes.get(_MESSAGE_DIGEST, _OCTETS)
    if kind is None or named is None or _dotted(kind.rest()) != _TST_INFO:
        raise InvalidError("does not sign what it holds")
    if named.rest() != hashlib.new(algorithm.name, info).digest():
        raise InvalidError("was altered: what it signs is another content")
    return attributes, (signature_name, algorithm), signature


def _signing_certificate(attributes: _Attributes, carried: "_Der") -> x509.Certificate:
    """Return the carried certificate that the signed attributes name by its hash: RFC 5035, RFC 2634."""
    named = []
    for attribute in (_SIGNER, _SIGNER_SHA1):
        value = attributes.get(attribute, _SEQUENCE)
        if value is not None:
            first = value.inside(_SEQUENCE).inside(_SEQUENCE)
            name = "sha1" if attribute == _SIGNER_SHA1 else "sha256"
            if attribute == _SIGNER and first.tag == _SEQUENCE:
                algorithm = _HASHES.get(first.inside(_SEQUENCE).oid())
                name = algorithm.name if algorithm else ""
            named.append((name, first.value(_OCTETS)))
    if not named or any(not name for name, _ in named):
        raise InvalidError("does not name its signer's certificate")
    while carried.tag is not None:
        encoded = carried.whole(carried.tag)
        # SHA-1 only tells certificates apart here; whether one is trusted goes by its whole content.
        if all(
            hashlib.new(name, encoded, usedforsecurity=False).digest() == digest for name, digest in named
        ):
            try:
                return x509.load_der_x509_certificate(encoded)
            except ValueError as error:
                raise InvalidError("carries a certificate that cannot be read") from error
    raise InvalidError("does not carry its signer's certificate")


def _check_signature(
    certificate: x509.Certificate, signature: bytes, message: bytes, name: str, algorithm: HashAlgorithm
) -> None:
    is_ecdsa = name.startswith(_ECDSA)
    try:
        key = certificate.public_key()
        if isinstance(key, RSAPublicKey) and key.key_size >= MIN_RSA_BITS and not is_ecdsa:
            fill = PSS(MGF1(algorithm), PSS.AUTO) if name == _PSS else PKCS1v15()
            key.verify(signature, message, fill, algorithm)
        elif isinstance(key, EllipticCurvePublicKey) and key.key_size >= MIN_EC_BITS and is_ecdsa:
            key.verify(signature, message, ECDSA(algorithm))
        else:
            raise InvalidError("is signed with a key of a kind or size that is not accepted")
    except (InvalidSignature, ValueError) as error:
        raise InvalidError("has a wrong signature") from error


def _read_info(info: bytes, certificate: x509.Certificate) -> Stamp:
    """Return what a signed TSTInfo states, if the certificate may state it."""
    statement = _Der(info).only(_SEQUENCE)
    if statement.integer() != 1:
        raise InvalidError("is of a version that is not known here")
    policy = statement.oid()
    imprint = statement.inside(_SEQUENCE)
    algorithm, digest = imprint.inside(_SEQUENCE).oid(), imprint.value(_OCTETS)
    imprint.end()
    if algorithm != _SHA256:
        raise InvalidError("names its content by a hash other than SHA-256")
    statement.integer()
    match = _GENERALIZED.fullmatch(statement.value(_TIME_VALUE))
    try:
        moment = datetime.strptime(match[1].decode() if match else "", "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except ValueError as error:
        raise InvalidError("has no proper time") from error
    nonce = None
    while statement.tag is not None:
        if statement.tag == _INTEGER:
            nonce = statement.integer()
        elif statement.tag == _CONTEXT + 1:
            _check_extensions(statement.inside(_CONTEXT + 1))
        else:
            statement.value(statement.tag)  # accuracy, ordering, the authority's name
    _check_certificate(certificate, moment)
    time = int(moment.timestamp())
    return Stamp(time=time, policy=policy, imprint=digest, nonce=nonce, signer=certificate)


def _check_extensions(extensions: "_Der") -> None:
    while extensions.tag is not None:
        extension = extensions.inside(_SEQUENCE)
        extension.oid()
        if extension.tag == 1:
            raise InvalidError("has a critical extension that is not known here")


def _check_certificate(certificate: x509.Certificate, moment: datetime) -> None:
    """Refuse a certificate that may not stamp or was not valid then; revocation is not looked at."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError) as error:
        raise InvalidError("is signed with a certificate that is not for time stamps") from error
    if not usage.critical or list(usage.value) != [ExtendedKeyUsageOID.TIME_STAMPING]:
        raise InvalidError("is signed with a certificate that is not for time stamps alone")
    if not certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc:
        raise InvalidError("is signed with a certificate that was not valid at its time")


def _issued(issuer: x509.Certificate, stamp: Stamp) -> bool:
    moment = datetime.fromtimestamp(stamp.time, UTC)
    try:
        is_authority = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        stamp.signer.verify_directly_issued_by(issuer)
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        UnsupportedAlgorithm,
        InvalidSignature,
        ValueError,
        TypeError,
    ):
        return False
    return is_authority and issuer.not_valid_before_utc <= moment <= issuer.not_valid_after_utc


class _Der:
    """
    Reads DER, one value after the other; raises InvalidError for what is not there or not well formed.

    Strict where it is read: definite lengths in their shortest form, nothing left over.
    """

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    @property
    def tag(self) -> int | None:
        """Of the next value; None at the end."""
        return self._content[self._at] if self._at < len(self._content) else None

    def whole(self, tag: int) -> bytes:
        """Return the next value, of this tag, with its header."""
        start = self._at
        self.value(tag)
        return self._content[start : self._at]

    def value(self, tag: int) -> bytes:
        at, end = self._span(tag)
        self._at = end
        return self._content[at:end]

    def inside(self, tag: int) -> "_Der":
        return _Der(self.value(tag))

    def only(self, tag: int) -> "_Der":
        """As `inside`, if nothing follows."""
        inner = self.inside(tag)
        self.end()
        return inner

    def rest(self) -> bytes:
        rest = self._content[self._at :]
        self._at = len(self._content)
        return rest

    def end(self) -> None:
        if self._at != len(self._content):
            raise InvalidError("is not well formed: something is left over")

    def integer(self) -> int:
        content = self.value(_INTEGER)
        if not content or (
            len(content) > 1 and content[0] in {0, 0xFF} and content[0] >> 7 == content[1] >> 7
        ):
            raise InvalidError("is not well formed: a number")
        return int.from_bytes(content, signed=True)

    def oid(self) -> str:
        return _dotted(self.value(_OID))

    def _span(self, tag: int) -> tuple[int, int]:
        """Return where the next value begins and ends."""
        header = self._content[self._at : self._at + 2]
        if len(header) < 2 or header[0] != tag or tag & 0x1F == 0x1F:  # noqa: PLR2004 - tag and length
            raise InvalidError("is not well formed: another value was expected")
        at, length = self._at + 2, header[1]
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(self._content[at : at + count])
            if not 1 <= count <= 3 or length < 0x80 or length >> 8 * (count - 1) == 0:  # noqa: PLR2004
                raise InvalidError("is not well formed: a length")
            at += count
        if at + length > len(self._content):
            raise InvalidError("is not well formed: it ends early")
        return at, at + length


def _dotted(content: bytes) -> str:
    """Return an object identifier as text."""
    numbers, number = [], 0
    for at, byte in enumerate(content):
        if number == 0 and byte == 0x80:  # noqa: PLR2004 - a leading zero
            break
        number = number << 7 | byte & 0x7F
        if byte < 0x80:  # noqa: PLR2004
            numbers.append(number)
            number = 0
        elif at == len(content) - 1:
            break
    else:
        if numbers:
            first = min(numbers[0] // 40, 2)
            return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))
    raise InvalidError("is not well formed: an identifier")


def _read_timestamps(options: argparse.Namespace) -> Timestamps:
    certificates: list[x509.Certificate] = []
    for path in options.timestamp_cert:
        try:
            certificates += x509.load_pem_x509_certificates(_read(path))
        except ValueError as error:
            raise UnusableError(f"{path} holds no PEM certificate") from error
    needed = min(1, len(certificates)) if options.timestamps_needed is None else options.timestamps_needed
    if not certificates and (needed or options.timestamp_policy):
        raise UnusableError("time stamps are trusted by a certificate: give --timestamp-cert")
    if needed < 0 or (certificates and not options.path.is_dir()):
        raise UnusableError("time stamps are verified with an export, and how many are needed is 0 or more")
    return Timestamps(certificates=tuple(certificates), policy=options.timestamp_policy, needed=needed)


def _milliseconds(time: str) -> int:
    try:
        moment = datetime.strptime(time, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    except ValueError:  # no such date
        return 0
    return int(moment.timestamp() * 1000)


def _timestamp_lines(report: Report) -> list[str]:
    found = report.timestamps
    newest = found.newest
    if newest is None:
        lines = ["untimed: times are by the operator's clock"]
    else:
        other = f", not {_show(found.policy)}" if found.policy and not found.wanted else ""
        newer = f", {report.size - newest.size} newer entries not" if report.size > newest.size else ""
        what = f"the first {newest.size} entries at {_show_time(newest.time)}{newer}"
        lines = [f"{found.level} ({newest.policy}{other}): {what}"]
    if found.unknown:
        lines.append(f"{found.unknown} not trusted: the authority's certificate was not given")
    lines += [
        f"WARNING: some of the first {size} entries have a time after their time stamp: a clock was ahead"
        for size in found.ahead[:SHOWN]
    ]
    return lines


def _timestamps_json(report: Report) -> dict[str, Any]:
    found, newest = report.timestamps, report.timestamps.newest
    return {
        "level": found.level,
        "size": newest.size if newest else 0,
        "time": _show_time(newest.time) if newest else None,
        "policy": newest.policy if newest else None,
        "trusted": len(found.trusted),
        "unknown": found.unknown,
        "needed": found.needed,
        "clock_ahead": found.ahead,
    }


# 13. Streams: what a SIEM stored of the messages of `audit.forward`, in any of its formats.
#
# An event is proven by a word in its line, whatever is around it.  The order of lines means nothing, and
# repeated events are normal: the index decides.  A checkpoint comes with the frontier of its tree, which
# makes the root it signs, so that a stream may begin at any of them; from there, the entries up to the next
# one must make its root.

MAX_LINE_BYTES = 2**20
_PROOF = re.compile(rb"tlog-(leaf|checkpoint)\.(0|[1-9][0-9]{0,17})\.([\w-]*)\.([\w-]*)\.")
_BEGUN = re.compile(rb"tlog-(?:leaf|checkpoint)\.")
_SCRATCH = """
CREATE TABLE leaves (idx INTEGER PRIMARY KEY, hash BLOB NOT NULL);
CREATE TABLE rotations (idx INTEGER PRIMARY KEY, leaf BLOB NOT NULL);
CREATE TABLE checkpoints (size INTEGER, frontier BLOB, note BLOB, PRIMARY KEY (size, frontier, note));
"""


@dataclass(slots=True, kw_only=True)
class StreamReport:
    origin: str
    start: int = 0
    """Entries from here on are proven."""
    end: int = 0
    """Entries below are proven: the size of the last checkpoint."""
    root: str = ""
    checkpoints: int = 0
    repeated: int = 0
    """Events that came again, unchanged."""
    before: int = 0
    """Entries before the first checkpoint of a stream that begins in the middle."""
    after: int = 0
    """Entries that no checkpoint in the stream covers yet."""
    cut_off: int = 0
    """Lines with the beginning of a proof only."""
    other_lines: int = 0
    entries_by_type: Counter[str] = field(default_factory=Counter)
    first_time: str | None = None
    last_time: str | None = None
    rotations: list[str] = field(default_factory=list)
    held: str | None = None
    diverged: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        if self.problems:
            return ExitCode.INVALID
        if self.diverged:
            return ExitCode.DIVERGED
        return ExitCode.INCOMPLETE if self.entries_by_type["audit.gap"] else ExitCode.VALID


def verify_stream(path: Path, keys: Keys, held: Head | None = None) -> StreamReport:
    """Check what a SIEM stored; raises UnusableError when there is nothing to prove or it cannot be read."""
    given = (keys,) if isinstance(keys, Key) else tuple(keys)
    report = StreamReport(origin=_origin(given))
    scratch = sqlite3.connect("", isolation_level=None)  # a file of its own, gone when it is closed
    try:
        scratch.executescript(_SCRATCH)
        scratch.execute("BEGIN")
        with path.open("rb") as file:
            lines = iter(partial(file.readline, MAX_LINE_BYTES), b"")
            for line in _watched(lines, path.stat().st_size, "bytes", size_of=len):
                _see_line(report, scratch, line)
        _prove(report, scratch, given, held)
    except OSError as error:
        raise UnusableError(f"cannot read {path}: {error.strerror}") from error
    except sqlite3.Error as error:
        raise UnusableError(f"no room for scratch data: {error}") from error
    finally:
        scratch.close()
    return report


def _see_line(report: StreamReport, scratch: sqlite3.Connection, line: bytes) -> None:
    found = list(_PROOF.finditer(line))
    if not found:
        if _BEGUN.search(line):
            report.cut_off += 1
        elif line.strip():
            report.other_lines += 1
        return
    # A caller can have an id recorded that reads like a proof; none that it can choose is as long as one.
    kind, number, first, second = max(found, key=lambda match: len(match[0])).groups()
    index = int(number)
    try:
        if kind == b"leaf":
            _see_stream_leaf(report, scratch, line, index, _word(first), _word(second))
        else:
            row = (index, _word(first), _word(second))
            known = scratch.execute("INSERT OR IGNORE INTO checkpoints VALUES (?, ?, ?)", row).rowcount == 0
            report.repeated += known
    except InvalidError as error:
        report.problems.append(f"{'entry' if kind == b'leaf' else 'the checkpoint of'} {index} {error}")


def _see_stream_leaf(
    report: StreamReport, scratch: sqlite3.Connection, line: bytes, index: int, digest: bytes, leaf: bytes
) -> None:
    if hash_leaf(leaf) != digest:
        raise InvalidError("does not have the hash that came with it: it was altered")
    if scratch.execute("INSERT OR IGNORE INTO leaves VALUES (?, ?)", (index, digest)).rowcount == 0:
        (known,) = scratch.execute("SELECT hash FROM leaves WHERE idx = ?", (index,)).fetchone()
        if known != digest:
            raise InvalidError("came again with other content: it was altered, or the log was rolled back")
        report.repeated += 1
    else:
        _count_stream_leaf(report, scratch, index, leaf)
    _compare_readable(line, leaf)


def _count_stream_leaf(report: StreamReport, scratch: sqlite3.Connection, index: int, leaf: bytes) -> None:
    entry = parse_leaf(leaf, report.origin)
    report.entries_by_type[entry["type"]] += 1
    report.first_time = min(report.first_time or entry["time"], entry["time"])
    report.last_time = max(report.last_time or entry["time"], entry["time"])
    if entry["type"] == "signer.rotated":
        scratch.execute("INSERT INTO rotations VALUES (?, ?)", (index, leaf))


def _compare_readable(line: bytes, leaf: bytes) -> None:
    """Compare the entry as people read it in JSON and OCSF; raises InvalidError if it differs."""
    try:
        document, _ = json.JSONDecoder().raw_decode(line[line.index(b"{") :].decode())
    except (ValueError, RecursionError):
        return
    readable = document.get("entry", document.get("unmapped"))
    if readable is not None and readable != json.loads(leaf):
        raise InvalidError("reads otherwise than its leaf: it was altered")


def _prove(
    report: StreamReport, scratch: sqlite3.Connection, given: Sequence[Key], held: Head | None
) -> None:
    """Follow the entries from each checkpoint to the next."""
    tree: Tree | None = None
    for size, signed in _signed_trees(report, scratch, given):
        report.checkpoints += 1
        if tree is None:
            is_whole = scratch.execute("SELECT 1 FROM leaves WHERE idx = 0").fetchone()
            tree = Tree() if is_whole else signed
            report.start = tree.size
            _compare_stream_held(report, held, tree)
        _grow(report, scratch, tree, size, held)
        if tree.size == size and tree.root() != signed.root():
            report.problems.append(f"the entries up to the checkpoint of {size} are not those that it signs")
        tree, report.end, report.root = signed, size, _show_hash(signed.root())
    if not report.problems and report.start == report.end:
        raise UnusableError("nothing can be proven without entries and a checkpoint that covers them")
    if tree is not None:
        count = "SELECT COUNT(*) FROM leaves WHERE idx {} ?"
        (report.before,) = scratch.execute(count.format("<"), (report.start,)).fetchone()
        (report.after,) = scratch.execute(count.format(">="), (report.end,)).fetchone()
    if held and report.held is None:
        report.diverged = held.size > report.end
        report.held = (
            f"{held.size} entries were signed before, this stream ends at {report.end}"
            if report.diverged
            else f"of {held.size} entries, which this stream cannot show: it begins at {report.start}"
        )


def _signed_trees(
    report: StreamReport, scratch: sqlite3.Connection, given: Sequence[Key]
) -> Iterator[tuple[int, Tree]]:
    """Yield size and tree of every checkpoint that is signed with the keys of its time, smallest first."""
    pending = scratch.execute("SELECT idx, leaf FROM rotations ORDER BY idx").fetchall()
    named = {json.loads(leaf).get("key") for _, leaf in pending}
    current = [key for key in given if key.short not in named]
    for size, frontier, note in scratch.execute("SELECT * FROM checkpoints ORDER BY size"):
        try:
            while pending and pending[0][0] < size:
                index, leaf = pending.pop(0)
                current = _rotated_in_stream(report, index, leaf, current, given)
            head, tree = verify_note(note, current), _Resumed(size, frontier)
        except InvalidError as error:
            report.problems.append(f"the checkpoint of {size} entries: {error}")
            continue
        if (head.size, head.root) == (size, tree.root()):
            yield size, tree
        else:
            report.problems.append(
                f"the checkpoint of {size} entries comes with the frontier of another tree"
            )


class _Resumed(Tree):
    """A tree of which the roots of its perfect subtrees are known, largest first; raises InvalidError."""

    def __init__(self, size: int, frontier: bytes) -> None:
        super().__init__()
        heights = [height for height in range(size.bit_length() - 1, -1, -1) if size >> height & 1]
        if len(frontier) != HASH_BYTES * len(heights):
            raise InvalidError("it comes with a frontier of another size")
        starts = range(0, len(frontier), HASH_BYTES)
        nodes = (frontier[start : start + HASH_BYTES] for start in starts)
        self.size, self._subtrees = size, list(zip(heights, nodes, strict=True))


def _grow(
    report: StreamReport, scratch: sqlite3.Connection, tree: Tree, size: int, held: Head | None
) -> None:
    """Add the entries up to a size; the first one that is missing ends it, with a problem."""
    rows = scratch.execute(
        "SELECT idx, hash FROM leaves WHERE idx >= ? AND idx < ? ORDER BY idx", (tree.size, size)
    )
    for index, digest in rows:
        if index != tree.size:
            break
        tree.append(digest)
        _compare_stream_held(report, held, tree)
    if tree.size < size:
        (there,) = scratch.execute(
            "SELECT COUNT(*) FROM leaves WHERE idx >= ? AND idx < ?", (tree.size, size)
        ).fetchone()
        count = size - tree.size - there
        report.problems.append(f"{count} entries between {tree.size} and {size - 1} are missing")


def _compare_stream_held(report: StreamReport, held: Head | None, tree: Tree) -> None:
    if held is None or held.size != tree.size:
        return
    if held.root == tree.root():
        report.held = f"continues the held checkpoint of {held.size} entries"
    else:
        report.diverged = True
        report.held = f"the first {held.size} entries are not those of the held checkpoint"


def _rotated_in_stream(
    report: StreamReport, index: int, leaf: bytes, keys: list[Key], given: Sequence[Key]
) -> list[Key]:
    """Return the keys that sign from here on; the old key's consent is believed before the log is."""
    entry = parse_leaf(leaf, report.origin)
    old = next((key for key in keys if key.short == entry.get("previous_key")), None)
    if old is None:
        return keys
    successor = _text(entry, "key")
    old.check(_base64(_text(entry, "signature")), rotation_message(report.origin, old.short, successor))
    new = next((key for key in given if key.short == successor), None)
    if new is None and "+sha256:" in successor:
        raise UnusableError(f"{_show(successor)} took over: give it as a further --key")
    new = new or parse_key(successor)
    if (new.name, new.kind) != (old.name, old.kind):
        raise InvalidError(f"entry {index} hands over to a key of another kind")
    report.rotations.append(f"{new.name}+{new.key_id.hex()}, named by entry {index}")
    return [new if key == old else key for key in keys]


def _word(text: bytes) -> bytes:
    """Decode base64url without padding."""
    content = base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4)) if len(text) % 4 != 1 else b""
    if base64.urlsafe_b64encode(content).rstrip(b"=") != text:
        raise InvalidError("comes with a proof that is not well formed")
    return content


def _main_of_stream(options: argparse.Namespace) -> int:
    if options.html:
        raise UnusableError("a stream has no page: --html is for exports and receipts")
    if options.witness:
        raise UnusableError("a stream has no cosignatures: verify an export with --witness")
    keys = [key for text in options.key for key in _keys(text)]
    try:
        held = _held(_read(options.held), keys) if options.held else None
    except InvalidError as error:
        raise UnusableError(f"the held checkpoint cannot be used: {error}") from error
    report = verify_stream(options.path, keys, held)
    sys.stdout.write(_stream_json(report) if options.json else _stream_text(report))
    return report.exit_code


def _stream_text(report: StreamReport) -> str:
    proven = f"{report.end - report.start}: {report.start} to {report.end - 1}" if report.end else "none"
    lines = [
        ("log", _show(report.origin)),
        ("checkpoints", f"{report.checkpoints} with verified signatures"),
        ("proven entries", proven),
        ("root", report.root),
        ("time", f"{report.first_time} to {report.last_time}" if report.first_time else "no entries"),
        *((_show(name), str(number)) for name, number in sorted(report.entries_by_type.items())),
        *(("rotated to", _show(key)) for key in report.rotations),
        ("held", report.held or "nothing held: no older head was compared"),
        ("requests", "not judged: a stream may begin in the middle; an export shows them"),
        ("came again", f"{report.repeated} events, unchanged"),
        (
            "not covered",
            f"{report.before} entries before the first checkpoint, {report.after} behind",
        ),
    ]
    if report.cut_off:
        lines.append(("cut off", f"{report.cut_off} lines: raise the collector's maximum message size"))
    if report.other_lines:
        lines.append(("other lines", str(report.other_lines)))
    lines += [("PROBLEM", _show(problem)) for problem in report.problems[:SHOWN]]
    if len(report.problems) > SHOWN:
        lines.append(("PROBLEM", f"and {len(report.problems) - SHOWN} more"))
    lines.append(("verdict", f"{MEANINGS[report.exit_code]} (exit code {report.exit_code})"))
    return "".join(f"{name:<20} {value}\n" for name, value in lines)


def _stream_json(report: StreamReport) -> str:
    content = {
        "verdict": report.exit_code.name.lower(),
        "exit_code": int(report.exit_code),
        "subject": "stream",
        "log": report.origin,
        "start": report.start,
        "end": report.end,
        "root": report.root,
        "checkpoints": report.checkpoints,
        "entries_by_type": dict(sorted(report.entries_by_type.items())),
        "first_time": report.first_time,
        "last_time": report.last_time,
        "rotations": report.rotations,
        "held": report.held,
        "repeated": report.repeated,
        "before": report.before,
        "after": report.after,
        "cut_off": report.cut_off,
        "other_lines": report.other_lines,
        "problems": report.problems,
    }
    return json.dumps(content, indent=2) + "\n"


# 14. Sequences of gateways: each numbers what it accepts, and another may have put it into the log.


def see_place(report: Report, index: int, entry: dict[str, Any]) -> None:
    """Each gateway's numbers are 1, 2, 3 in the order of the log, and its starts only grow."""
    if not {"writer", "epoch", "sequence"} & entry.keys():
        return
    writer, epoch, number = _text(entry, "writer"), _number(entry, "epoch"), _number(entry, "sequence")
    newest, last = report.sequences.get(writer, (0, 0))
    report.sequences[writer] = max(newest, epoch), max(last, number)
    what = f"entry {index} is number {number} of those that gateway {writer} accepted"
    if number <= last:
        report.add_problem(f"{what}, after number {last}")
    elif number > last + 1 and index >= report.gone_below:  # of disposed entries the newest is here
        report.add_problem(f"{what}, and {number - last - 1} before it are missing")
    elif epoch < newest:
        report.add_problem(f"{what}, of an older start than the one before it")


# 15. Disposed entries: whole bundles are gone, and an entry says so.
#
# Their tiles of level 1 and up are here, so the tree is that of the whole log.  Entries that later ones are
# judged by stay: `kept/<index>` has the path of each to the root of its tile, and then the entry.

LEAST_DAYS = 183
"""Age at which entries may be disposed of."""
PATH_BYTES = 8 * HASH_BYTES


def read_disposal(directory: Path, note: bytes, origin: str) -> int:
    """
    Return the size below which entries were disposed of, as an entry that `disposed` names says.

    That the entry is in the log shows later (`check_disposed`).  Raises InvalidError if there is none.
    """
    if not (directory / "disposed").exists():
        return 0
    size = parse_head(split_note(note)[0], {origin}).size
    index = _disposing_entry(directory)
    if index >= size:
        raise InvalidError(f"`disposed` names entry {index}, and {size} are signed")
    try:
        entry = parse_leaf(split_bundle(directory, index // TILE_WIDTH, size)[index % TILE_WIDTH], origin)
    except InvalidError as error:
        raise InvalidError(f"`disposed` names entry {index}, which cannot be read: {error}") from error
    if entry["type"] != "audit.disposed":
        raise InvalidError(f"`disposed` names entry {index}, which disposes of nothing")
    return _disposed_below(index, entry)


def _disposing_entry(directory: Path) -> int:
    text = _read(directory / "disposed").decode(errors="replace").removesuffix("\n")
    if not _DECIMAL.fullmatch(text):
        raise InvalidError("`disposed` names no entry")
    return int(text)


def _disposed_below(index: int, entry: dict[str, Any]) -> int:
    below = _number(entry, "below")
    if not 0 < below <= index or below % TILE_WIDTH:
        raise InvalidError("disposes of entries that cannot be disposed of")
    return below


def see_disposal(report: Report, index: int, entry: dict[str, Any]) -> None:
    """Follow what one entry says was disposed of; raises InvalidError."""
    below, newest = _disposed_below(index, entry), _text(entry, "newest")
    if _number(entry, "previous") > report.disposed_below:
        raise InvalidError("names an earlier disposal that no entry says")
    if below > report.disposed_below:
        report.disposed_below, report.disposed_by, report.disposed_at = below, index, entry["time"]
    report.disposed_newest = max(report.disposed_newest, newest)
    if _milliseconds(newest) > _milliseconds(entry["time"]) - LEAST_DAYS * 86_400_000:
        raise InvalidError(f"disposes of entries of {newest}, which are younger than {LEAST_DAYS} days")


def kept_entries(directory: Path, below: int) -> Iterator[tuple[int, bytes]]:
    """Yield the disposed entries that are here, each with its path before it; raises InvalidError."""
    names = [path.name for path in (directory / "kept").glob("*")] if below else []
    for name in names:
        if not _DECIMAL.fullmatch(name) or int(name) >= below:
            raise InvalidError(f"kept/{_show(name)} is no disposed entry")
    for index in sorted(map(int, names)):
        yield index, _read(directory / "kept" / str(index))


def skip_disposed(directory: Path, report: Report, before: Remembered, head: Head) -> Remembered:
    """Begin behind what was disposed of, with the entries that are kept of it."""
    below = report.gone_below
    if before.size >= below:
        return before
    entries = EntryCheck(report)
    for index, content in kept_entries(directory, below):
        entries.see(index, [content[PATH_BYTES:]])
    return Remembered(size=below, tiles=edge(below, stored_tile(directory, head.size)))


def check_disposed(directory: Path, report: Report, tiles: Tiles, seen: str = "") -> None:
    """
    Check what is here of disposed entries, and the entry that says so, against the tree.

    `seen` is the latest time of those that an earlier run verified.
    """
    below = report.gone_below
    if not below:
        return
    index = _disposing_entry(directory)
    leaf = split_bundle(directory, index // TILE_WIDTH, report.size)[index % TILE_WIDTH]
    if tiles.node(0, index) != hash_leaf(leaf):
        raise InvalidError(f"`disposed` names entry {index}, which is not that of the log")
    if parse_leaf(leaf, report.origin).get("root") != _show_hash(tiles.root_at(below)):
        report.add_problem(f"entry {index} disposes of other entries than the first {below} of this log")
    first = _time_of_entry(directory, below, report.size)
    if first is None or first > _milliseconds(report.disposed_at) - LEAST_DAYS * 86_400_000:
        report.add_problem(f"entry {below}, the first that stays, was younger than {LEAST_DAYS} days")
    if seen > report.disposed_newest:
        report.add_problem(
            f"entries of {seen} are gone, and the entry that disposes of them calls them older"
        )
    _check_kept(directory, report, tiles)
    for number in range(below // TILE_WIDTH):
        if (directory / tile_path("entries", number, TILE_WIDTH)).exists():
            hashes = [hash_leaf(leaf) for leaf in split_bundle(directory, number, below)]
            if tile_root(hashes) != tiles.node(1, number):
                start = number * TILE_WIDTH
                report.add_problem(f"entries from {start} on were disposed of, and others are in their place")
            report.left_entries += TILE_WIDTH


def _check_kept(directory: Path, report: Report, tiles: Tiles) -> None:
    for index, content in kept_entries(directory, report.gone_below):
        node = hash_leaf(content[PATH_BYTES:])
        for height, sibling in enumerate(_hashes(content[:PATH_BYTES])):
            node = hash_node(sibling, node) if index >> height & 1 else hash_node(node, sibling)
        if len(content) <= PATH_BYTES or node != tiles.node(1, index // TILE_WIDTH):
            report.add_problem(f"entry {index} was disposed of, and another is in its place")
        report.kept_entries += 1


def compare_disposed(directory: Path, report: Report, before: Remembered, head: Head) -> None:
    """Compare with a state that ends within what was disposed of since: by whole tiles."""
    whole = before.size - before.size % TILE_WIDTH
    if edge(whole, stored_tile(directory, head.size))[1:] != before.tiles[1:]:
        report.diverged = True
        report.continued = f"the first {whole} entries are not those that were verified before"
        return
    report.continued = (
        f"the first {whole} entries are those that were verified before; up to {report.gone_below}, entries "
        "were disposed of before they could be verified"
    )


def _disposal_lines(report: Report) -> list[str]:
    if not report.disposed_below:
        return []
    which = f"the first {report.disposed_below} entries, up to {_show(report.disposed_newest)}"
    lines = [f"{which}, as entry {report.disposed_by} of {report.disposed_at} says"]
    if not report.gone_below:
        return [*lines, "they are still here, and were verified"]
    if report.kept_entries:
        lines.append(f"{report.kept_entries} of them are kept, because later ones are judged by them")
    if report.left_entries:
        lines.append(f"{report.left_entries} of them are still here")
    return lines


if __name__ == "__main__":
    sys.exit(main())
