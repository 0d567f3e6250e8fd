"""
Appends to an audit store as the log does, without a log: entries are a type and a request, no JSON.
"""

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.store import Head, Leaf


def leaf_at(index, kind, request_id):
    """A leaf of this type about this request."""
    content = f"{kind} {request_id}".encode()
    return Leaf(
        index=index,
        leaf=content,
        leaf_hash=hash_leaf(content),
        type=kind.value,
        request_id=request_id,
    )


class Grower:
    """One writer, which knows the tree as it left it."""

    def __init__(self, store):
        self.store = store
        self.tree = CompactRange()

    def leaves(self, *contents, tree=None):
        start = (tree or self.tree).size
        return [leaf_at(start + offset, *content) for offset, content in enumerate(contents)]

    def append(self, *contents):
        """Append at the place this writer knows."""
        expected, leaves, tree = Head.of(self.tree), self.leaves(*contents), self.tree.copy()
        for leaf in leaves:
            tree.append(leaf.leaf_hash)
        self.store.append(leaves, expected=expected, new=Head.of(tree))
        self.tree = tree
        return leaves

    def append_behind(self, *contents):
        """Append after entries of others; returns their entries, and those appended."""
        made = []

        def make(head, newer):
            tree = self.tree.copy()
            for leaf in newer:
                tree.append(leaf.leaf_hash)
            assert Head.of(tree) == head
            leaves = self.leaves(*contents, tree=tree)
            for leaf in leaves:
                tree.append(leaf.leaf_hash)
            made.append((newer, leaves, tree))
            return leaves, Head.of(tree)

        self.store.append_behind(self.tree.size, make)
        newer, leaves, self.tree = made[-1]
        return newer, leaves


def append_many(store, grower, count, batch=8192):
    """Append many entries quickly."""
    for at in range(0, count, batch):
        grower.append(*[(EntryType.AUDIT_READ, None)] * min(batch, count - at))
