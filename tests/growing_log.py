"""A log in a real database that grows and signs when told."""

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.entry import Entry, encode, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.store import Head, Leaf, StoredCheckpoint

TIME = "2026-11-20T12:00:00.000Z"


class Log:
    def __init__(self, store, signer, text=""):
        self.store, self.signer, self.text, self.tree = store, signer, text, CompactRange()
        self.time = TIME

    def grow(self, count):
        before, leaves = self.tree.copy(), []
        for _ in range(count):
            number = self.tree.size
            fields = {"actor": "cli:root", "operation": "tail", "purpose": f"{self.text}{number}"}
            leaf = encode(
                Entry(
                    log=self.signer.name,
                    id=new_entry_id(number, number.to_bytes(10)),
                    type=EntryType.AUDIT_READ,
                    time=self.time,
                    fields=fields,
                )
            )
            leaves.append(
                Leaf(index=number, leaf=leaf, leaf_hash=hash_leaf(leaf), type="audit.read", request_id=None)
            )
            self.tree.append(hash_leaf(leaf))
        self.store.append(leaves, expected=Head.of(before), new=Head.of(self.tree))
        return self.sign()

    def sign(self):
        body = encode_body(Checkpoint(origin=self.signer.name, size=self.tree.size, root=self.tree.root()))
        note = sign_note(body, self.signer.signers, time=1_800_000_000)
        self.store.save_checkpoint(StoredCheckpoint(size=self.tree.size, note=note, time=TIME))
        return note
