"""
One suite for every audit store: the fake in memory, SQLite, and a real PostgreSQL.

Promises of persistent databases only follow, on SQLite and on PostgreSQL.
"""

import threading

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.store import Head, StoredCheckpoint
from appliance.errors import AuditEntryError, AuditForkError
from tests.consistency import assert_consistent
from tests.grower import Grower, append_many

INTENT, OUTCOME, ABORTED, READ = (
    EntryType.REQUEST_INTENT,
    EntryType.REQUEST_OUTCOME,
    EntryType.REQUEST_ABORTED,
    EntryType.AUDIT_READ,
)


def test_a_new_store_holds_the_empty_tree(store):
    """Size 0 and the hash of nothing."""
    head = store.head()
    assert (head, head.subtrees) == (Head.of(CompactRange()), ())
    assert store.latest_checkpoint() is None
    assert store.hashes(0, 0, 10) == store.leaves(0, 10) == store.open_intents() == []


def test_appended_leaves_come_back_in_order(store):
    """Bytes, hashes, type, request and head are what was appended."""
    grower = Grower(store)
    leaves = grower.append((INTENT, "a"), (READ, None)) + grower.append((OUTCOME, "a"))
    assert store.leaves(0, 100) == leaves
    assert store.leaves(1, 2) == leaves[1:2]
    assert store.hashes(0, 0, 100) == [leaf.leaf_hash for leaf in leaves]
    assert store.hashes(0, 0, 2) == [leaf.leaf_hash for leaf in leaves[:2]]
    assert store.leaf_by_request("a") == [leaves[0], leaves[2]]
    head = store.head()
    assert (head, head.subtrees) == (Head.of(grower.tree), grower.tree.subtrees)


def test_a_writer_with_an_old_head_is_refused(store):
    """Two writers that both think they are alone: one of them stops."""
    first, second = Grower(store), Grower(store)
    first.append((READ, None))
    with pytest.raises(AuditForkError):
        second.append((INTENT, "b"))
    assert store.head().size == 1
    assert store.open_intents() == []


def test_a_writer_with_the_right_size_and_another_root_is_refused(store):
    """The root is compared too: a rewritten log of equal length is another log."""
    first, second = Grower(store), Grower(store)
    first.append((READ, None))
    second.tree.append(hash_leaf(b"something else"))
    with pytest.raises(AuditForkError):
        second.append((READ, None))


def test_a_request_cannot_be_recorded_twice(store):
    """A second intent or outcome changes nothing, and neither do the leaves next to it."""
    grower = Grower(store)
    grower.append((INTENT, "a"), (OUTCOME, "a"))
    for kind in (INTENT, OUTCOME):
        with pytest.raises(AuditEntryError):
            grower.append((READ, None), (kind, "a"))
    assert store.head() == Head.of(grower.tree)
    assert len(store.leaves(0, 100)) == 2
    grower.append((READ, None), (READ, None))


def test_open_intents_are_those_without_an_end(store):
    """The requests that a restart has to close, oldest first."""
    grower = Grower(store)
    grower.append((INTENT, "z"), (INTENT, "b"), (INTENT, "c"), (INTENT, "a"))
    grower.append((OUTCOME, "b"), (ABORTED, "c"), (READ, None))
    assert store.open_intents() == ["z", "a"]


def test_the_latest_checkpoint_is_the_largest(store):
    """Order of saving does not matter, and the same size is replaced."""
    for size, note in ((5, "five"), (3, "three"), (5, "five again")):
        store.save_checkpoint(StoredCheckpoint(size=size, note=note, time="t"))
    assert store.latest_checkpoint() == StoredCheckpoint(size=5, note="five again", time="t")


def test_tile_hashes_are_those_of_the_leaves_wherever_batches_end(store):
    """Alone and behind others, in batches that end before, at and after full tiles."""
    grower = Grower(store)
    for number, count in enumerate((255, 1, 1, 254, 300, 1, 700)):
        append = grower.append_behind if number % 2 else grower.append
        append(*[(READ, None)] * count)
        assert_consistent(store)
    assert len(store.hashes(1, 0, 100)) == 5
    append_many(store, grower, 65_536)
    assert_consistent(store)
    assert len(store.hashes(2, 0, 100)) == 1


def test_open_requests_follow_intents_and_ends_on_every_way_to_append(store):
    first, second = Grower(store), Grower(store)
    first.append((INTENT, "a"), (INTENT, "b"), (OUTCOME, "b"))
    second.append_behind((INTENT, "c"), (ABORTED, "a"), (READ, None))
    first.append_behind((INTENT, "d"))
    assert store.open_intents() == ["c", "d"]
    assert_consistent(store)


def test_an_append_behind_others_sees_all_they_added(store):
    """The slower writer gets the entries of the others, and appends after them."""
    first, second = Grower(store), Grower(store)
    theirs = first.append((INTENT, "a"), (READ, None))
    newer, mine = second.append_behind((INTENT, "b"))
    assert (list(newer), [leaf.index for leaf in mine]) == (theirs, [2])
    newer, _ = first.append_behind((OUTCOME, "a"))
    assert list(newer) == mine
    assert [leaf.request_id for leaf in store.leaves(0, 10)] == ["a", None, "b", "a"]
    assert store.head() == Head.of(first.tree)


def test_an_append_behind_others_may_add_nothing(store):
    """Already recorded outcomes are not written again."""
    Grower(store).append((READ, None))
    seen = []
    store.append_behind(0, lambda head, newer: seen.append((head.size, len(newer))) or ((), head))
    assert seen == [(1, 1)]
    assert store.head().size == 1


def test_append_that_refuses_newer_entries_changes_nothing(store):
    """A log that is not the known one with entries added is not written to."""
    Grower(store).append((READ, None))
    before = store.head()

    def refuse(_head, _newer):
        message = "another history"
        raise AuditForkError(message)

    with pytest.raises(AuditForkError, match="another history"):
        store.append_behind(0, refuse)
    assert store.head() == before


def test_a_request_cannot_be_recorded_twice_behind_others_either(store):
    """The refusal names the entry, not the log, so the writer continues."""
    first, second = Grower(store), Grower(store)
    first.append((INTENT, "a"))
    with pytest.raises(AuditEntryError):
        second.append_behind((INTENT, "a"))
    assert store.head().size == 1


def test_gateways_are_visible_to_each_other(store):
    """Each records when it was last alive; every gateway sees all of them."""
    assert store.writers() == {}
    assert store.beat("one", 10.0) == {"one": 10.0}
    store.beat("two", 11.5)
    assert store.beat("one", 20.0) == store.writers() == {"one": 20.0, "two": 11.5}


def test_open_requests_name_their_gateway(store):
    """A starting gateway can tell its own from others'; old entries name none."""
    tree, leaves = CompactRange(), []
    for content, request_id in (
        (b'{"gateway":"one","request_id":"a"}', "a"),
        (b'{"request_id":"b"}', "b"),
        (b"no JSON", "c"),
    ):
        leaf = Grower(store).leaves((INTENT, request_id), tree=tree)[0]
        leaves.append(
            type(leaf)(
                index=leaf.index,
                leaf=content,
                leaf_hash=hash_leaf(content),
                type=leaf.type,
                request_id=request_id,
            )
        )
        tree.append(leaves[-1].leaf_hash)
    store.append(leaves, expected=Head.of(CompactRange()), new=Head.of(tree))
    assert [(one.request_id, one.gateway) for one in store.open_requests()] == [
        ("a", "one"),
        ("b", None),
        ("c", None),
    ]


def test_appended_entries_are_visible_to_another_connection(url, open_store):
    """A reader in another process sees what was acknowledged."""
    Grower(open_store(url)).append((INTENT, "a"))
    reader = open_store(url)
    assert reader.head().size == 1
    assert reader.open_intents() == ["a"]


def test_writers_that_append_at_the_same_time_leave_one_log(url, open_store):
    """Four writers, each behind all the others: every entry is there once, and the tree is one."""
    writers, rounds = 4, 15
    barrier = threading.Barrier(writers)
    failures = []

    def write(name):
        grower = Grower(open_store(url))
        barrier.wait()
        try:
            for number in range(rounds):
                grower.append_behind((INTENT, f"{name}-{number}"), (OUTCOME, f"{name}-{number}"))
        except Exception as error:  # noqa: BLE001 - it fails the test, below
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    reader = open_store(url)
    leaves = reader.leaves(0, 10_000)
    assert [leaf.index for leaf in leaves] == list(range(2 * writers * rounds))
    tree = CompactRange()
    for leaf in leaves:
        tree.append(hash_leaf(leaf.leaf))
    assert Head.of(tree) == reader.head()
    assert reader.open_intents() == []
    assert len({leaf.request_id for leaf in leaves}) == writers * rounds


def test_of_concurrent_writers_with_one_head_one_succeeds(url, open_store):
    """All know the same head and none reads again: the comparison lets one of them through."""
    writers = 4
    barrier = threading.Barrier(writers)
    results = []

    def write(name):
        grower = Grower(open_store(url))
        barrier.wait()
        try:
            grower.append((INTENT, str(name)))
        except AuditForkError:
            results.append("fork")
        else:
            results.append("appended")

    threads = [threading.Thread(target=write, args=(name,)) for name in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["appended"] + ["fork"] * (writers - 1)
    assert open_store(url).head().size == 1


def test_checkpoints_of_several_gateways_do_not_collide(url, open_store):
    """Two that sign the same head at the same moment both succeed."""
    stores = [open_store(url) for _ in range(3)]
    barrier = threading.Barrier(len(stores))
    failures = []

    def publish(store):
        try:
            for size in range(20):
                barrier.wait()
                store.save_checkpoint(StoredCheckpoint(size=size, note=f"note {size}", time="t"))
        except Exception as error:  # noqa: BLE001 - it fails the test, below
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert stores[0].latest_checkpoint().size == 19


def test_a_head_set_back_by_hand_leads_to_no_leaf_being_overwritten(url, open_store, execute):
    """Leaves beyond the head are a fork for every writer."""
    store = open_store(url)
    grower = Grower(store)
    old = grower.tree.copy()
    kept = grower.append((READ, None))
    execute(url, f"UPDATE audit_head SET size = 0, root = {execute.bytes(url, Head.of(old).root)}")
    grower.tree = old
    with pytest.raises(AuditForkError):
        grower.append((READ, None))
    assert store.leaves(0, 10) == kept


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_leaves SET leaf = leaf",
        "DELETE FROM audit_leaves",
        "UPDATE audit_tile_hashes SET hash = hash",
        "DELETE FROM audit_tile_hashes",
    ],
)
def test_leaves_and_hashes_are_write_once(url, open_store, execute, statement):
    """A tool or a mistake cannot change them, not even as owner; dropping the trigger it can."""
    store = open_store(url)
    kept = Grower(store).append(*[(READ, None)] * 256)
    with pytest.raises(Exception, match="write-once"):
        execute(url, statement)
    assert store.leaves(0, 1000) == kept
    assert_consistent(store)
