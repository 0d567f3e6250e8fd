"""The log notices by itself when what is stored is no longer what was written."""

import asyncio
import math
from base64 import b64encode
from dataclasses import replace

import pytest

from appliance.audit.durability.health import AuditHealth
from appliance.audit.durability.selfcheck import RESTS, DamagedError, SelfCheck, Verification, pace
from appliance.audit.merkle import TILE_WIDTH, CompactRange, hash_leaf, root_from_leaf_hashes
from appliance.audit.store import Disposal, Leaf
from appliance.errors import AuditUnavailableError
from tests.durable_log import Bench, begin, end, until
from tests.tree_proofs import Levels


class Leaves:
    """A store of nothing but leaves and hashes, which notes what is read."""

    def __init__(self, count):
        self.stored, self.read = [], []
        self.tree = CompactRange()
        self.grow(count)

    def grow(self, count):
        for number in range(len(self.stored), len(self.stored) + count):
            leaf = b"leaf %d" % number
            self.stored.append(
                Leaf(index=number, leaf=leaf, leaf_hash=hash_leaf(leaf), type="audit.read", request_id=None)
            )
            self.tree.append(hash_leaf(leaf))
        self.hashes = Levels([leaf.leaf_hash for leaf in self.stored])

    def leaves(self, start, end):
        self.read.append(start)
        return self.stored[start:end]

    def disposal(self):
        return Disposal()

    @property
    def head(self):
        return self.tree.size, b64encode(self.tree.root()).decode()


def _check(store, file=None, **options):
    options = {"verify_seconds": 3600.0, "clock": lambda: 5.0, "rest": lambda _seconds: None} | options
    return SelfCheck(store, file, **options)


@pytest.mark.parametrize("count", [0, 1, TILE_WIDTH - 1, TILE_WIDTH, TILE_WIDTH + 1, 3 * TILE_WIDTH + 7])
def test_selfcheck_accepts_an_intact_log(count):
    """However it grows; a small log is read whole in every round."""
    store = Leaves(count)
    check = _check(store)
    for growth in (0, 1, TILE_WIDTH, 5, 2 * TILE_WIDTH + 3):
        store.grow(growth)
        check.round(*store.head)
        assert check.found == Verification(time=5.0, size=len(store.stored))


@pytest.mark.parametrize(
    "how", ["bytes", "both", "gone", "swapped", "text", "hash altered", "hash gone", "all with its hash"]
)
@pytest.mark.parametrize("after_a_round", [False, True])
def test_an_altered_log_is_found_out(how, after_a_round):
    """Whether the entry was verified before it was altered, or not."""
    store = Leaves(2 * TILE_WIDTH + 9)
    check = _check(store)
    if after_a_round:
        check.round(*store.head)
    victim, tiles = store.stored[5], store.hashes.levels[1]
    forged = replace(victim, leaf=b"forged", leaf_hash=hash_leaf(b"forged"))
    if how == "bytes":
        store.stored[5] = replace(victim, leaf=b"forged")
    elif how in {"both", "all with its hash"}:
        store.stored[5] = forged
        if how != "both":
            tiles[0] = root_from_leaf_hashes(leaf.leaf_hash for leaf in store.stored[:TILE_WIDTH])
    elif how == "text":
        store.stored[5] = replace(victim, leaf="not bytes")
    elif how == "gone":
        del store.stored[5]
    elif how == "hash altered":
        tiles[0] = bytes(32)
    elif how == "hash gone":
        del tiles[0]
    else:
        store.stored[5], store.stored[6] = (
            replace(store.stored[6], index=5),
            replace(victim, index=6),
        )
    with pytest.raises(DamagedError, match="keep the database as it is"):
        check.round(*store.head)
    assert check.found.damage


def test_every_hash_of_every_level_is_checked(monkeypatch):
    """Also those that no start reads: with tiles of four, seventy leaves have three levels above them."""
    monkeypatch.setattr("appliance.audit.merkle.LEVEL_BITS", 2)
    for module in ("appliance.audit.merkle", "appliance.audit.durability.selfcheck", "tests.tree_proofs"):
        monkeypatch.setattr(f"{module}.TILE_WIDTH", 4)
    store = Leaves(70)
    _check(store).round(*store.head)
    levels = store.hashes.levels
    assert [len(level) for level in levels] == [70, 17, 4, 1]
    for level in levels[1:]:
        for number, right in enumerate(level):
            level[number] = bytes(32)
            with pytest.raises(DamagedError):
                _check(store).round(*store.head)
            level[number] = right
    _check(store).round(*store.head)


def test_it_rests_most_of_the_time():
    """Nine tenths of the time, so that it never takes a core from requests."""
    store, rests, now = Leaves(3 * TILE_WIDTH), [], iter(range(1000))
    _check(store, work_clock=lambda: next(now), rest=rests.append).round(*store.head)
    assert rests
    assert set(rests) == {9}  # a second of work each time


@pytest.mark.parametrize("entries", [1, 10**5, 10**6, 10**7, 10**8, 10**9])
@pytest.mark.parametrize("verify_seconds", [1.0, 60.0, 3600.0, 5 * 3600.0, 12 * 3600.0])
def test_a_pass_over_any_log_takes_less_than_a_day(entries, verify_seconds):
    """Work, rests and waiting between rounds, at two milliseconds for a tile."""
    work, tiles = 0.002, entries // TILE_WIDTH + 1
    count, longest = pace(tiles, verify_seconds)
    a_round = verify_seconds + min(count, tiles) * (work + min(RESTS * work, longest))
    assert math.ceil(tiles / count) * a_round <= 24 * 3600


def test_a_pass_resumes_after_a_restart_where_it_stopped(tmp_path, monkeypatch):
    """Nothing is read twice in a pass, and the age of the last pass is kept."""
    monkeypatch.setattr("appliance.audit.durability.selfcheck.LEAST_TILES", 2)
    monkeypatch.setattr("appliance.audit.durability.selfcheck.PASS_SECONDS", 4 * 3600.0)
    store, file = Leaves(8 * TILE_WIDTH + 3), tmp_path / "audit.checked"
    for restart in range(4):
        check = _check(store, file)
        assert check.found == (Verification(time=0.0, size=0))
        check.round(*store.head)
        assert len(store.read) == 3 * (restart + 1) or restart == 3
        if check.found.time:
            break
    assert store.read == [number * TILE_WIDTH for number in range(9)]
    assert _check(store, file).found == Verification(time=5.0, size=len(store.stored))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"tiles": 2}', b'{"tiles": 1, "subtrees": ["00"]}', b'{"x": 1}']
)
def test_a_file_that_does_not_fit_the_log_begins_a_new_pass(tmp_path, content):
    store, file = Leaves(3 * TILE_WIDTH), tmp_path / "audit.checked"
    file.write_bytes(content)
    _check(store, file).round(*store.head)
    assert store.read == [number * TILE_WIDTH for number in range(4)]


def test_damage_is_remembered_and_its_place_checked_first_after_a_restart(tmp_path):
    """Until what is stored there is what was written again."""
    store, file = Leaves(8 * TILE_WIDTH), tmp_path / "audit.checked"
    sound = store.stored[5 * TILE_WIDTH]
    store.stored[5 * TILE_WIDTH] = replace(sound, leaf=b"forged")
    with pytest.raises(DamagedError):
        _check(store, file).round(*store.head)
    store.read.clear()
    again = _check(store, file)
    assert "stored entry 1280" in again.found.damage
    with pytest.raises(DamagedError, match="stored entry 1280"):
        again.round(*store.head)
    assert store.read == [5 * TILE_WIDTH]
    store.stored[5 * TILE_WIDTH] = sound
    restored = _check(store, file)
    assert restored.found.damage
    restored.round(*store.head)
    assert restored.found.damage is None
    assert _check(store, file).found.damage is None


async def test_a_gateway_stays_out_of_service_after_a_restart_until_the_log_is_sound(tmp_path):
    """The remembered damage is reported before the first request."""
    bench = Bench(tmp_path)
    async with bench.open("strict", verify_seconds=0.01) as guarded:
        for number in range(2 * TILE_WIDTH):
            await begin(guarded.sink, str(number))
            await end(guarded.sink, str(number))
    sound = bench.store.stored[1]
    bench.store.stored[1] = replace(sound, leaf=b"{}")
    async with bench.open("strict", verify_seconds=0.01) as guarded:
        running = asyncio.create_task(guarded.monitor.run())
        await until(lambda: guarded.monitor.health().problem(None))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with bench.open("strict", verify_seconds=0.01) as guarded:
        assert "stored entry 1" in guarded.monitor.health().problem(None)
        with pytest.raises(AuditUnavailableError, match="the audit log is damaged"):
            await begin(guarded.sink, "b")
    bench.store.stored[1] = sound
    async with bench.open("strict", verify_seconds=0.01) as guarded:
        assert guarded.monitor.health().problem(None)
        running = asyncio.create_task(guarded.monitor.run())
        await until(lambda: not guarded.monitor.health().problem(None))
        await begin(guarded.sink, "c")
        await end(guarded.sink, "c")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(bench.events("audit_damage_repaired")) == 1


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
