"""What is integrated, and what a gateway finds of its own: for any order, loss and change of rows."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from appliance.audit.entry import decode, without_place
from appliance.audit.entry_types import EntryType
from appliance.audit.integration import (
    FIRST_HASH,
    FollowedLog,
    PendingRow,
    Position,
    WaitingEntry,
    accept_after,
    left_open,
    plan_integration,
    without_request,
)
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import EntryMaker
from appliance.audit.store import Head
from appliance.errors import AuditForkError
from tests.audit_log import ORIGIN, intent, outcome

INTENT, OUTCOME, READ = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME, EntryType.AUDIT_READ
HASHES = [hash_leaf(str(number).encode()) for number in range(60)]
COUNTS = st.dictionaries(st.sampled_from(["one", "two", "three"]), st.integers(0, 8), min_size=1)


def _rows(gateway, count, *, after=0):
    """A gateway's sequence: its rows from `after` on, and the position they continue."""
    hashes = [hash_leaf(f"{gateway} {seq}".encode()) for seq in range(count + 1)]
    chain = [FIRST_HASH, *hashes[1:]]
    rows = [
        PendingRow(
            gateway=gateway,
            seq=seq,
            epoch=1 + seq // 3,
            previous_hash=chain[seq - 1],
            leaf_hash=chain[seq],
        )
        for seq in range(1, count + 1)
    ]
    after = min(after, count)
    return Position(seq=after, leaf_hash=chain[after]), rows[after:]


def _tree(hashes):
    tree = CompactRange()
    for leaf_hash in hashes:
        tree.append(leaf_hash)
    return tree


@given(COUNTS, st.integers(0, 4), st.randoms())
def test_whole_sequences_are_integrated_in_order(counts, after, chance):
    """However rows of different gateways are mixed."""
    made = {gateway: _rows(gateway, count, after=after) for gateway, count in counts.items()}
    queues = [list(rows) for _, rows in made.values() if rows]
    mixed = []
    while queues:
        queue = chance.choice(queues)
        mixed.append(queue.pop(0))
        queues = [one for one in queues if one]
    plan = plan_integration({gateway: position for gateway, (position, _) in made.items()}, mixed)
    assert plan.broken == {}
    assert {prefix.gateway: list(prefix.rows) for prefix in plan.prefixes} == {
        gateway: rows for gateway, (_, rows) in made.items() if rows
    }


@given(
    st.integers(1, 8),
    st.data(),
    st.sampled_from(["missing", "changed", "unsound", "swapped", "repeated", "older", "renumbered"]),
)
def test_only_rows_before_a_break_are_integrated(count, data, damage):
    """A hole, a changed row, one out of place, one twice: nothing from there on, and other gateways go on."""
    _, rows = _rows("one", count)
    _, others = _rows("two", 3)
    at = data.draw(st.integers(0, count - 1))
    damaged = list(rows)
    if damage == "missing":
        del damaged[at]
        at = at if at < len(damaged) else count
    elif damage == "changed":
        # Its gateway finds a changed last row itself; before, the row after it has another hash.
        damaged[at] = replace(damaged[at], leaf_hash=HASHES[0])
        at = at if at < count - 1 else count
    elif damage == "unsound":
        damaged[at] = replace(damaged[at], sound=False)
    elif damage == "swapped":
        damaged[at:] = reversed(damaged[at:])
        at = at if len(damaged) - at > 1 else count
    elif damage == "renumbered":
        damaged[at:] = [replace(row, seq=row.seq + 1) for row in damaged[at:]]
    elif damage == "repeated":
        damaged.insert(at, damaged[at])
        at += 1
    else:
        damaged[at] = replace(damaged[at], epoch=damaged[at - 1].epoch - 1 if at else -1)
    plan = plan_integration({"one": Position(), "two": Position()}, [*damaged, *others])
    found = {prefix.gateway: prefix.rows for prefix in plan.prefixes}
    assert found.get("one", ()) == tuple(damaged[:at])
    assert found["two"] == tuple(others)
    assert ("one" in plan.broken) == (at < len(damaged))


@given(st.integers(1, 12), st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)), st.booleans())
def test_what_a_dead_gateway_left_behind_a_hole_is_integrated(count, removed, changed, fits):
    """Every row that is left and not known to be changed, in order; a changed one is replaced by a hole."""
    position, rows = _rows("one", count)
    left = [row for row in rows if row.seq not in removed]
    followed = {row.seq - 1 for row in left}
    found = {row.seq for row in left if row.seq in changed and (row.seq in followed or not fits)}
    change = {"leaf_hash": HASHES[0]} if fits else {"sound": False}
    damaged = [replace(row, **change) if row.seq in found else row for row in left]
    plan = plan_integration({"one": position}, damaged, {"one"})
    assert [row for prefix in plan.prefixes for row in prefix.rows] == [
        row for row in left if row.seq not in found
    ]
    for prefix in plan.prefixes:
        assert [row.seq for row in prefix.rows] == list(range(prefix.first, prefix.last.seq + 1))
    assert [end.seq for end in plan.ends.values()] == [row.seq for row in left[-1:]]
    assert ("one" in plan.broken) == (
        bool(found) or [row.seq for row in left] != list(range(1, len(left) + 1))
    )


def test_rows_of_an_unknown_gateway_are_left():
    """It never registered, so there is no position to continue."""
    _, rows = _rows("one", 2)
    assert plan_integration({}, rows).prefixes == ()


@pytest.fixture
async def maker():
    counter = iter(range(1, 10_000))
    return EntryMaker(
        origin=ORIGIN,
        clock=lambda: 1_800_000_000.0,
        random_bytes=lambda count: next(counter).to_bytes(count),
        gateway="one",
    )


async def test_accepted_entries_carry_their_place_and_are_the_same_without_it(maker):
    """The spool has them without: so one that was accepted is recognised."""
    taken = [maker.make(INTENT, intent("a")), maker.make(OUTCOME, outcome("a"))]
    end = Position(seq=7, leaf_hash=HASHES[0])
    rows = accept_after(end, taken, "one", 3)
    assert [row.seq for row in rows] == [8, 9]
    assert [row.previous_hash for row in rows] == [HASHES[0], rows[0].leaf_hash]
    for row, pending in zip(rows, taken, strict=True):
        fields = decode(row.leaf).fields
        assert (fields["writer"], fields["epoch"], fields["sequence"]) == ("one", 3, row.seq)
        assert without_place(row.leaf) == pending.leaf == without_place(pending.leaf)


async def test_an_end_needs_a_request_without_end(maker):
    """Begun before or in the same batch, and ended once."""
    wanted = [(OUTCOME, "known"), (OUTCOME, "known"), (INTENT, "new"), (OUTCOME, "new"), (OUTCOME, "other")]
    taken = [maker.make(kind, (intent if kind is INTENT else outcome)(one)) for kind, one in wanted]
    taken.append(maker.make(READ, {"actor": "cli:root", "operation": "tail"}))
    refused = without_request(taken, {"known"})
    assert [taken.index(one) for one in refused] == [1, 4]


def test_requests_are_open_in_the_tree_or_behind_it():
    pending = [(OUTCOME, "a"), (INTENT, "c"), (INTENT, "d"), (READ, None), (OUTCOME, "c")]
    assert left_open(["a", "b"], pending) == ["b", "d"]


async def _waiting(hashes, since=0.0):
    loop = asyncio.get_running_loop()
    return [WaitingEntry(leaf_hash=one, placed=loop.create_future(), since=since) for one in hashes]


async def test_own_entries_get_the_index_at_which_they_are_found():
    followed = FollowedLog(_tree(HASHES[:5]))
    entries = await _waiting([HASHES[6], HASHES[8]])
    followed.accepted(entries)
    tree = followed.extended(HASHES[5:8], Head.of(_tree(HASHES[:8])))
    assert followed.follow(HASHES[5:8], tree) == 1
    assert entries[0].placed.result() == 6
    assert not entries[1].placed.done()
    followed.require_pending({HASHES[8]})
    with pytest.raises(AuditForkError, match="neither in the log nor waiting"):
        followed.require_pending({HASHES[9]})


async def test_own_entries_out_of_order_or_late_are_a_fork():
    """The integrator takes a gateway's entries in their order, and soon."""
    followed = FollowedLog(CompactRange())
    followed.accepted(await _waiting(HASHES[:2], since=10.0))
    followed.require_integrated(0.0, 5.0, 15.0)
    followed.require_integrated(12.0, 5.0, 16.0)
    with pytest.raises(AuditForkError, match="did not come into the audit log"):
        followed.require_integrated(0.0, 5.0, 15.1)
    with pytest.raises(AuditForkError, match="after others that are not"):
        followed.follow([HASHES[1]], _tree([HASHES[1]]))


@given(st.integers(0, 20), st.integers(0, 20), st.lists(st.integers(1, 40), max_size=5))
@example(0, 1, [])  # the tree of one entry, whose root is the hash of its leaf
def test_checkpoints_of_others_are_compared_at_any_size_since_the_last(start, more, sizes):
    """The right root is adopted once, whenever it was signed since the start; a wrong one is a fork."""
    followed = FollowedLog(_tree(HASHES[:start]))
    followed.follow(HASHES[start : start + more], _tree(HASHES[: start + more]))
    newest = start
    for size in sizes:
        adopted = followed.adopt(size, _tree(HASHES[:size]).root())
        assert adopted == (newest < size <= start + more)
        newest = size if adopted else newest
    if newest < start + more:
        with pytest.raises(AuditForkError, match="is not of the log"):
            followed.adopt(start + more, bytes(32))


def test_a_tree_that_is_not_the_known_one_with_hashes_after_it_is_a_fork():
    followed = FollowedLog(_tree(HASHES[:5]))
    for hashes, head in (
        (HASHES[5:7], Head.of(_tree(HASHES[:8]))),
        (HASHES[6:7], Head.of(_tree(HASHES[:6]))),
        ([], Head.of(_tree(HASHES[:4]))),
    ):
        with pytest.raises(AuditForkError, match="is not the log of size 5"):
            followed.extended(hashes, head)
