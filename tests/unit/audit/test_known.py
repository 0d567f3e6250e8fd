"""A writer's knowledge of the log: updated entry by entry, and checked against the stored head."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit.entry_types import EntryType
from appliance.audit.known import KnownLog, silent_gateways
from appliance.audit.merkle import CompactRange
from appliance.audit.pending import EntryMaker
from appliance.audit.store import Head, OpenRequest
from appliance.errors import AuditForkError
from tests.audit_log import ORIGIN, intent, outcome
from tests.grower import leaf_at

INTENT, OUTCOME, READ = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME, EntryType.AUDIT_READ


def _tree(leaves):
    tree = CompactRange()
    for leaf in leaves:
        tree.append(leaf.leaf_hash)
    return tree


def _chain(*contents):
    return [leaf_at(index, *content) for index, content in enumerate(contents)]


@pytest.fixture
def maker():
    counter = iter(range(1, 10_000))
    return EntryMaker(
        origin=ORIGIN,
        clock=lambda: 1_800_000_000.0,
        random_bytes=lambda count: next(counter).to_bytes(count),
        gateway="one",
    )


def test_a_log_with_entries_added_is_followed():
    """Requests that others began are open, those they ended are not."""
    leaves = _chain((INTENT, "a"), (READ, None), (INTENT, "b"), (OUTCOME, "a"), (OUTCOME, "c"))
    known = KnownLog(CompactRange(), [OpenRequest(request_id="c", gateway="two")])
    tree = known.extended(leaves, Head.of(_tree(leaves)))
    assert known.head.size == 0
    assert known.follow(leaves, tree) == ["a", "c"]
    assert (known.head, list(known.open)) == (Head.of(_tree(leaves)), ["b"])


@given(
    st.integers(0, 5), st.integers(0, 5), st.sampled_from(["lost", "altered", "moved", "swapped", "short"])
)
def test_anything_but_entries_added_is_a_fork(before, after, damage):
    """A leaf that is missing, changed, out of place, or one more than the head has: all are refused."""
    leaves = _chain(*[(READ, str(number)) for number in range(before + after + 2)])
    known = KnownLog(_tree(leaves[:before]))
    newer, head = list(leaves[before:]), Head.of(_tree(leaves))
    if damage == "lost":
        newer.pop()
    elif damage == "altered":
        newer[0] = type(newer[0])(
            index=newer[0].index, leaf=b"other", leaf_hash=newer[0].leaf_hash, type="x", request_id=None
        )
    elif damage == "moved":
        newer[0] = leaf_at(newer[0].index + 1, READ, str(before))
    elif damage == "swapped":
        newer[0], newer[1] = newer[1], newer[0]
    else:
        head = Head.of(_tree(leaves[:-1]))
    with pytest.raises(AuditForkError):
        known.extended(newer, head)


async def test_entries_are_placed_after_those_of_others(maker):
    """Index, hash and tree continue where the others stopped."""
    newer = _chain((READ, None), (READ, None))
    batch = KnownLog(CompactRange()).place(
        [maker.make(INTENT, intent("a")), maker.make(OUTCOME, outcome("a"))], _tree(newer), newer
    )
    assert [leaf.index for leaf in batch.leaves] == [2, 3]
    assert Head.of(batch.tree) == Head.of(_tree([*newer, *batch.leaves]))
    assert batch.refused == ()


async def test_an_end_needs_a_request_that_is_open(maker):
    """In the log, among what others added, or earlier in the same batch; and it ends once."""
    newer = [leaf_at(0, INTENT, "theirs"), leaf_at(1, OUTCOME, "gone")]
    known = KnownLog(
        CompactRange(), [OpenRequest(request_id=one, gateway="one") for one in ("known", "gone")]
    )
    wanted = ["theirs", "known", "gone", "unknown", "known"]
    batch = known.place([maker.make(OUTCOME, outcome(one)) for one in wanted], _tree(newer), newer)
    assert [leaf.request_id for leaf in batch.leaves] == ["theirs", "known"]
    assert [pending.request_id for pending in batch.refused] == ["gone", "unknown", "known"]


async def test_committed_intents_keep_their_gateway(maker):
    """So that another gateway's requests are never taken for its own."""
    known = KnownLog(CompactRange(), [OpenRequest(request_id="old", gateway=None)])
    batch = known.place([maker.make(INTENT, intent("a")), maker.make(OUTCOME, outcome("old"))], known.tree)
    known.commit(batch)
    assert known.open == {"a": "one"}
    assert known.open_of({"one"}) == ["a"]
    assert known.open_of({"two", None}) == []
    assert known.head == Head.of(batch.tree)


def test_a_gateway_is_silent_after_its_time_or_without_a_heartbeat():
    """Exactly at the limit it still counts as alive."""
    seen = {"fresh": 100.0, "limit": 90.0, "late": 89.9}
    names = ["fresh", "limit", "late", "unknown", None]
    assert silent_gateways(names, seen, now=100.0, seconds=10.0) == {"late", "unknown", None}
