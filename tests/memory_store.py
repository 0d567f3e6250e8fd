"""
An audit store in memory that can fail on request; it has the same contract as the real ones.
"""

import threading

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange
from appliance.audit.store import Disposal, Head, OpenRequest, gateway_of
from appliance.errors import AuditEntryError, AuditForkError
from tests.tree_proofs import Levels


class MemoryAuditStore:
    """An audit store in memory; it can fail before or after persisting, or wait, on request."""

    def __init__(self):
        self.stored = []
        self.stored_head = Head.of(CompactRange())
        self.checkpoints = {}
        self.seen = {}
        self.commits = []
        self.fail_before = []
        """Errors for the next appends, which change nothing."""
        self.fail_after = []
        """Errors for the next appends, which happen all the same."""
        self.fail_reads = []
        self.fail_checkpoints = []
        self.gate = threading.Event()
        """Appends wait for it."""
        self.gate.set()

    def head(self):
        if self.fail_reads:
            raise self.fail_reads.pop(0)
        return self.stored_head

    def append(self, leaves, *, expected, new):
        assert self.gate.wait(10)
        if self.fail_before:
            raise self.fail_before.pop(0)
        if self.stored_head != expected:
            message = "another writer moved the head"
            raise AuditForkError(message)
        known = {(leaf.type, leaf.request_id) for leaf in self.stored if leaf.request_id}
        for leaf in leaves:
            if (leaf.type, leaf.request_id) in known:
                message = "a request cannot be recorded twice"
                raise AuditEntryError(message)
            if leaf.request_id:
                known.add((leaf.type, leaf.request_id))
        self.stored = [*self.stored, *leaves]
        self.stored_head = new
        self.commits.append(len(leaves))
        if self.fail_after:
            raise self.fail_after.pop(0)

    shared = False

    def append_behind(self, size, make):
        leaves, new = make(self.stored_head, self.stored[size:])
        if leaves:
            self.append(leaves, expected=self.stored_head, new=new)

    def leaves(self, start, end):
        return self.stored[start:end]

    def hashes(self, level, start, end):
        return Levels([leaf.leaf_hash for leaf in self.stored])(level, start, end)

    def accepted_leaves(self):
        return []

    def disposal(self):
        return Disposal()

    def leaf_by_request(self, request_id):
        return [leaf for leaf in self.stored if leaf.request_id == request_id]

    def open_intents(self):
        ended = {leaf.request_id for leaf in self.stored if EntryType(leaf.type).closes_request}
        begun = [leaf.request_id for leaf in self.stored if leaf.type == EntryType.REQUEST_INTENT]
        return [request_id for request_id in begun if request_id not in ended]

    def open_requests(self):
        return [
            OpenRequest(request_id=one, gateway=gateway_of(self.leaf_by_request(one)[0]))
            for one in self.open_intents()
        ]

    def beat(self, gateway, now):
        self.seen = {**self.seen, gateway: now}
        return self.seen

    def writers(self):
        return self.seen

    def save_checkpoint(self, checkpoint):
        if self.fail_checkpoints:
            raise self.fail_checkpoints.pop(0)
        self.checkpoints[checkpoint.size] = checkpoint

    def latest_checkpoint(self):
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    def close(self):
        """Hold nothing."""
