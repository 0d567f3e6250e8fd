"""
The values in a store of the audit log, and the `AuditStore` protocol.

Synchronous on purpose: `appliance.audit.log` calls it from one thread; readers (export, command line) open a
store of their own.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The tree as the store has it."""

    size: int
    root: bytes
    subtrees: tuple[bytes, ...] = field(compare=False)
    """Roots of the perfect subtrees, largest first; implied by the leaves, so not compared."""

    @classmethod
    def of(cls, tree: CompactRange) -> Self:
        return cls(size=tree.size, root=tree.root(), subtrees=tree.subtrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One stored leaf; type and request id are copies of members of its bytes, for searches."""

    index: int
    leaf: bytes
    leaf_hash: bytes
    type: str
    request_id: str | None

    @classmethod
    def of(cls, index: int, leaf: bytes, entry_type: EntryType, request_id: str | None = None) -> Self:
        return cls(
            index=index, leaf=leaf, leaf_hash=hash_leaf(leaf), type=entry_type.value, request_id=request_id
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    size: int
    note: str
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    request_id: str
    gateway: str | None
    """Gateway that accepted it; None in entries from before gateways had names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disposal:
    """How far entries were disposed of: their leaves are gone, or may go at any moment."""

    below: int = 0
    """Entries with a smaller index, whole tiles."""
    index: int = 0
    """Of the `audit.disposed` entry, if `below` is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLeaf:
    """A leaf that outlived the disposal of its tile."""

    leaf: Leaf
    path: tuple[bytes, ...]
    """Siblings up to the root of the tile, the leaf's own first; empty for a leaf that should be gone."""


Behind = Callable[[Head, Sequence[Leaf]], tuple[Sequence[Leaf], Head]]
"""Given the stored head and the leaves others added, what to append there and the head it makes."""


class AuditStore(Protocol):
    """
    The log's interface to a database; every method may raise `AuditUnavailableError`.

    A failed `append` or `append_behind` may or may not have happened: read the head to know.
    """

    @property
    def shared(self) -> bool:
        """Whether gateways on other machines may write this log as well."""

    def head(self) -> Head: ...

    def append(self, leaves: Sequence[Leaf], *, expected: Head, new: Head) -> None:
        """
        Add leaves and move the head, in one durable transaction.

        Raises AuditForkError if the head is not `expected`, AuditEntryError if a request is recorded twice:
        nothing was added.
        """

    def append_behind(self, size: int, make: Behind) -> None:
        """
        Append after the entries that others added since the log had `size` entries, in one transaction.

        No other writer appends meanwhile.  If `make` raises, nothing is added; raises AuditEntryError as
        above.
        """

    def leaves(self, start: int, end: int) -> list[Leaf]:
        """Return the leaves with start <= index < end that exist, in order."""

    def hashes(self, level: int, start: int, end: int) -> list[bytes]:
        """Return those hashes of a level that exist, in order: see `appliance.audit.merkle.Hashes`."""

    def accepted_leaves(self) -> list[Leaf]:
        """Return the leaves that are durable and have no index yet: only where gateways share the log."""

    def disposal(self) -> Disposal:
        """Return how far entries were disposed of."""

    def kept(self, start: int, end: int) -> list[KeptLeaf]:
        """Return the leaves with start <= index < end that exist, with their paths, in order."""

    def leaf_by_request(self, request_id: str) -> list[Leaf]:
        """Return everything recorded about one request, in order."""

    def open_intents(self) -> list[str]:
        """Return the ids of requests that have an intent and no end, in order of intent."""

    def open_requests(self) -> list[OpenRequest]:
        """Return the same with the gateway that accepted each."""

    def beat(self, gateway: str, now: float) -> dict[str, float]:
        """Note that a gateway is alive at Unix time `now`; return when each gateway last was."""

    def writers(self) -> dict[str, float]:
        """Return when each gateway that ever wrote was last alive, in Unix time."""

    def save_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Keep a published checkpoint; one of the same size is replaced."""

    def latest_checkpoint(self) -> StoredCheckpoint | None:
        """Return the checkpoint with the largest size, or None."""


def gateway_of(intent: Leaf) -> str | None:
    """Return the gateway that accepted a request, or None if its intent does not name it."""
    name = _members(intent).get("gateway")
    return name if isinstance(name, str) else None


def place_of(leaf: Leaf) -> tuple[str, int] | None:
    """Return in which gateway's sequence an entry is, and its number there; None if in none."""
    if b'"sequence":' not in leaf.leaf:  # nearly all: not parsed
        return None
    writer, number = map(_members(leaf).get, ("writer", "sequence"))
    return (writer, number) if isinstance(writer, str) and isinstance(number, int) else None


def _members(leaf: Leaf) -> dict[str, Any]:
    try:
        members = json.loads(leaf.leaf)
    except (ValueError, RecursionError):
        return {}  # the verifier judges malformed entries
    return members if isinstance(members, dict) else {}
