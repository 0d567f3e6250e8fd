"""
The auditor's verifier: says whether a log, or a receipt, is what the key's owner signed, and whole.

    python -m appliance.audit.verify EXPORT --key KEY [--held CHECKPOINT] [--json]
    python -m appliance.audit.verify RECEIPT.tlog-proof --leaf LEAF --key KEY

It needs Python and `cryptography`, no network and nothing of ours: this file may be copied out and
run alone.  It therefore repeats, on purpose, the little hashing and parsing that the writer has
too; a mistake there must not be repeated here, and external vectors pin both.  That is also why it
is longer than other files.

The key must come to the auditor by another way than the export does.  Without a checkpoint that
somebody else held (`--held`), a valid log only shows that its operator is consistent.

Exit codes: 0 valid, 10 valid with erased payloads, 1 cannot be used (arguments, files), 2 invalid,
3 diverged from the held checkpoint, 4 incomplete.  It fails closed: what it cannot read is invalid.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FORMAT_VERSION = 1
MAX_LEAF_BYTES = 4096
MAX_FILE_BYTES = 2**25
TILE_WIDTH = 256
HASH_BYTES = 32
ED25519 = 0x01
SHOWN = 20
"""Problems and requests that are listed; the rest is counted."""

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)


class ExitCode(IntEnum):
    """What the process ends with."""

    VALID = 0
    UNUSABLE = 1
    INVALID = 2
    DIVERGED = 3
    INCOMPLETE = 4
    ERASED = 10


MEANINGS = {
    ExitCode.VALID: "valid and complete",
    ExitCode.UNUSABLE: "nothing was verified: arguments or files cannot be used",
    ExitCode.INVALID: "invalid: altered, damaged or not signed with this key",
    ExitCode.DIVERGED: "diverged: not a continuation of the held checkpoint",
    ExitCode.INCOMPLETE: "authentic but incomplete: requests without an end, or an admitted gap",
    ExitCode.ERASED: "valid and complete; payloads were erased, which entries say",
}


class UnusableError(Exception):
    """Arguments or files that cannot be used; nothing was verified."""


class InvalidError(Exception):
    """Evidence that does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The public key, and the origin of the log it signs."""

    name: str
    key_id: bytes
    public_key: Ed25519PublicKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A tree head that was signed."""

    size: int
    root: bytes


@dataclass(slots=True, kw_only=True)
class Report:
    """What was found."""

    subject: str
    origin: str
    size: int = 0
    root: str = ""
    checkpoint_verified: bool = False
    entries_by_type: Counter[str] = field(default_factory=Counter)
    open_requests: dict[str, int] = field(default_factory=dict)
    """Requests with an intent and no end, and the index of the intent."""
    missing_entries: int = 0
    """Entries that `audit.gap` admits are missing."""
    erased_payloads: int = 0
    first_time: str | None = None
    last_time: str | None = None
    held: str | None = None
    """What comparing with the held checkpoint showed, or None without one."""
    diverged: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def gaps(self) -> int:
        """Gaps the log admits."""
        return self.entries_by_type["audit.gap"]

    @property
    def exit_code(self) -> ExitCode:
        """The verdict; the gravest finding decides."""
        if self.problems:
            return ExitCode.INVALID
        if self.diverged:
            return ExitCode.DIVERGED
        if self.open_requests or self.gaps:
            return ExitCode.INCOMPLETE
        return ExitCode.ERASED if self.entries_by_type["erasure"] else ExitCode.VALID


# Keys, notes and tree heads: c2sp.org/signed-note, c2sp.org/tlog-checkpoint.


def parse_key(text: str) -> Key:
    """Read a verifier key, `name+hash+base64`; raises UnusableError."""
    name, _, rest = text.strip().partition("+")
    key_hash, _, encoded = rest.partition("+")
    try:
        material = _base64(encoded)
    except InvalidError:
        material = b""
    if not name or len(material) != 1 + HASH_BYTES or material[0] != ED25519:
        raise UnusableError("the key must read name+hash+base64 and be of type Ed25519")
    key_id = hashlib.sha256(name.encode() + b"\n" + material).digest()[:4]
    if key_id.hex() != key_hash:
        raise UnusableError("the key does not match its own hash: it was altered or mistyped")
    return Key(name=name, key_id=key_id, public_key=Ed25519PublicKey.from_public_bytes(material[1:]))


def verify_note(note: bytes, key: Key) -> Head:
    """Return the tree head in a signed note once its signature is verified; raises InvalidError."""
    try:
        content = note.decode()
    except UnicodeDecodeError as error:
        raise InvalidError("the checkpoint is not text") from error
    text, blank, block = content.rpartition("\n\n")
    if not blank or not block.endswith("\n"):
        raise InvalidError("the checkpoint is no signed note")
    verified = False
    for line in block[:-1].split("\n"):
        dash, name, encoded = (*line.split(" "), "", "")[:3]
        signature = _base64(encoded)
        if dash != "\u2014" or not name or line != f"{dash} {name} {encoded}":
            raise InvalidError("the checkpoint has a malformed signature line")
        if (name, signature[:4]) == (key.name, key.key_id):  # others are witnesses or unknown algorithms
            try:
                key.public_key.verify(signature[4:], f"{text}\n".encode())
            except InvalidSignature as error:
                raise InvalidError("the checkpoint's signature is wrong") from error
            verified = True
    if not verified:
        raise InvalidError("the checkpoint is not signed with this key")
    lines = text.split("\n")
    if len(lines) != 3 or lines[0] != key.name or not _DECIMAL.fullmatch(lines[1]):  # noqa: PLR2004
        raise InvalidError("the checkpoint does not name this log, a size and a root")
    return Head(size=int(lines[1]), root=_hash(lines[2]))


# The tree: RFC 6962, section 2.1.


def hash_leaf(leaf: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """A growing tree: `(height, root)` of its perfect subtrees, largest first."""

    def __init__(self) -> None:
        self.size = 0
        self._subtrees: list[tuple[int, bytes]] = []

    def append(self, node: bytes) -> None:
        """Add one leaf hash."""
        height = 0
        while self._subtrees and self._subtrees[-1][0] == height:
            node = hash_node(self._subtrees.pop()[1], node)
            height += 1
        self._subtrees.append((height, node))
        self.size += 1

    def root(self) -> bytes:
        """Return the root."""
        if not self._subtrees:
            return hashlib.sha256(b"").digest()
        *rest, (_, node) = self._subtrees
        for _, left in reversed(rest):
            node = hash_node(left, node)
        return node


def root_from_path(node: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """Return the root that an inclusion path leads to; raises InvalidError when its length is wrong."""
    if not 0 <= index < size:
        raise InvalidError(f"there is no entry {index} among {size}")
    siblings, last = iter(path), size - 1
    while last:
        # On the right edge a node may have no sibling; it is then handed up as it is.
        if index & 1 or index < last:
            sibling = next(siblings, None)
            if sibling is None:
                raise InvalidError("the receipt's path is too short")
            node = hash_node(sibling, node) if index & 1 else hash_node(node, sibling)
        index, last = index >> 1, last >> 1
    if next(siblings, None) is not None:
        raise InvalidError("the receipt's path is too long")
    return node


# One leaf: canonical JSON (RFC 8785), flat, without floats.


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


# Exports: c2sp.org/tlog-tiles.


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
    """Return the path of a tile or entry bundle."""
    parts = [f"{number % 1000:03d}"]
    while number := number // 1000:
        parts.insert(0, f"x{number % 1000:03d}")
    return f"tile/{level}/{'/'.join(parts)}" + ("" if width == TILE_WIDTH else f".p/{width}")


def verify_export(directory: Path, key: Key, held: Head | None) -> Report:
    """Check a whole log; raises UnusableError when the directory is no export."""
    report = Report(subject="export", origin=key.name)
    note = _read(directory / "checkpoint")
    try:
        head = verify_note(note, key)
    except InvalidError as error:
        report.problems.append(str(error))
        return report
    report.checkpoint_verified, report.size, report.root = True, head.size, _show_hash(head.root)
    tree, entries, tiles = Tree(), EntryCheck(report), TileCheck(directory, report)
    roots = {0: tree.root()}
    try:
        for leaf in read_leaves(directory, head.size):
            entries.see(tree.size, leaf)
            node = hash_leaf(leaf)
            tiles.append(node)
            tree.append(node)
            if held and tree.size == held.size:
                roots[held.size] = tree.root()
    except InvalidError as error:
        report.problems.append(str(error))
        return report
    tiles.finish()
    if tree.root() != head.root:
        report.problems.append("the entries are not the ones that were signed: the root differs")
    if held:
        compare_held(report, held, roots)
    return report


def compare_held(report: Report, held: Head, roots: dict[int, bytes]) -> None:
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
            raise InvalidError(f"{path} is missing, so entries from {start} on are") from error
        at = 0
        for index in range(start, start + width):
            end = at + 2 + int.from_bytes(content[at : at + 2])
            if at + 2 > len(content) or end > len(content):
                raise InvalidError(f"{path} ends before entry {index}")
            yield content[at + 2 : end]
            at = end
        if at != len(content):
            raise InvalidError(f"{path} holds more than its {width} entries")


# Receipts: c2sp.org/tlog-proof.


def verify_receipt(text: bytes, leaf: bytes, key: Key, held: Head | None) -> Report:
    """Check that a receipt shows one leaf to be in the signed log."""
    report = Report(subject="receipt", origin=key.name)
    try:
        _check_receipt(report, text, leaf, key)
    except InvalidError as error:
        report.problems.append(str(error))
    if held and held.size == report.size:
        compare_held(report, held, {held.size: base64.b64decode(report.root)})
    elif held:
        report.held = "of another size: one receipt cannot show consistency, an export can"
    return report


def _check_receipt(report: Report, text: bytes, leaf: bytes, key: Key) -> None:
    content, blank, note = text.partition(b"\n\n")
    header, *lines = content.decode(errors="replace").split("\n")
    if lines and lines[0].startswith("extra "):
        del lines[0]  # not signed, so it means nothing
    word, _, number = lines[0].partition(" ") if lines else ("", "", "")
    if (header, word) != ("c2sp.org/tlog-proof@v1", "index") or not blank or not _DECIMAL.fullmatch(number):
        raise InvalidError("the receipt is no c2sp.org/tlog-proof@v1")
    head = verify_note(note, key)
    report.checkpoint_verified, report.size, report.root = True, head.size, _show_hash(head.root)
    path = [_hash(line) for line in lines[1:]]
    if root_from_path(hash_leaf(leaf), int(number), head.size, path) != head.root:
        raise InvalidError(f"the leaf is not entry {number} of the signed log")
    entry = parse_leaf(leaf, key.name)
    report.entries_by_type[entry["type"]] += 1
    report.first_time = report.last_time = entry["time"]


# The command line.


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
        ("held", report.held or "nothing held: only the operator's consistency was checked"),
        ("open", f"{count} requests without an end" if count else "no request without an end"),
        *(
            ("", f"{_show(name)}, begun by entry {at}")
            for name, at in [*report.open_requests.items()][:SHOWN]
        ),
    ]
    if report.gaps:
        lines.append(("gaps", f"{report.gaps}, admitting {report.missing_entries} missing entries"))
    if report.entries_by_type["erasure"]:
        lines.append(("erased", f"{report.erased_payloads} payloads"))
    lines += [("PROBLEM", _show(problem)) for problem in report.problems[:SHOWN]]
    if len(report.problems) > SHOWN:
        lines.append(("PROBLEM", f"and {len(report.problems) - SHOWN} more"))
    lines.append(("verdict", f"{MEANINGS[report.exit_code]} (exit code {report.exit_code})"))
    return "".join(f"{name:<20} {value}\n" for name, value in lines)


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
        "aborted_requests": report.entries_by_type["request.aborted"],
        "gaps": report.gaps,
        "missing_entries": report.missing_entries,
        "erased_payloads": report.erased_payloads,
        "first_time": report.first_time,
        "last_time": report.last_time,
        "held": report.held,
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
    parser.add_argument("--key", required=True, help="verifier key, or a file that holds it")
    parser.add_argument("--leaf", type=Path, help="the leaf a receipt is for")
    parser.add_argument("--held", type=Path, help="checkpoint kept from earlier, to compare with")
    parser.add_argument("--json", action="store_true", help="report as JSON")
    return parser


def _verify(options: argparse.Namespace) -> Report:
    key_file = Path(options.key)
    try:
        key = parse_key(options.key if "+" in options.key else _read(key_file).decode())
    except UnicodeDecodeError as error:
        raise UnusableError(f"{key_file} holds no verifier key") from error
    held = None
    if options.held:
        try:
            held = verify_note(_read(options.held), key)
        except InvalidError as error:
            raise UnusableError(f"the held checkpoint cannot be used: {error}") from error
    if options.path.is_dir():
        return verify_export(options.path, key, held)
    if options.leaf is None:
        raise UnusableError("a receipt is verified together with its leaf: give --leaf")
    return verify_receipt(_read(options.path), _read(options.leaf), key, held)


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
    """Return text so that it cannot steer the auditor's terminal."""
    return json.dumps(text)[1:-1]


def _show_hash(content: bytes) -> str:
    return base64.b64encode(content).decode()


if __name__ == "__main__":
    sys.exit(main())
