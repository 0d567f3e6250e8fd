"""The log notices by itself when what is stored is no longer what was written."""

import asyncio
from base64 import b64encode
from dataclasses import replace

import pytest

from appliance.audit.durability.health import AuditHealth
from appliance.audit.durability.selfcheck import CHUNK, DamagedError, SelfCheck, Verification
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.store import Leaf
from appliance.errors import AuditUnavailableError
from tests.durable_log import Bench, begin, end, until


class Leaves:
    """A store of nothing but leaves, which counts what is read."""

    def __init__(self, count):
        self.stored, self.read = [], 0
        self.tree = CompactRange()
        self.grow(count)

    def grow(self, count):
        for number in range(len(self.stored), len(self.stored) + count):
            leaf = b"leaf %d" % number
            self.stored.append(
                Leaf(index=number, leaf=leaf, leaf_hash=hash_leaf(leaf), type="audit.read", request_id=None)
            )
            self.tree.append(hash_leaf(leaf))

    def leaves(self, start, end):
        self.read += end - start
        return self.stored[start:end]

    @property
    def head(self):
        return self.tree.size, b64encode(self.tree.root()).decode()


def _check(store):
    return SelfCheck(store, rest=lambda _seconds: None)


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_selfcheck_accepts_an_intact_log_and_reads_new_entries_first(count):
    """However it grows; older chunks are verified again."""
    store = Leaves(count)
    check = _check(store)
    for growth in (0, 1, CHUNK, 5, 2 * CHUNK + 3):
        store.grow(growth)
        check.round(*store.head)
        assert check.size == len(store.stored)
    assert len(check._roots) == len(store.stored) // CHUNK


@pytest.mark.parametrize("how", ["bytes", "both", "gone", "swapped", "text"])
@pytest.mark.parametrize("after_a_round", [False, True])
def test_an_altered_log_is_found_out(how, after_a_round):
    """Whether the entry was verified before it was altered, or not."""
    store = Leaves(2 * CHUNK + 9)
    check = _check(store)
    if after_a_round:
        check.round(*store.head)
    victim = store.stored[5]
    if how == "bytes":
        store.stored[5] = replace(victim, leaf=b"forged")
    elif how == "both":
        store.stored[5] = replace(victim, leaf=b"forged", leaf_hash=hash_leaf(b"forged"))
    elif how == "text":
        store.stored[5] = replace(victim, leaf="not bytes")
    elif how == "gone":
        del store.stored[5]
    else:
        store.stored[5], store.stored[6] = (
            replace(store.stored[6], index=5),
            replace(victim, index=6),
        )
    with pytest.raises(DamagedError, match="keep the database as it is"):
        check.round(*store.head)


def test_it_rests_most_of_the_time():
    """Nine tenths of the time, so that it never takes a core from requests."""
    store, rests, now = Leaves(3 * CHUNK), [], iter(range(1000))
    SelfCheck(store, work_clock=lambda: next(now), rest=rests.append).round(*store.head)
    assert rests
    assert set(rests) == {9}  # a second of work each time


async def test_damage_is_reported_everywhere(tmp_path):
    """Log event, metric, readiness, and the sink refuses what is new."""
    bench = Bench(tmp_path)
    async with bench.open("strict", verify_seconds=0.01) as guarded:
        running = asyncio.create_task(guarded.monitor.run())
        await begin(guarded.sink, "a")
        await end(guarded.sink, "a")
        await until(lambda: guarded.monitor.health().verification.size >= 3)
        assert guarded.monitor.health().problem(None) is None
        bench.store.stored[1] = replace(bench.store.stored[1], leaf=b"{}")
        await until(lambda: guarded.monitor.health().verification.damage)
        assert "stored entry 1" in guarded.monitor.health().problem(None)
        with pytest.raises(AuditUnavailableError, match="the audit log is damaged"):
            await begin(guarded.sink, "b")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(bench.events("audit_damage_found")) == 1


def test_health_of_an_unknown_log_is_good():
    """The default of a service without an audit log."""
    health = AuditHealth()
    assert (health.problem(None), health.warnings, health.verification.damage) == (None, (), None)
    assert health.problem("the disk is full") == "the disk is full"
    assert AuditHealth(verification=Verification(damage="altered")).problem(None) == "altered"
