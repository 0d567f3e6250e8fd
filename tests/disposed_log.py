"""A log of several years in a real database, in which entries of any type and time are written and signed."""

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.entry import Entry, encode, format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange
from appliance.audit.store import Head, Leaf, StoredCheckpoint
from tests.audit_log import intent, outcome

BEGAN_MS = 1_700_000_000_000
STEP_MS = 4 * 3_600_000
"""An entry each four hours: a full tile every six weeks."""
DAY_MS = 86_400_000


class AgedLog:
    """Its own clock moves on with every entry."""

    def __init__(self, store, signer, step_ms=STEP_MS, began_ms=BEGAN_MS):
        self.store, self.signer, self.step_ms, self.began_ms = store, signer, step_ms, began_ms
        head = store.head()
        self.tree = CompactRange(head.size, head.subtrees)

    @property
    def now_ms(self):
        return self.began_ms + self.tree.size * self.step_ms

    @property
    def now(self):
        return format_time(self.now_ms)

    def clock(self):
        return self.now_ms / 1000

    def append(self, *entries):
        """Append entries, each a type and its fields; return the index of the last."""
        before, leaves = self.tree.copy(), []
        for kind, fields in entries:
            number = self.tree.size
            entry = Entry(
                log=self.signer.name,
                id=new_entry_id(self.now_ms, number.to_bytes(10)),
                type=kind,
                time=self.now,
                fields=fields,
            )
            leaves.append(Leaf.of(number, encode(entry), kind, fields.get("request_id")))
            self.tree.append(leaves[-1].leaf_hash)
        self.store.append(leaves, expected=Head.of(before), new=Head.of(self.tree))
        return self.tree.size - 1

    def read(self, count, operation="tail"):
        """Append readings; of an export, one that covers the log so far."""
        for _ in range(count):
            fields = {"actor": "cli:root", "operation": operation, "start": 0, "end": self.tree.size}
            self.append((EntryType.AUDIT_READ, fields))

    def fill(self, count):
        """Append many entries of no consequence in one commit."""
        fields = {"actor": "cli:root", "operation": "tail"}
        self.append(*[(EntryType.AUDIT_READ, fields)] * count)

    def accept(self, writer, number, epoch=1):
        """Append an entry that a gateway accepted, and another put into the log; return its index."""
        place = {"writer": writer, "epoch": epoch, "sequence": number}
        return self.append((EntryType.AUDIT_READ, {"actor": "cli:root", "operation": "tail", **place}))

    def begin(self, number, **fields):
        request = new_entry_id(self.now_ms, number.to_bytes(10))
        self.append((EntryType.REQUEST_INTENT, {**intent(request), **fields}))
        return request

    def end(self, request, **fields):
        self.append((EntryType.REQUEST_OUTCOME, {**outcome(request), **fields}))

    def create_key(self, key="abcd2345", tenant="acme"):
        fields = {"tenant": tenant, "key_id": key, "admin": False, "actor": "cli:root"}
        return self.append((EntryType.KEY_CREATED, fields))

    def sign(self):
        # A head that entries of others moved is followed.
        head = self.store.head()
        self.tree = CompactRange(head.size, head.subtrees)
        body = encode_body(Checkpoint(origin=self.signer.name, size=head.size, root=head.root))
        note = sign_note(body, self.signer.signers, time=self.now_ms // 1000)
        self.store.save_checkpoint(StoredCheckpoint(size=head.size, note=note, time=self.now))
        return note


def aged(store, signer, *, old=1100, straddling=True, accepted=0, **pace):
    """
    A log of `old` entries and enough younger ones to make these older than 183 days; exported, signed.

    One request begins in an early tile and ends in the last one that will be disposed of, one in the first
    that stays.  The gateway named `gateway` has accepted some of the first.
    """
    log = AgedLog(store, signer, **pace)
    log.create_key()
    for number in range(1, accepted + 1):
        log.accept("gateway", number)
    early = log.begin(1)
    log.fill(old // 2)
    log.end(early)
    late = log.begin(2) if straddling else None
    log.fill(old - 40 - log.tree.size)
    if late:
        log.end(late)
    log.fill(183 * DAY_MS // log.step_ms)
    log.read(1, "export")
    log.sign()
    return log


def plan_of(log, before_ms=None, *, files=(), **steps):
    before_ms = before_ms or log.now_ms - 183 * DAY_MS
    return Disposing(store=log.store, **steps).plan(before_ms, now_ms=log.now_ms, files=files)


def record(log, plan):
    """Append and sign the entry of a plan."""
    disposing = Disposing(store=log.store)
    disposing.record(plan, "retention", actor="cli:root", origin=log.signer.name, clock=log.clock)
    log.sign()
    return disposing.recorded()


def dispose(log, before_ms=None):
    """Dispose of all that may be; return the disposal."""
    disposal = record(log, plan_of(log, before_ms))
    list(Disposing(store=log.store).carry_out(disposal))
    return disposal
