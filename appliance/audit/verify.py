"""
The auditor's verifier: says whether a log, or a receipt, is what the key's owner signed, and whole.

    python -m appliance.audit.verify EXPORT --key KEY [--held CHECKPOINT] [--witness KEY] [--json]
    python -m appliance.audit.verify RECEIPT.tlog-proof --leaf LEAF --key KEY

It needs Python and `cryptography`, no network and nothing of ours: this file may be copied out and run alone.
It therefore repeats, on purpose, the little hashing and parsing that the writer has too; a mistake there must
not be repeated here, and external vectors pin both.  That is also why it is longer than other files.

The keys must come to the auditor by another way than the export does; every one that is given must have
signed.  A key that was rotated is followed to its successor, which the old key signed for.  Without a
checkpoint that another party held (`--held`) or cosigned (`--witness`), a valid log only shows that its
operator is consistent.

Exit codes: 0 valid, 10 valid with erased payloads, 1 cannot be used (arguments, files), 2 invalid,
3 diverged from a checkpoint that was held or cosigned, 4 incomplete, 5 not cosigned by as many witnesses as
were asked for, 6 keys acted that no entry created.  It fails closed: what it cannot read is invalid.
"""

import argparse
import base64
import hashlib
import hmac
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

FORMAT_VERSION = 1
MAX_LEAF_BYTES = 4096
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
SHOWN = 20
"""Problems and requests that are listed; the rest is counted."""

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
    ERASED = 10


MEANINGS = {
    ExitCode.VALID: "valid and complete",
    ExitCode.UNUSABLE: "nothing was verified: arguments or files cannot be used",
    ExitCode.INVALID: "invalid: altered, damaged or not signed with this key",
    ExitCode.DIVERGED: "diverged: not a continuation of a checkpoint that was held or cosigned",
    ExitCode.INCOMPLETE: "authentic but incomplete: requests without an end, or an admitted gap",
    ExitCode.UNWITNESSED: "authentic, but cosigned by fewer witnesses than were asked for",
    ExitCode.UNKNOWN_KEYS: "authentic, but API keys acted that no entry created",
    ExitCode.ERASED: "valid and complete; payloads were erased, which entries say",
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
    """What the log says about content kept outside the tree, and what was found of it (section 9)."""

    named: dict[tuple[str, str], "NamedPayload"] = field(default_factory=dict)
    """By request and part."""
    tenants: dict[str, str] = field(default_factory=dict)
    """Tenant of each request whose content was to be kept."""
    erased_requests: dict[tuple[str, str], int] = field(default_factory=dict)
    """Tenant and request that an erasure names, and the index of the last entry that does."""
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
    last_time: str = ""
    """Of the newest entry."""

    @property
    def ahead(self) -> int:
        """Payloads of requests with ids of a time after the newest entry: a clock was ahead."""
        try:
            first = _first_id(self.last_time, later_ms=TOLERANCE_MS)
        except InvalidError:  # no such date
            return 0
        return sum(1 for request, _ in self.named if request >= first)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPayload:
    index: int
    intent: int
    """Index of its request's intent."""
    tenant: str
    digest: str
    commitment: str


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
    entries_by_type: Counter[str] = field(default_factory=Counter)
    open_requests: dict[str, int] = field(default_factory=dict)
    """Requests with an intent and no end, and the index of the intent."""
    created_keys: set[str] = field(default_factory=set)
    """Ids of API keys that `key.created` and `key.rotated` introduced."""
    unknown_keys: dict[str, int] = field(default_factory=dict)
    """Other keys that acted, and the index of the first entry that names them."""
    unrecorded_keys: dict[str, int] = field(default_factory=dict)
    """The same before the first key was introduced: this log may not record keys."""
    missing_entries: int = 0
    """Entries that `audit.gap` admits are missing."""
    erased_payloads: int = 0
    payloads: Payloads = field(default_factory=Payloads)
    rotations: list[str] = field(default_factory=list)
    """Keys that took over from a given one, in order."""
    witnesses: Witnesses = NO_WITNESSES
    cosigned: dict[str, Cosigned] = field(default_factory=dict)
    """By witness, the largest part of this log it has cosigned."""
    first_time: str | None = None
    last_time: str | None = None
    held: str | None = None
    """What comparing with the held checkpoint showed, or None without one."""
    diverged: bool = False
    problems: list[str] = field(default_factory=list)

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
        if self.problems:
            return ExitCode.INVALID
        if self.diverged:
            return ExitCode.DIVERGED
        if self.unknown_keys:
            return ExitCode.UNKNOWN_KEYS
        if len(self.cosigned) < self.witnesses.needed:
            return ExitCode.UNWITNESSED
        if self.open_requests or self.gaps:
            return ExitCode.INCOMPLETE
        return ExitCode.ERASED if self.entries_by_type["erasure"] else ExitCode.VALID


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

    def append(self, node: bytes) -> None:
        height = 0
        while self._subtrees and self._subtrees[-1][0] == height:
            node = hash_node(self._subtrees.pop()[1], node)
            height += 1
        self._subtrees.append((height, node))
        self.size += 1

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


def parse_leaf(leaf: bytes, origin: str) -> dict[str, Any]:
    """Read one leaf of the log `origin`; raises InvalidError."""
    if len(leaf) > MAX_LEAF_BYTES:
        raise InvalidError(f"is {len(leaf)} bytes long")
    try:
        entry = json.loads(leaf.decode(), parse_float=_refuse, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidError("is not JSON of this format") from error
    if not isinstance(entry, dict) or canonical(entry) != leaf:
        raise InvalidError("is not in canonical form")
    if type(entry.get("v")) is not int or entry["v"] != FORMAT_VERSION:
        raise InvalidError(f"is not of format {FORMAT_VERSION}, the one this verifier reads")
    if not all(isinstance(entry.get(name), str) for name in ("log", "id", "type", "time")):
        raise InvalidError("has no log, id, type or time")
    if entry["log"] != origin:
        raise InvalidError(f"belongs to another log, {_show(entry['log'])}")
    if not _TIME.fullmatch(entry["time"]):
        raise InvalidError("has no proper time")
    return entry


def canonical(entry: dict[str, Any]) -> bytes | None:
    """Return the canonical bytes of an entry, or None when it holds what no entry may hold."""
    for value in entry.values():
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int) for item in items):
            return None
        if any(isinstance(item, int) and abs(item) >= 2**53 for item in items):
            return None
    try:
        # RFC 8785 orders by UTF-16 code units, Python by code points.
        ordered = dict(sorted(entry.items(), key=lambda member: member[0].encode("utf-16-be")))
        return json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return None


class EntryCheck:
    """Follows entries in order: ids are used once, requests begin once and end once."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._ids: set[str] = set()
        self._ended: set[str] = set()

    def see(self, index: int, leaf: bytes) -> None:
        """Judge one leaf, given everything before it."""
        try:
            self._follow(index, parse_leaf(leaf, self._report.origin))
        except InvalidError as error:
            self._report.problems.append(f"entry {index} {error}")

    def _follow(self, index: int, entry: dict[str, Any]) -> None:
        report = self._report
        report.entries_by_type[entry["type"]] += 1
        report.first_time = min(report.first_time or entry["time"], entry["time"])
        report.last_time = max(report.last_time or entry["time"], entry["time"])
        if entry["id"] in self._ids:
            raise InvalidError("has an id that was used before")
        self._ids.add(entry["id"])
        report.payloads.last_time = entry["time"]
        see_payload(report, index, entry)
        see_keys(report, index, entry)
        match entry["type"]:
            case "request.intent":
                request = _text(entry, "request_id")
                if request in report.open_requests or request in self._ended:
                    raise InvalidError(f"begins request {request} a second time")
                report.open_requests[request] = index
            case "request.outcome" | "request.aborted":
                request = _text(entry, "request_id")
                if report.open_requests.pop(request, None) is None:
                    again = " a second time" if request in self._ended else ", which never began"
                    raise InvalidError(f"ends request {request}{again}")
                self._ended.add(request)
            case "audit.gap":
                report.missing_entries += _number(entry, "entries")
            case "erasure":
                report.erased_payloads += _number(entry, "payloads")


def see_keys(report: Report, index: int, entry: dict[str, Any]) -> None:
    """Follow which API keys entries introduce, and which act; tokens, certificates and commands have none."""
    named = [str(entry.get("actor", "")).removeprefix("console:")]
    if entry["type"] in {"key.created", "key.rotated"}:
        report.created_keys.add(_text(entry, "key_id"))
    elif entry["type"] != "key.revoked":
        named.append(str(entry.get("key_id", "")))
    for key in named:
        if _KEY_ID.fullmatch(key) and key not in report.created_keys:
            found = report.unknown_keys if report.created_keys else report.unrecorded_keys
            found.setdefault(key, index)


# 5. Rotation of the signing key.


def follow_rotations(directory: Path, note: bytes, keys: Keys, report: Report) -> list[Key]:
    """
    Return the keys that must have signed now, given the ones that were trusted first.

    Each rotation carries a signature of the key that goes, so it is believed before the log is.
    Raises InvalidError when that signature is wrong; UnusableError when the new key is not to be had.
    """
    current = [keys] if isinstance(keys, Key) else list(keys)
    try:
        size = parse_head(split_note(note)[0], {report.origin}).size
        for index, leaf in enumerate(read_leaves(directory, size)):
            if b'"signer.rotated"' in leaf:
                current = _rotated(directory, index, leaf, current, report)
    except _DamagedError:
        pass  # missing entries are found, and named, when the log is checked
    return list(dict.fromkeys(current))


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


# 6. Exports: c2sp.org/tlog-tiles.


class TileCheck:
    """Compares the hash tiles of an export with the hashes its leaves have."""

    def __init__(self, directory: Path, report: Report) -> None:
        self._directory = directory
        self._report = report
        self._levels: list[list[bytes]] = []
        self._numbers: list[int] = []

    def append(self, node: bytes, level: int = 0) -> None:
        """Add the next hash of a level; a full tile becomes one hash of the level above."""
        if level == len(self._levels):
            self._levels.append([])
            self._numbers.append(0)
        self._levels[level].append(node)
        if len(self._levels[level]) == TILE_WIDTH:
            tree = Tree()
            for child in self._levels[level]:
                tree.append(child)
            self._compare(level)
            self._levels[level].clear()
            self._numbers[level] += 1
            self.append(tree.root(), level + 1)

    def finish(self) -> None:
        """Compare the partial tiles at the right edge."""
        for level, nodes in enumerate(self._levels):
            if nodes:
                self._compare(level)

    def _compare(self, level: int) -> None:
        nodes, number = self._levels[level], self._numbers[level]
        path = tile_path(str(level), number, len(nodes))
        try:
            content = _read(self._directory / path)
        except UnusableError:
            self._report.problems.append(f"{path} is missing")
            return
        if content != b"".join(nodes):
            stored = [content[at : at + HASH_BYTES] for at in range(0, len(content), HASH_BYTES)]
            wrong = next((at for at, node in enumerate(nodes) if stored[at : at + 1] != [node]), len(nodes))
            what = f"hash {number * TILE_WIDTH + wrong}" if level else f"entry {number * TILE_WIDTH + wrong}"
            self._report.problems.append(f"{what} does not match {path}")


def tile_path(level: str, number: int, width: int) -> str:
    parts = [f"{number % 1000:03d}"]
    while number := number // 1000:
        parts.insert(0, f"x{number % 1000:03d}")
    return f"tile/{level}/{'/'.join(parts)}" + ("" if width == TILE_WIDTH else f".p/{width}")


def verify_export(
    directory: Path, keys: Keys, held: Head | None, witnesses: Witnesses = NO_WITNESSES
) -> Report:
    """Check a whole log; raises UnusableError when the directory is no export."""
    report = Report(subject="export", origin=_origin(keys), witnesses=witnesses)
    note = _read(directory / "checkpoint")
    try:
        head = verify_note(note, follow_rotations(directory, note, keys, report))
        report.checkpoint_verified, report.size, report.root = True, head.size, _show_hash(head.root)
        cosigned = _cosigned_heads(directory, note, report)
    except InvalidError as error:
        report.problems.append(str(error))
        return report
    wanted = {other.size for other in (held, *cosigned) if other}
    tree, entries, tiles = Tree(), EntryCheck(report), TileCheck(directory, report)
    roots: dict[int, bytes | None] = {0: tree.root()}
    try:
        for leaf in read_leaves(directory, head.size):
            entries.see(tree.size, leaf)
            node = hash_leaf(leaf)
            tiles.append(node)
            tree.append(node)
            if tree.size in wanted:
                roots[tree.size] = tree.root()
    except InvalidError as error:
        report.problems.append(str(error))
        return report
    tiles.finish()
    if tree.root() != head.root:
        report.problems.append("the entries are not the ones that were signed: the root differs")
    if held:
        compare_held(report, held, roots)
    for other in cosigned:
        if other.size > report.size or roots[other.size] != other.root:
            report.diverged = True
            report.cosigned.clear()
            report.held = f"a witness cosigned another log of {other.size} entries than this one"
    return report


def _cosigned_heads(directory: Path, note: bytes, report: Report) -> list[Head]:
    """Return the heads that witnesses cosigned: the export's own, and those kept with it."""
    kept = sorted((directory / "witnessed").glob("*")) if report.witnesses.keys else []
    heads = [see_cosignatures(report, other) for other in (note, *map(_read, kept))]
    return [head for head in heads if head]


def compare_held(report: Report, held: Head, roots: dict[int, bytes | None]) -> None:
    """Say whether the log continues the tree head the auditor held."""
    if held.size > report.size:
        report.diverged = True
        report.held = f"{held.size} entries were signed before, {report.size} are here"
    elif roots[held.size] != held.root:
        report.diverged = True
        report.held = f"the first {held.size} entries are not those of the held checkpoint"
    else:
        report.held = f"continues the held checkpoint of {held.size} entries"


def read_leaves(directory: Path, size: int) -> Iterator[bytes]:
    """Yield the leaves of an export in order; raises InvalidError when they are not all there."""
    for number, start in enumerate(range(0, size, TILE_WIDTH)):
        width = min(TILE_WIDTH, size - start)
        path = tile_path("entries", number, width)
        try:
            content = _read(directory / path)
        except UnusableError as error:
            raise _DamagedError(f"{path} is missing, so entries from {start} on are") from error
        at = 0
        for index in range(start, start + width):
            end = at + 2 + int.from_bytes(content[at : at + 2])
            if at + 2 > len(content) or end > len(content):
                raise _DamagedError(f"{path} ends before entry {index}")
            yield content[at + 2 : end]
            at = end
        if at != len(content):
            raise _DamagedError(f"{path} holds more than its {width} entries")


# 7. Receipts: c2sp.org/tlog-proof.


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
        compare_held(report, held, {held.size: root})
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


# 8. The command line.  (What follows it, section 9, is about kept content.)


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify what the command line names, report on standard output, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        report = _verify(options)
    except UnusableError as error:
        sys.stderr.write(f"verify: {error}\n")
        return ExitCode.UNUSABLE
    sys.stdout.write(render_json(report) if options.json else render(report))
    return report.exit_code


def render(report: Report) -> str:
    """Return the report for a person to read."""
    count = len(report.open_requests)
    lines = [
        ("log", _show(report.origin)),
        ("checkpoint", "signature verified" if report.checkpoint_verified else "NOT verified"),
        ("size", f"{report.size} entries"),
        ("root", report.root),
        ("time", f"{report.first_time} to {report.last_time}" if report.first_time else "no entries"),
        *((_show(name), str(number)) for name, number in sorted(report.entries_by_type.items())),
        *(("rotated to", _show(key)) for key in report.rotations),
        ("held", report.held or "nothing held: no older head was compared"),
        ("witnesses", _witness_line(report)),
        *(
            ("", f"{_show(name)}, the first {seen.size} entries at {_show_time(seen.time)}")
            for name, seen in report.cosigned.items()
        ),
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
    lines += [("PROBLEM", _show(problem)) for problem in report.problems[:SHOWN]]
    if len(report.problems) > SHOWN:
        lines.append(("PROBLEM", f"and {len(report.problems) - SHOWN} more"))
    lines.append(("verdict", f"{MEANINGS[report.exit_code]} (exit code {report.exit_code})"))
    return "".join(f"{name:<20} {value}\n" for name, value in lines)


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
        "open_requests": list(report.open_requests),
        "unknown_keys": list(report.unknown_keys),
        "unrecorded_keys": list(report.unrecorded_keys),
        "aborted_requests": report.entries_by_type["request.aborted"],
        "gaps": report.gaps,
        "missing_entries": report.missing_entries,
        "erased_payloads": report.erased_payloads,
        "payloads": {
            "named": len(report.payloads.named),
            "compared": report.payloads.is_looked_at,
            "intact": report.payloads.checked,
            "erased": report.payloads.erased,
            "opened": report.payloads.opened,
            "ahead": report.payloads.ahead,
            "held_tenants": sorted(report.payloads.held),
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
        "problems": report.problems,
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
    parser.add_argument("path", type=Path, help="directory of an export, or a .tlog-proof file")
    parser.add_argument(
        "--key", required=True, action="append", help="verifier key, or a file with one or more; repeatable"
    )
    parser.add_argument("--leaf", type=Path, help="the leaf a receipt is for")
    parser.add_argument("--held", type=Path, help="checkpoint kept from earlier, to compare with")
    parser.add_argument(
        "--witness", action="append", default=[], help="witness's key, or a file with its keys; repeatable"
    )
    parser.add_argument(
        "--witnesses-needed", type=int, metavar="N", help="how many must have cosigned; default: all named"
    )
    parser.add_argument("--payload-keys", type=Path, help="data keys (JSON): open the payloads they are of")
    parser.add_argument("--no-payloads", action="store_true", help="kept content is not in this export")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    return parser


def _verify(options: argparse.Namespace) -> Report:
    keys = [key for text in options.key for key in _keys(text)]
    witnesses = _witnesses(options)
    held = None
    if options.held:
        try:
            held = _held(_read(options.held), keys)
        except InvalidError as error:
            raise UnusableError(f"the held checkpoint cannot be used: {error}") from error
    if options.path.is_dir():
        report = verify_export(options.path, keys, held, witnesses)
        if not options.no_payloads:
            data_keys = read_data_keys(options.payload_keys) if options.payload_keys else {}
            check_payloads(report, options.path, data_keys)
        return report
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


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no integer")


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


# 9. Kept content: outside the tree, encrypted, named by leaves, and erased by destroying keys.

NONCE_BYTES = 12
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_ULID_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_AFTER_ALL_IDS = "~"
_PARTS = {"request.intent": "request", "request.outcome": "response", "request.aborted": "response"}


def see_payload(report: Report, index: int, entry: dict[str, Any]) -> None:
    """Follow what one entry says about kept content; raises InvalidError."""
    payloads = report.payloads
    match entry["type"]:
        case "request.intent" | "request.outcome" | "request.aborted":
            if "payload_digest" in entry:
                _see_named(payloads, index, entry)
            elif entry.get("content_mode") == "encrypted":
                raise InvalidError("says that content is kept, and names none")
        case "hold.placed":
            payloads.held.add(_text(entry, "tenant"))
        case "hold.released":
            payloads.held.discard(_text(entry, "tenant"))
        case "erasure":
            _see_erasure(payloads, index, entry)


def _see_named(payloads: Payloads, index: int, entry: dict[str, Any]) -> None:
    request, part = _text(entry, "request_id"), _PARTS[entry["type"]]
    if not _ULID.fullmatch(request):
        raise InvalidError("names a payload by something that is no request id")
    intent = payloads.named.get((request, "request"))
    if part == "request":
        payloads.tenants[request] = _text(entry, "tenant")
    elif intent is None:
        raise InvalidError("names a payload of a request whose intent names none")
    payloads.named[request, part] = NamedPayload(
        index=index,
        intent=index if part == "request" or intent is None else intent.index,
        tenant=payloads.tenants[request],
        digest=_text(entry, "payload_digest"),
        commitment=_text(entry, "payload_commitment"),
    )


def _see_erasure(payloads: Payloads, index: int, entry: dict[str, Any]) -> None:
    tenant = _text(entry, "tenant")
    if "requests" in entry:
        if not isinstance(entry["requests"], list):
            raise InvalidError("has no proper requests")
        payloads.erased_requests |= {(tenant, str(each)): index for each in entry["requests"]}
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


def check_payloads(report: Report, directory: Path, data_keys: dict[str, bytes]) -> None:
    """Compare the payloads of an export with what the log names, and open those whose keys are given."""
    payloads = report.payloads
    payloads.is_looked_at = True
    for (request, part), named in payloads.named.items():
        ranges = payloads.erased_ranges.get(named.tenant, [])
        place = request, named.intent, named.index
        named_at = payloads.erased_requests.get((named.tenant, request))
        try:
            blob = _read(directory / "payloads" / f"{request}.{part}")
        except UnusableError:
            if named_at is not None or any(each.explains(*place) for each in ranges):
                payloads.erased += 1
            else:
                report.problems.append(f"the payload that entry {named.index} names is missing")
            continue
        if hashlib.sha256(blob).hexdigest() != named.digest:
            report.problems.append(f"the payload that entry {named.index} names was altered")
            continue
        payloads.checked += 1
        erased_at = [each.index for each in ranges if each.erases(*place)]
        if named_at is not None and named.index < named_at:
            erased_at.append(named_at)
        if erased_at:
            report.problems.append(
                f"entry {erased_at[-1]} says that the payload of entry {named.index} was erased"
            )
        key = data_keys.get(f"{request}/{part}")
        if key is not None:
            try:
                open_payload(blob, f"{report.origin}/{request}/{part}".encode(), key, named.commitment)
                payloads.opened += 1
            except InvalidError as error:
                report.problems.append(f"the payload that entry {named.index} names {error}")


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
    count = f"{len(payloads.named)} named by entries"
    if not payloads.is_looked_at:
        return [f"{count}, not looked at"]
    lines = [f"{count}: {payloads.checked} intact, {payloads.erased} erased, {payloads.opened} opened"]
    if payloads.ahead:
        lines.append(
            f"WARNING: {payloads.ahead} have ids of a time after the newest entry: a clock was ahead"
        )
    return lines + [f"{_show(tenant)} is under a legal hold" for tenant in sorted(payloads.held)]


if __name__ == "__main__":
    sys.exit(main())
