"""
RFC 6962 Merkle tree arithmetic over SHA-256: roots, proofs and their verification.

Pure.  `appliance.audit.verify` implements its part again on purpose, so that it does not repeat a mistake
made here; external vectors pin both.

Source: RFC 6962 section 2.1; verification as spelled out in RFC 9162 section 2.1.4.2.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from appliance.errors import AuditVerificationError

HASH_BYTES = 32
LEVEL_BITS = 8
TILE_WIDTH = 1 << LEVEL_BITS
"""Hashes in a full tile (C2SP tlog-tiles); each is the root of a full tile of the level below."""
EMPTY_ROOT = hashlib.sha256(b"").digest()


def hash_leaf(leaf: bytes) -> bytes:
    """The prefix keeps a leaf from passing as a node."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class CompactRange:
    """
    A tree that grows: its size and the roots of its perfect subtrees, largest first.

    There is one subtree per bit set in the size, so appending costs two hashes on average.
    """

    __slots__ = ("_subtrees", "size")

    def __init__(self, size: int = 0, subtrees: Iterable[bytes] = ()) -> None:
        self.size = size
        self._subtrees = list(subtrees)
        if size < 0 or len(self._subtrees) != size.bit_count():
            raise AuditVerificationError(
                f"{len(self._subtrees)} subtree hashes do not make a tree of size {size}"
            )

    @property
    def subtrees(self) -> tuple[bytes, ...]:
        return tuple(self._subtrees)

    def append(self, leaf_hash: bytes) -> None:
        subtrees, node, size = self._subtrees, leaf_hash, self.size
        while size & 1:
            node = hash_node(subtrees.pop(), node)
            size >>= 1
        subtrees.append(node)
        self.size += 1

    def root(self) -> bytes:
        if not self._subtrees:
            return EMPTY_ROOT
        node = self._subtrees[-1]
        for subtree in reversed(self._subtrees[:-1]):
            node = hash_node(subtree, node)
        return node

    def copy(self) -> Self:
        return type(self)(self.size, self._subtrees)


def root_from_leaf_hashes(leaf_hashes: Iterable[bytes]) -> bytes:
    tree = CompactRange()
    for leaf_hash in leaf_hashes:
        tree.append(leaf_hash)
    return tree.root()


def split_hashes(content: bytes) -> tuple[bytes, ...]:
    """Return the hashes that were stored one after another."""
    return tuple(content[at : at + HASH_BYTES] for at in range(0, len(content), HASH_BYTES))


def path_in_tile(tile: Sequence[bytes], number: int) -> list[bytes]:
    """Return the path from hash `number` of a full tile to its root, the sibling first."""
    path: list[bytes] = []
    while len(tile) > 1:
        path.append(tile[number ^ 1])
        tile, number = list(map(hash_node, tile[::2], tile[1::2])), number // 2
    return path


def root_of_tile(leaf_hash: bytes, number: int, path: Sequence[bytes]) -> bytes:
    """Return the root of a full tile that a path from its hash `number` leads to."""
    node = leaf_hash
    for sibling in path:
        node = hash_node(sibling, node) if number & 1 else hash_node(node, sibling)
        number //= 2
    return node


Hashes = Callable[[int, int, int], Sequence[bytes]]
"""
Reads hashes `start` to `end` of a level: 0 has the leaves', level L the roots of perfect subtrees of
`TILE_WIDTH ** L` leaves.  Fewer than asked for are missing ones.
"""


class HashTree:
    """
    The tree over the first `size` leaves, from hashes that are stored by level; each read is of one tile.

    Roots and proofs read a few tiles of each level, so their cost is logarithmic in the size.  Nothing is
    verified: the caller compares the root with one that it knows.  Methods raise AuditVerificationError if a
    hash is missing, besides what `hashes` raises.
    """

    def __init__(self, size: int, hashes: Hashes) -> None:
        self.size = size
        self._hashes = hashes
        self._tiles: dict[tuple[int, int], Sequence[bytes]] = {}

    def compact(self) -> CompactRange:
        return CompactRange(self.size, self._subtrees(0, self.size))

    def root(self) -> bytes:
        return self.compact().root()

    def inclusion_proof(self, index: int) -> list[bytes]:
        """
        Return the path from a leaf to the root, the leaf's sibling first.

        Raises AuditVerificationError if there is no such leaf.
        """
        if not 0 <= index < self.size:
            raise AuditVerificationError(f"no entry {index} in a tree of size {self.size}")
        path: list[bytes] = []
        start, end = 0, self.size
        while end - start > 1:
            middle = start + _split(end - start)
            if index < middle:
                path.append(self._root(middle, end))
                end = middle
            else:
                path.append(self._root(start, middle))
                start = middle
        path.reverse()
        return path

    def consistency_proof(self, old: int) -> list[bytes]:
        """
        Return the proof that the tree over the first `old` leaves is a prefix of this one.

        Raises AuditVerificationError if the old tree is empty, so there is nothing to prove, or larger.
        """
        if not 0 < old <= self.size:
            raise AuditVerificationError(f"no consistency proof from size {old} to {self.size}")
        proof: list[bytes] = []
        start, end = 0, self.size
        while old != end:
            middle = start + _split(end - start)
            if old <= middle:
                proof.append(self._root(middle, end))
                end = middle
            else:
                proof.append(self._root(start, middle))
                start = middle
        # The subtree both trees share; when it is the whole old tree, the verifier has its root already.
        if start:
            proof.append(self._root(start, end))
        proof.reverse()
        return proof

    def _root(self, start: int, end: int) -> bytes:
        return CompactRange(end - start, self._subtrees(start, end)).root()

    def _subtrees(self, start: int, end: int) -> list[bytes]:
        """Roots of the perfect subtrees of a subtree of this tree, largest first."""
        found: list[bytes] = []
        level = 0
        while start < end:
            # A subtree that does not begin a tile is smaller than one.
            at = start if start % TILE_WIDTH else max(start, end - end % TILE_WIDTH)
            tile = CompactRange()
            for node in self._read(level, at, end):
                tile.append(node)
            found[:0] = tile.subtrees
            if at == start:
                break
            start, end, level = start // TILE_WIDTH, end // TILE_WIDTH, level + 1
        return found

    def _read(self, level: int, start: int, end: int) -> Sequence[bytes]:
        if start == end:
            return ()
        number = start // TILE_WIDTH
        first = number * TILE_WIDTH
        if (level, number) not in self._tiles:
            width = min(TILE_WIDTH, (self.size >> LEVEL_BITS * level) - first)
            tile = self._hashes(level, first, first + width)
            if len(tile) != width:
                raise AuditVerificationError(
                    f"hashes of level {level} are missing between {first} and {first + width}"
                )
            self._tiles[level, number] = tile
        return self._tiles[level, number][start - first : end - first]


def verify_consistency(
    *, old_size: int, new_size: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]
) -> None:
    """
    Check that the old tree is a prefix of the new one; raises AuditVerificationError.

    An empty old tree is refused: it is a prefix of everything, so nothing would be proven.
    """
    if old_size == new_size > 0 and not proof and old_root == new_root:
        return
    if not 0 < old_size < new_size or not proof or any(len(node) != HASH_BYTES for node in proof):
        raise AuditVerificationError(f"malformed consistency proof from size {old_size} to {new_size}")
    path = [old_root, *proof] if old_size.bit_count() == 1 else list(proof)
    position, last = old_size - 1, new_size - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    old_node = new_node = path[0]
    for node in path[1:]:
        if not last:
            raise AuditVerificationError("the consistency proof is too long")
        if position & 1 or position == last:
            old_node, new_node = hash_node(node, old_node), hash_node(node, new_node)
            position, last = _skip_lone(position, last)
        else:
            new_node = hash_node(new_node, node)
        position, last = position >> 1, last >> 1
    if last or old_node != old_root or new_node != new_root:
        raise AuditVerificationError(
            f"the tree of size {old_size} is not shown to be a prefix of the tree of size {new_size}"
        )


def _split(size: int) -> int:
    """Return the largest power of two below `size`: where RFC 6962 divides a tree."""
    return 1 << (size - 1).bit_length() - 1


def _skip_lone(position: int, last: int) -> tuple[int, int]:
    """Climb the levels on which the node is the last and has no sibling."""
    while position and not position & 1:
        position, last = position >> 1, last >> 1
    return position, last
