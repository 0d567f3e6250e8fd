"""
Reads the log in batches to send: entries up to a signed checkpoint, then the checkpoint.

Only what a checkpoint covers is sent, after the entries were seen to make the root it signs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.audit.checkpoint import Checkpoint, parse_body, parse_note
from appliance.audit.forward.cursor import Cursor, ForwardStore
from appliance.audit.forward.events import Render, checkpoint_event, entry_event, syslog_message
from appliance.audit.merkle import CompactRange, HashTree
from appliance.audit.stored import AuditStore, Leaf, StoredCheckpoint
from appliance.errors import AuditVerificationError

BATCH_ENTRIES = 256
BATCH_CHECKPOINTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    data: bytes
    """Framed messages."""
    tree: CompactRange
    """The tree behind the last entry."""
    cursor: Cursor | None
    """Where sending could resume: at the last checkpoint of the batch, if it has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReader:
    """Every method blocks, and raises AuditUnavailableError if the database cannot be read."""

    store: AuditStore
    forward: ForwardStore
    render: Render
    host: str
    """Of this machine, for the messages."""

    def check(self, cursor: Cursor) -> None:
        """Raise AuditVerificationError if the log no longer has what was forwarded."""
        if not cursor.size:
            return
        stored = self.forward.checkpoint(cursor.size)
        if stored is None or _head(stored).root != cursor.tree.root():
            raise AuditVerificationError(
                f"the log is not the one whose first {cursor.size} entries were forwarded: it was rolled "
                "back or altered; compare it with what the SIEM has"
            )

    def begin(self, cursor: Cursor) -> Cursor:
        """Return where to begin: a destination that never had what was disposed of begins behind it."""
        below = self.store.disposal().below
        if cursor.size >= below:
            return cursor
        size = self.forward.checkpoints(below, 1)[0].size
        tree = HashTree(size, self.store.hashes).compact()
        return Cursor(size=size, subtrees=tree.subtrees, sent=size)

    def next(self, tree: CompactRange) -> Batch | None:
        """What follows `tree`, None if all is sent; raises AuditVerificationError if entries were altered."""
        due = self.forward.checkpoints(tree.size, BATCH_CHECKPOINTS)
        if not due:
            return None
        end = min(tree.size + BATCH_ENTRIES, due[-1].size)
        return self.assemble(tree.copy(), self.store.leaves(tree.size, end), due)

    def again(self, cursor: Cursor) -> bytes:
        """The checkpoint at the cursor, to send it again: it shows a receiver that the log is alive."""
        stored = self.forward.checkpoint(cursor.size)
        return self._message(stored, _head(stored), cursor.tree) if stored else b""

    def assemble(self, tree: CompactRange, leaves: Sequence[Leaf], due: Sequence[StoredCheckpoint]) -> Batch:
        data, cursor, waiting = bytearray(), None, iter(due)
        checkpoint = next(waiting, None)
        for leaf in leaves:
            if leaf.index != tree.size:
                break
            event = entry_event(leaf)
            data += syslog_message(event, self.render, host=self.host)
            tree.append(bytes.fromhex(event.leaf_hash))
            if checkpoint is not None and checkpoint.size == tree.size:
                head = _head(checkpoint)
                if (head.size, head.root) != (tree.size, tree.root()):
                    raise AuditVerificationError(
                        f"entries are not those of the checkpoint of {tree.size}: the database is damaged"
                    )
                data += self._message(checkpoint, head, tree)
                cursor = Cursor(size=tree.size, subtrees=tree.subtrees, sent=tree.size)
                checkpoint = next(waiting, None)
        if not leaves or leaves[-1].index != tree.size - 1:
            raise AuditVerificationError(f"entry {tree.size} is missing: it was signed and is gone")
        return Batch(data=bytes(data), tree=tree, cursor=cursor)

    def _message(self, stored: StoredCheckpoint, head: Checkpoint, tree: CompactRange) -> bytes:
        return syslog_message(checkpoint_event(stored, head, tree), self.render, host=self.host)


def _head(stored: StoredCheckpoint) -> Checkpoint:
    return parse_body(parse_note(stored.note).text)
