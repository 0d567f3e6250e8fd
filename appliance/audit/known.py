"""
The log as one writer knows it: its tree, and its requests without an end.

Other gateways may append to the same log.  Their entries are accepted only if their hashes, computed here,
make exactly the head in the store; anything else is a fork.  Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import Pending
from appliance.audit.store import Head, Leaf, OpenRequest, gateway_of
from appliance.errors import AuditForkError

_ENDS = frozenset(kind.value for kind in EntryType if kind.closes_request)
_INTENT = EntryType.REQUEST_INTENT.value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEntries:
    placed: tuple[tuple[Pending, Leaf], ...]
    refused: tuple[Pending, ...]
    """Ends of requests that have an end already: another gateway considered this one dead."""
    tree: CompactRange
    head: Head

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for _, leaf in self.placed)


class KnownLog:
    """Tree and open requests; changed only by `follow` and `commit`."""

    def __init__(self, tree: CompactRange, open_requests: Iterable[OpenRequest] = ()) -> None:
        self.tree, self.head = tree, Head.of(tree)
        self.open = {request.request_id: request.gateway for request in open_requests}
        """Gateway that accepted each request without an end, in order of intent."""

    def extended(self, newer: Sequence[Leaf], head: Head) -> CompactRange:
        """Return the tree with `newer` leaves; raises AuditForkError unless they make `head`."""
        tree = self.tree.copy()
        for leaf in newer:
            if leaf.index != tree.size or hash_leaf(leaf.leaf) != leaf.leaf_hash:
                break
            tree.append(leaf.leaf_hash)
        found = Head.of(tree)
        if (found, found.subtrees) != (head, head.subtrees):
            raise AuditForkError(
                f"the audit log has size {head.size}, and is not the log of size {self.head.size} that this "
                "writer knows with entries appended: stop the gateway and compare it with a backup"
            )
        return tree

    def place(
        self, taken: Sequence[Pending], tree: CompactRange, newer: Sequence[Leaf] = ()
    ) -> PlacedEntries:
        """Give entries their indexes after `tree`, which is the known tree with `newer` appended."""
        tree, placed, refused = tree.copy(), [], []
        begun = {leaf.request_id for leaf in newer if leaf.type == _INTENT}
        ended = {leaf.request_id for leaf in newer if leaf.type in _ENDS}
        for pending in taken:
            request_id = pending.request_id
            if pending.type.closes_request:
                if request_id in ended or (request_id not in begun and request_id not in self.open):
                    refused.append(pending)
                    continue
                ended.add(request_id)
            elif pending.type is EntryType.REQUEST_INTENT:
                begun.add(request_id)
            leaf = Leaf.of(tree.size, pending.leaf, pending.type, request_id)
            tree.append(leaf.leaf_hash)
            placed.append((pending, leaf))
        return PlacedEntries(placed=tuple(placed), refused=tuple(refused), tree=tree, head=Head.of(tree))

    def follow(self, newer: Sequence[Leaf], tree: CompactRange) -> list[str]:
        """Apply the entries of others; return the requests that they end."""
        ended = []
        for leaf in newer:
            if leaf.request_id is None:
                continue
            if leaf.type == _INTENT:
                self.open[leaf.request_id] = gateway_of(leaf)
            elif leaf.type in _ENDS:
                self.open.pop(leaf.request_id, None)
                ended.append(leaf.request_id)
        self.tree, self.head = tree, Head.of(tree)
        return ended

    def commit(self, batch: PlacedEntries) -> None:
        for pending, leaf in batch.placed:
            if leaf.request_id is None:
                continue
            if leaf.type == _INTENT:
                gateway = pending.entry.fields.get("gateway")
                self.open[leaf.request_id] = gateway if isinstance(gateway, str) else None
            elif leaf.type in _ENDS:
                self.open.pop(leaf.request_id, None)
        self.tree, self.head = batch.tree, batch.head

    def open_of(self, gateways: Iterable[str | None]) -> list[str]:
        """Return the requests without an end that one of these gateways accepted, oldest first."""
        wanted = set(gateways)
        return [request_id for request_id, gateway in self.open.items() if gateway in wanted]


def silent_gateways(
    open_requests: Iterable[str | None], seen: dict[str, float], *, now: float, seconds: float
) -> set[str | None]:
    """
    Return those of the gateways without a heartbeat for `seconds`, without any, or without a name.

    A gateway writes a heartbeat before its first intent, so one without any has stopped.
    """
    return {
        gateway
        for gateway in open_requests
        if gateway is None or gateway not in seen or now - seen[gateway] > seconds
    }
