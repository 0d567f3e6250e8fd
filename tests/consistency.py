"""What must hold of a stored log after every commit, crash and upgrade."""

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, HashTree, hash_leaf
from appliance.audit.store import Head, SqlAuditStore, tiles_of
from tests.tree_proofs import Levels

PAGE = 4096


class AsLeft(SqlAuditStore):
    """A store that adds no hash that is missing."""

    def complete(self, progress=None):
        """Leave it as it is."""


def assert_consistent(store) -> None:
    """Head and tile hashes are exactly those of the leaves, open requests the intents without an end."""
    head, below = store.head(), store.disposal().below
    # A page at a time: the database ends a transaction whose client is busy for seconds.
    pages = range(0, head.size, PAGE)
    leaves = [leaf for start in pages for leaf in store.leaves(start, start + PAGE)]
    tree = HashTree(below, store.hashes).compact() if below else CompactRange()
    for leaf in leaves[sum(leaf.index < below for leaf in leaves) :]:
        assert (leaf.index, leaf.leaf_hash) == (tree.size, hash_leaf(leaf.leaf))
        tree.append(leaf.leaf_hash)
    assert (head, head.subtrees) == (Head.of(tree), tree.subtrees)
    levels = Levels([leaf.leaf_hash for leaf in leaves])
    for level in range(1, len(levels.levels) + 1) if not below else ():
        assert _hashes(store, level) == levels(level, 0, 1_000_000)
    ended = {leaf.request_id for leaf in leaves if EntryType(leaf.type).closes_request}
    begun = [leaf.request_id for leaf in leaves if leaf.type == EntryType.REQUEST_INTENT]
    assert store.open_intents() == [name for name in begun if name not in ended]


def _hashes(store, level):
    if isinstance(store, SqlAuditStore):
        with store._reading() as connection:
            return tiles_of(connection).read(level, 0, 1_000_000)
    return store.hashes(level, 0, 1_000_000)
