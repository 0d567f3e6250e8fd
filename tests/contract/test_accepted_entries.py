"""Entries on their way into a log that gateways share: refused at once, or never lost, doubled or changed."""

import secrets
import threading

import pytest
from sqlalchemy import create_engine

from appliance.audit import pending_rows
from appliance.audit.durability.drain import RecordedSince
from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.integration import AcceptedRow, accept_after
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import EntryMaker
from appliance.audit.pending_rows import INTEGRATION, Fence, Writing
from appliance.audit.store import Head, Leaf
from appliance.errors import AuditEntryError, AuditForkError, AuditRollbackError
from appliance.infra.lease import SqlLease
from tests.audit_log import ORIGIN
from tests.fakes import until

INTENT, OUTCOME, ABORTED, READ = (
    EntryType.REQUEST_INTENT,
    EntryType.REQUEST_OUTCOME,
    EntryType.REQUEST_ABORTED,
    EntryType.AUDIT_READ,
)
LONG_SECONDS = 3600.0
NOW = 1_800_000_000.0


class SharingGateway:
    """A gateway's part of the store, which knows its own sequence."""

    def __init__(self, store, url, name):
        self.store, self.name = store, name
        registered = store.register(Writing(gateway=name, instance=f"start of {name}"), NOW)
        self.writing, self.end = registered.writing, registered.end
        self.lease = SqlLease(
            url, name=INTEGRATION, holder=self.writing.holder, seconds=LONG_SECONDS, clock=lambda: NOW
        )

    def rows(self, *contents):
        """Rows that follow what it has accepted; an intent names the gateway, as in an entry."""
        end, rows = self.end, []
        for kind, request_id in contents:
            leaf = f'{{"gateway":"{self.name}","what":"{kind} {request_id} {end.seq + 1}"}}'.encode()
            row = AcceptedRow(
                seq=end.seq + 1,
                previous_hash=end.leaf_hash,
                leaf=leaf,
                leaf_hash=hash_leaf(leaf),
                type=kind.value,
                request_id=request_id,
            )
            rows.append(row)
            end = pending_rows.Position(seq=row.seq, leaf_hash=row.leaf_hash)
        return rows, end

    def accept(self, *contents):
        rows, end = self.rows(*contents)
        self.store.accept(self.writing, rows)
        self.end = end
        return rows

    async def lead(self):
        assert await self.lease.hold()
        return Fence(writing=self.writing, lease_epoch=self.lease.epoch)

    def integrate(self, fence, dead=(), silent_since=0.0):
        """Move everything; returns the plan, and who was declared dead."""
        plans = []

        def make(head, newer, plan):
            tree = CompactRange(head.size, head.subtrees)
            plan.extend(tree)
            plans[:] = [plan, tree]
            return Head.of(tree)

        def end_requests(_head, requests):
            tree, leaves = plans[1], []
            for request in requests:
                leaf = f"abort {request.request_id}".encode()
                leaves.append(Leaf.of(tree.size, leaf, ABORTED, request.request_id))
                tree.append(leaves[-1].leaf_hash)
            return leaves, Head.of(tree)

        gone = self.store.integrate(
            self.store.head().size,
            make,
            fence=fence,
            dead=dead,
            silent_since=silent_since,
            end_requests=end_requests,
        )
        return plans[0], gone


@pytest.fixture
def sharing(postgres_url, open_store):
    """Register a gateway, with a store and a lease of its own."""
    made = []

    def sharing_(name):
        made.append(SharingGateway(open_store(postgres_url), postgres_url, name))
        return made[-1]

    yield sharing_
    for one in made:
        one.lease.close()


def _kinds(store):
    return [(leaf.type, leaf.request_id) for leaf in store.leaves(0, 1000)]


async def test_accepted_entries_come_into_the_tree_in_order_and_once(sharing):
    """Of each gateway in the order of its sequence, with their bytes; nothing is left behind."""
    one, two = sharing("one"), sharing("two")
    fence = await two.lead()
    rows = one.accept((INTENT, "a"), (READ, None)) + one.accept((OUTCOME, "a"))
    other = two.accept((INTENT, "b"))
    assert one.store.leaves(0, 100) == []
    assert {leaf.leaf for leaf in one.store.accepted_leaves()} == {row.leaf for row in (*rows, *other)}
    plan, _ = two.integrate(fence)
    leaves = one.store.leaves(0, 100)
    assert [leaf.index for leaf in leaves] == [0, 1, 2, 3]
    assert [leaf.leaf for leaf in leaves[:3]] == [row.leaf for row in rows]
    assert [leaf.leaf_hash for leaf in leaves] == [row.leaf_hash for row in (*rows, *other)]
    assert (one.store.accepted_leaves(), one.store.open_intents(), plan.broken) == ([], ["b"], {})
    assert not two.store.is_waiting()
    plan, _ = two.integrate(fence)
    assert (plan.prefixes, one.store.head().size) == ((), 4)


@pytest.mark.parametrize("integrated", [False, True])
async def test_repeated_entries_and_ends_without_an_intent_are_refused_at_once(sharing, integrated):
    """Whether the first is in the tree or on its way; what came with them is not added, either."""
    one, two = sharing("one"), sharing("two")
    fence = await two.lead()
    one.accept((INTENT, "a"), (INTENT, "b"), (OUTCOME, "b"), (INTENT, "c"))
    if integrated:
        two.integrate(fence)
    before = (one.store.head(), one.store.accepted_leaves())
    for contents in [
        [(READ, None), (INTENT, "a")],
        [(INTENT, "b")],
        [(OUTCOME, "b")],
        [(ABORTED, "b")],
        [(READ, None), (OUTCOME, "unknown")],
        [(INTENT, "x"), (OUTCOME, "x"), (ABORTED, "x")],
    ]:
        with pytest.raises(AuditEntryError):
            one.accept(*contents)
    assert (one.store.head(), one.store.accepted_leaves()) == before
    one.accept((OUTCOME, "a"), (INTENT, "x"), (OUTCOME, "x"))
    two.integrate(fence)
    assert one.store.open_intents() == ["c"]


async def test_only_the_holder_of_the_lease_moves_the_head(sharing):
    """Two gateways that both think they integrate: the older changes nothing, directly or by integrating."""
    one, two = sharing("one"), sharing("two")
    stale = await one.lead()
    await one.lease.release()
    fence = await two.lead()
    one.accept((READ, None))
    tree = CompactRange()
    leaf = Leaf.of(0, b"direct", READ)
    tree.append(leaf.leaf_hash)
    with pytest.raises(AuditForkError):
        one.integrate(stale)
    with pytest.raises(AuditForkError):
        one.store.append([leaf], expected=one.store.head(), new=Head.of(tree), fence=stale)
    assert (one.store.head().size, len(one.store.accepted_leaves())) == (0, 1)
    two.integrate(fence)
    assert one.store.head().size == 1


async def test_a_gateway_declared_dead_writes_nothing_more(sharing, monkeypatch):
    """All its entries come first, then the ends of what it left open; it is fenced off on every way."""
    monkeypatch.setattr(pending_rows, "INTEGRATED_ROWS", 1)
    slow, alive = sharing("slow"), sharing("alive")
    lost = await slow.lead()
    slow.accept((INTENT, "a"), (INTENT, "b"), (OUTCOME, "b"))
    await slow.lease.release()
    fence = await alive.lead()
    assert alive.integrate(fence, ["slow"], silent_since=0.0)[1] == []
    slow.accept((INTENT, "c"))
    _, gone = alive.integrate(fence, ["slow"], silent_since=NOW + 1)
    assert gone == ["slow"]
    assert _kinds(alive.store) == [
        (INTENT, "a"),
        (INTENT, "b"),
        (OUTCOME, "b"),
        (INTENT, "c"),
        (ABORTED, "a"),
        (ABORTED, "c"),
    ]
    for contents in [(OUTCOME, "a"), (INTENT, "d"), (READ, None)]:
        with pytest.raises(AuditForkError, match="declared it dead"):
            slow.accept(contents)
    with pytest.raises(AuditForkError, match="declared it dead"):
        slow.store.register(slow.writing, NOW, again=True)
    await alive.lease.release()
    assert await slow.lease.hold()
    for fence in (lost, Fence(writing=slow.writing, lease_epoch=slow.lease.epoch)):
        with pytest.raises(AuditForkError):
            slow.integrate(fence, ["alive"], silent_since=NOW + 1)
    again = sharing("slow")
    again.accept((INTENT, "d"))
    assert again.writing.epoch > slow.writing.epoch


async def test_an_end_that_is_being_accepted_is_never_followed_by_an_abort(sharing, postgres_url, postgres):
    """The one that declares its gateway dead waits for it, and finds it."""
    slow, alive = sharing("slow"), sharing("alive")
    fence = await alive.lead()
    slow.accept((INTENT, "a"))
    rows, _ = slow.rows((OUTCOME, "a"))
    engine = create_engine(postgres_url.replace("postgresql://", "postgresql+pg8000://"))
    integrating = threading.Thread(
        target=alive.integrate, args=(fence, ["slow"]), kwargs={"silent_since": NOW + 1}
    )
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with engine.connect() as watching:
        with slow.store._writing(turn=False) as connection:
            pending_rows.accept(connection, slow.writing, rows)
            integrating.start()
            await until(lambda: watching.exec_driver_sql(waiting).scalar() > 0)
        integrating.join()
    engine.dispose()
    assert _kinds(alive.store) == [(INTENT, "a"), (OUTCOME, "a")]


async def test_a_commit_in_doubt_cannot_happen_after_the_gateway_registered_again(sharing):
    """So what it finds then is what is there."""
    one = sharing("one")
    before = one.writing
    rows, _ = one.rows((INTENT, "a"))
    registered = one.store.register(one.writing, NOW, again=True)
    assert (registered.writing.epoch, registered.pending) == (before.epoch + 1, ())
    with pytest.raises(AuditForkError):
        one.store.accept(before, rows)
    one.store.accept(registered.writing, rows)
    registered = one.store.register(registered.writing, NOW, again=True)
    assert registered.pending == (rows[0].leaf_hash,)
    assert registered.entries == ((INTENT.value, "a"),)
    assert registered.end.leaf_hash == rows[0].leaf_hash


@pytest.mark.parametrize(
    ("attack", "integrated"),
    [
        ("DELETE FROM audit_pending WHERE seq = 2", 1),
        ("UPDATE audit_pending SET leaf = 'forged' WHERE seq = 2", 1),
        (
            "UPDATE audit_pending SET leaf = 'forged', leaf_hash = sha256('\\x00666f72676564') WHERE seq = 2",
            1,
        ),
        ("UPDATE audit_pending SET seq = 9 WHERE gateway = 'one' AND seq = 1", 0),
    ],
)
async def test_no_entry_after_an_altered_one_is_integrated(
    sharing, execute, postgres_url, attack, integrated
):
    """Those of other gateways are; the gateway itself does not start again on what is left."""
    one, two = sharing("one"), sharing("two")
    fence = await two.lead()
    one.accept((READ, None), (READ, None), (READ, None))
    two.accept((READ, None))
    execute(postgres_url, "DROP TRIGGER audit_pending_no_update ON audit_pending")
    execute(postgres_url, attack)
    plan, _ = two.integrate(fence)
    assert list(plan.broken) == ["one"]
    assert two.store.head().size == integrated + 1
    with pytest.raises(AuditRollbackError, match="removed or changed on their way"):
        sharing("one")


def test_accepted_entries_are_not_changed_by_honest_tools(sharing, execute, postgres_url):
    one = sharing("one")
    one.accept((READ, None))
    for statement in ("UPDATE audit_pending SET leaf = ''", "TRUNCATE audit_pending"):
        with pytest.raises(Exception, match="accepted audit entries are write-once"):
            execute(postgres_url, statement)


async def test_a_spooled_entry_is_recognised_after_it_was_accepted(sharing):
    """It has its place in the sequence then; whether it waits or is in the tree, it is not recorded again."""
    one, two = sharing("one"), sharing("two")
    fence = await two.lead()
    maker = EntryMaker(origin=ORIGIN, clock=lambda: NOW, random_bytes=secrets.token_bytes)
    spooled = maker.make(READ, {"actor": "cli:root", "operation": "tail"})
    one.store.accept(one.writing, accept_after(one.end, [spooled], "one", one.writing.epoch))
    for size in (0, 1):
        assert one.store.head().size == size
        assert RecordedSince.since(one.store, 0).leaf_hashes == {hash_leaf(spooled.leaf)}
        two.integrate(fence)


def test_the_leaf_names_gateway_and_sequence():
    """In the canonical leaf itself: see `appliance.audit.integration.accept_after`."""
    leaf = (
        b'{"actor":"cli:root","epoch":2,"id":"01HZZZZZZZZZZZZZZZZZZZZZZZ","log":"a/b","operation":"tail",'
        b'"sequence":7,"time":"2026-11-20T12:00:00.000Z","type":"audit.read","v":1,"writer":"gw"}'
    )
    assert decode(leaf).fields["sequence"] == 7
    with pytest.raises(AuditEntryError, match="without writer, epoch, sequence"):
        decode(leaf.replace(b'"epoch":2,', b""))
