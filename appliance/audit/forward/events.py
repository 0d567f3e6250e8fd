"""
What is sent for each entry and checkpoint, whatever the format, and the syslog message around it.

The proof is one word of letters, digits, `-`, `_` and `.`, so that it passes collectors that escape
characters: `tlog-leaf.<index>.<hash>.<leaf>.` and `tlog-checkpoint.<size>.<frontier>.<note>.`, the binary
parts in base64url without padding.  The last dot shows that nothing was cut off.  A frontier is the roots of
the perfect subtrees at that size: with it, a receiver that has nothing older continues from this checkpoint.
`appliance.audit.verify` reads these words.  Pure.

Sources: RFC 5424 (message), RFC 5425 section 4.3 (framing).
"""

import json
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any, Protocol

from appliance.audit.checkpoint import Checkpoint
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.stored import Leaf, StoredCheckpoint

CHECKPOINT = "checkpoint"
"""Type of an event that carries a checkpoint; no entry type is called so."""
MAX_MESSAGE_BYTES = 8192
"""Receivers must take 2048 and should take 8192 (RFC 5425); rsyslog takes 8192 if not told otherwise."""
PRODUCT, VENDOR = "sovereign-appliance", "Sovereign Appliance"
_FACILITY = 13  # log audit
_NONE = "-"


class Severity(IntEnum):
    """With the numbers of OCSF's `severity_id`."""

    INFORMATIONAL = 1
    LOW = 2
    MEDIUM = 3
    HIGH = 4

    @property
    def syslog(self) -> int:
        return 7 - self


_SEVERITIES = {
    EntryType.REQUEST_ABORTED: Severity.LOW,
    EntryType.REQUEST_DENIED: Severity.LOW,
    EntryType.CALLERS_REFUSED: Severity.MEDIUM,
    EntryType.WORKER_FAILED: Severity.MEDIUM,
    EntryType.AUDIT_GAP: Severity.HIGH,
}
_EGRESS = {"closed": Severity.INFORMATIONAL, "inconclusive": Severity.MEDIUM, "open": Severity.HIGH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    type: str
    """Entry type, or CHECKPOINT."""
    index: int
    """Index of the entry; of a checkpoint, how many entries it covers."""
    time: str | None
    """As in entries; None if an altered entry has none."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The entry; of a checkpoint, what it states."""
    leaf_hash: str = ""
    """In hex; empty for a checkpoint."""
    evidence: str

    @property
    def severity(self) -> Severity:
        if self.type == EntryType.EGRESS_ATTESTED:
            return _EGRESS.get(str(self.fields.get("result")), Severity.HIGH)
        return _SEVERITIES.get(self.type, Severity.INFORMATIONAL)  # type: ignore[call-overload, no-any-return]

    @property
    def milliseconds(self) -> int:
        """Its time since 1970; 0 if it has none."""
        try:
            return int(datetime.fromisoformat(self.time or "").timestamp() * 1000)
        except ValueError:
            return 0


class Render(Protocol):
    """A format: text of an event; `short` leaves out all but what every event has."""

    def __call__(self, event: Event, *, short: bool) -> str: ...


def entry_event(leaf: Leaf) -> Event:
    """The event of an entry; an altered one is sent as it is, for the receiver to judge."""
    try:
        fields = json.loads(leaf.leaf)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        fields = {}
    digest = hash_leaf(leaf.leaf)
    return Event(
        type=leaf.type,
        index=leaf.index,
        time=_proper_time(fields.get("time")),
        fields=fields,
        leaf_hash=digest.hex(),
        evidence=f"tlog-leaf.{leaf.index}.{_word(digest)}.{_word(leaf.leaf)}.",
    )


def checkpoint_event(stored: StoredCheckpoint, checkpoint: Checkpoint, tree: CompactRange) -> Event:
    """The event of a checkpoint; `tree` is the tree it covers."""
    frontier = b"".join(tree.subtrees)
    root = b64encode(checkpoint.root).decode()
    return Event(
        type=CHECKPOINT,
        index=checkpoint.size,
        time=_proper_time(stored.time),
        fields={"log": checkpoint.origin, "root": root, "size": checkpoint.size},
        evidence=f"tlog-checkpoint.{checkpoint.size}.{_word(frontier)}.{_word(stored.note.encode())}.",
    )


def render_json(event: Event, *, short: bool) -> str:
    """The entry as it is in the log, with index and hash."""
    document: dict[str, Any] = {"type": event.type, "index": event.index}
    if event.leaf_hash:
        document["leaf_hash"] = event.leaf_hash
    if not short:
        document["entry" if event.leaf_hash else CHECKPOINT] = event.fields
    return json.dumps({**document, "evidence": event.evidence}, separators=(",", ":"))


def syslog_message(event: Event, render: Render, *, host: str) -> bytes:
    """One framed message; of an event that would be too long, only its proof and what every event has."""
    name = event.type if len(event.type) <= 32 and _is_printable(event.type) else _NONE  # noqa: PLR2004 - RFC 5424
    place = host if 0 < len(host) <= 255 and _is_printable(host) else _NONE  # noqa: PLR2004 - RFC 5424
    priority = _FACILITY * 8 + event.severity.syslog
    head = f"<{priority}>1 {event.time or _NONE} {place} {PRODUCT} - {name} - "
    message = (head + render(event, short=False)).encode(errors="replace")
    if len(message) > MAX_MESSAGE_BYTES:
        message = (head + render(event, short=True)).encode(errors="replace")
    return b"%d " % len(message) + message


def _proper_time(time: object) -> str | None:
    try:
        datetime.fromisoformat(str(time))
    except ValueError:
        return None
    return str(time) if _is_printable(str(time)) else None


def _is_printable(text: str) -> bool:
    """Whether syslog takes it in a header: ASCII without spaces."""
    return all("!" <= character <= "~" for character in text)


def _word(content: bytes) -> str:
    return urlsafe_b64encode(content).decode().rstrip("=")
