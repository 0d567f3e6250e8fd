"""
Which accepted entries come into the tree next, and whether a gateway's own came in unchanged.

Gateways that share a log accept entries into a table, each its own sequence without gaps in which every row
has the hash of the one before.  One of them integrates: it moves rows into the tree.  Pure.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from appliance.audit.entry import JSON, encode
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import Pending
from appliance.audit.stored import Head, Leaf
from appliance.errors import AuditForkError

FIRST_HASH = bytes(32)
"""What the first entry of a gateway has for the hash of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a gateway's sequence is integrated."""

    seq: int = 0
    leaf_hash: bytes = FIRST_HASH


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRow:
    """An accepted entry as the database has it, without its content."""

    gateway: str
    seq: int
    epoch: int
    previous_hash: bytes
    leaf_hash: bytes
    sound: bool = True
    """Whether the stored leaf has this hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Rows of one gateway without a gap between them, to come into the tree."""

    gateway: str
    rows: tuple[PendingRow, ...]

    @property
    def first(self) -> int:
        return self.rows[0].seq

    @property
    def last(self) -> PendingRow:
        return self.rows[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    prefixes: tuple[Prefix, ...]
    ends: Mapping[str, Position]
    """How far the sequences of gateways come with it, by gateway."""
    broken: Mapping[str, str]
    """The first reason why a gateway's rows do not follow one another, by gateway."""

    def extend(self, tree: CompactRange) -> None:
        for prefix in self.prefixes:
            for row in prefix.rows:
                tree.append(row.leaf_hash)


def plan_integration(
    positions: Mapping[str, Position], rows: Iterable[PendingRow], final: Collection[str] = ()
) -> Plan:
    """
    Take of each gateway the rows that continue its sequence, in order, up to the first that does not.

    Of the `final` gateways, which accept nothing more, what follows is taken as well, without rows that were
    changed: the numbers in the entries show what is missing.  Rows of a gateway come in order of sequence;
    those of a gateway without a position are left.
    """
    rows = list(rows)
    # Where the next row of a gateway has to continue: behind a break it may be later, after any row.
    ends, epochs = dict(positions), dict.fromkeys(positions, 0)
    settled: dict[str, Position] = {}
    runs: dict[str, list[list[PendingRow]]] = {}
    broken: dict[str, str] = {}
    for row, after in zip_longest(rows, rows[1:]):
        gateway = row.gateway
        if gateway not in ends or (gateway in broken and gateway not in final):
            continue
        end = ends[gateway]
        why = _break(end, epochs[gateway], row, after)
        if why is not None:
            broken.setdefault(gateway, why)
        if gateway in final:
            settled[gateway] = Position(seq=row.seq, leaf_hash=row.leaf_hash)
        if why is not None and not (gateway in final and why == _missing(end)):
            continue
        if not (found := runs.setdefault(gateway, [])) or row.seq != end.seq + 1:
            found.append([])
        found[-1].append(row)
        ends[gateway] = settled[gateway] = Position(seq=row.seq, leaf_hash=row.leaf_hash)
        epochs[gateway] = row.epoch
    prefixes = [Prefix(gateway=name, rows=tuple(run)) for name, found in runs.items() for run in found]
    return Plan(prefixes=tuple(prefixes), ends=settled, broken=broken)


def _break(end: Position, epoch: int, row: PendingRow, after: PendingRow | None) -> str | None:
    if not row.sound or (after is not None and _contradicts(row, after)):
        return f"accepted entry {row.seq} was changed"
    if row.epoch < epoch or row.seq <= end.seq:
        return f"accepted entry {row.seq} is of an older start than the one before it"
    if row.seq != end.seq + 1:
        return _missing(end)
    if row.previous_hash != end.leaf_hash:
        return f"accepted entry {row.seq} does not follow the one before it"
    return None


def _missing(end: Position) -> str:
    return f"accepted entry {end.seq + 1} is missing"


def _contradicts(row: PendingRow, after: PendingRow) -> bool:
    return (after.gateway, after.seq) == (row.gateway, row.seq + 1) and after.previous_hash != row.leaf_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRow:
    """An entry on its way into the table of accepted entries."""

    seq: int
    previous_hash: bytes
    leaf: bytes
    leaf_hash: bytes
    type: str
    request_id: str | None


def accept_after(end: Position, taken: Sequence[Pending], gateway: str, epoch: int) -> list[AcceptedRow]:
    """Give entries their place in the gateway's sequence; raises AuditEntryError if one is too long."""
    rows: list[AcceptedRow] = []
    for pending in taken:
        place: dict[str, JSON] = {"writer": gateway, "epoch": epoch, "sequence": end.seq + 1}
        leaf = encode(replace(pending.entry, fields={**pending.entry.fields, **place}))
        row = AcceptedRow(
            seq=end.seq + 1,
            previous_hash=end.leaf_hash,
            leaf=leaf,
            leaf_hash=hash_leaf(leaf),
            type=pending.type.value,
            request_id=pending.request_id,
        )
        rows.append(row)
        end = Position(seq=row.seq, leaf_hash=row.leaf_hash)
    return rows


def place_after(tree: CompactRange, taken: Sequence[Pending]) -> tuple[tuple[Leaf, ...], CompactRange]:
    """Give entries their indexes after `tree`; returns their leaves, and the tree with them."""
    tree, leaves = tree.copy(), []
    for pending in taken:
        leaf = Leaf.of(tree.size, pending.leaf, pending.type, pending.request_id)
        tree.append(leaf.leaf_hash)
        leaves.append(leaf)
    return tuple(leaves), tree


def without_request(taken: Iterable[Pending], begun: Collection[str]) -> list[Pending]:
    """Return the ends among these entries of requests that are neither `begun` nor begun by one before."""
    found, known = [], set(begun)
    for pending in taken:
        request_id = pending.request_id
        if request_id is None:
            continue
        if pending.type is EntryType.REQUEST_INTENT:
            known.add(request_id)
        elif pending.type.closes_request:
            if request_id not in known:
                found.append(pending)
            known.discard(request_id)
    return found


def left_open(placed: Iterable[str], pending: Iterable[tuple[str, str | None]]) -> list[str]:
    """
    Return the requests without an end, oldest first: open in the tree, or begun by an entry behind it.

    `pending` has type and request of the entries that are not integrated, in order.
    """
    found = dict.fromkeys(placed)
    for kind, request_id in pending:
        if request_id is None:
            continue
        if kind == EntryType.REQUEST_INTENT:
            found[request_id] = None
        elif EntryType(kind).closes_request:
            found.pop(request_id, None)
    return list(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEntry:
    """An own entry that is durable and was not in the tree when that was last read."""

    leaf_hash: bytes
    placed: "asyncio.Future[int]"
    since: float
    """When it was accepted, in seconds of the event loop's clock."""


class FollowedLog:
    """
    The tree as a gateway has read it, and its own entries that it has not found there yet.

    Checkpoints of others are compared with it in the order of their sizes.
    """

    def __init__(self, tree: CompactRange) -> None:
        self.tree = tree
        # Older checkpoints cannot be compared with it any more; `recover` has done that.
        self._signed = tree.copy()
        self._since: list[bytes] = []
        self.waiting: deque[WaitingEntry] = deque()

    @property
    def head(self) -> Head:
        return Head.of(self.tree)

    def accepted(self, entries: Iterable[WaitingEntry]) -> None:
        self.waiting.extend(entries)

    def own_appended(self, leaves: Iterable[Leaf], tree: CompactRange) -> None:
        """Follow what this gateway itself has put into the tree."""
        self._since += [leaf.leaf_hash for leaf in leaves]
        self.tree = tree

    def extended(self, leaf_hashes: Sequence[bytes], head: Head) -> CompactRange:
        """Return the tree with these after it; raises AuditForkError unless they make `head`."""
        tree = self.tree.copy()
        for leaf_hash in leaf_hashes:
            tree.append(leaf_hash)
        found = Head.of(tree)
        if (found, found.subtrees) != (head, head.subtrees):
            raise AuditForkError(
                f"the audit log has size {head.size}, and is not the log of size {self.tree.size} that this "
                "writer knows with entries appended: stop the gateway and compare it with a backup"
            )
        return tree

    def follow(self, leaf_hashes: Sequence[bytes], tree: CompactRange) -> int:
        """
        Apply what others put into the tree; returns how many entries of this gateway were among it.

        Raises AuditForkError if they are not in the order in which they were accepted.
        """
        index, found = self.tree.size, 0
        mine = {entry.leaf_hash for entry in self.waiting}
        for offset, leaf_hash in enumerate(leaf_hashes):
            if leaf_hash not in mine:
                continue
            if not self.waiting or self.waiting[0].leaf_hash != leaf_hash:
                raise AuditForkError(
                    f"entry {index + offset} of the audit log was accepted by this gateway after others that "
                    "are not in the log: stop the gateway and compare the log with a backup"
                )
            entry = self.waiting.popleft()
            found += 1
            if not entry.placed.done():
                entry.placed.set_result(index + offset)
        self._since += leaf_hashes
        self.tree = tree
        return found

    def require_pending(self, stored: Collection[bytes]) -> None:
        """Raise AuditForkError unless what waits was among the rows `stored` before the tree was read."""
        missing = sum(entry.leaf_hash not in stored for entry in self.waiting)
        if missing:
            raise AuditForkError(
                f"{missing} entries that this gateway accepted are neither in the log nor waiting for it: "
                "they were removed or changed; stop the gateway and compare the log with a backup"
            )

    def require_integrated(self, since: float, seconds: float, now: float) -> None:
        """Raise AuditForkError if an entry waits for longer; `since` is when the database last came back."""
        if self.waiting and now - max(self.waiting[0].since, since) > seconds:
            raise AuditForkError(
                f"an accepted entry of this gateway did not come into the audit log within {seconds:g} s: "
                "it was removed or changed, or no gateway integrates; compare the log with a backup"
            )

    def signed_here(self) -> None:
        """Note that this gateway has signed the tree as it is."""
        self._signed = self.tree.copy()
        self._since.clear()

    def adopt(self, size: int, root: bytes) -> bool:
        """
        Compare a checkpoint with the tree; False if it is not newer than the last one, or ahead of the tree.

        Raises AuditForkError if it is of another tree.
        """
        if not self._signed.size < size <= self.tree.size:
            return False
        count = size - self._signed.size
        for leaf_hash in self._since[:count]:
            self._signed.append(leaf_hash)
        del self._since[:count]
        if self._signed.root() != root:
            raise AuditForkError(
                f"the audit log's checkpoint of {size} entries is not of the log that this gateway knows: "
                "stop the gateway and compare the log with a backup"
            )
        return True
