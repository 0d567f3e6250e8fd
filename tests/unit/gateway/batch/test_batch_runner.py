"""Which batches run, when, and what happens to one that cannot continue."""

import asyncio

import pytest

from appliance.errors import StorageUnavailableError
from appliance.gateway.batch import batch_runner as module
from appliance.gateway.batch.batch import ENDED, Status
from tests.fakes import until
from tests.unit.gateway.batch.scene import Scene, requests


@pytest.fixture
async def scene(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    made = Scene(tmp_path, parallel=2)
    yield made
    await made.runner.stop()
    made.store.close()


async def test_new_batch_starts_at_once(scene):
    running = asyncio.ensure_future(scene.runner.run())
    await asyncio.sleep(0.05)
    batch = await scene.begin(requests("a", "b"))
    await until(lambda: scene.row(batch).status is Status.COMPLETED)
    await scene.runner.stop()
    await running


async def test_open_batches_resume_after_a_crash(scene, tmp_path):
    mine = await scene.begin(requests("a"))
    other = Scene(tmp_path, gateway="two")
    theirs = await other.begin(requests("b"))
    scene.build()
    running = asyncio.ensure_future(scene.runner.run())
    await until(lambda: scene.row(mine).status is Status.COMPLETED)
    await asyncio.sleep(0.1)
    assert scene.row(theirs).status is Status.VALIDATING
    other.store.close()
    running.cancel()


async def test_ended_batch_is_not_started_again(scene):
    """Even if it ended during the query for open batches."""
    running = asyncio.ensure_future(scene.runner.run())
    batches = [await scene.begin(requests(*"abc")) for _ in range(10)]
    await until(lambda: all(scene.row(batch).status in ENDED for batch in batches))
    await asyncio.sleep(0.2)
    assert scene.answers.asked == {"a": 10, "b": 10, "c": 10}
    assert len(scene.sink.of("batch.ended")) == 10
    running.cancel()


async def test_parallel_batches_are_bounded_and_fair(scene):
    scene.answers.held.clear()
    greedy = []
    for number in range(3):
        scene.clock.now += 1
        greedy.append(await scene.begin(requests(f"g{number}")))
    modest = await scene.begin(requests("m"), "other")
    running = asyncio.ensure_future(scene.runner.run())
    await until(lambda: scene.answers.at_once == 2)
    await asyncio.sleep(0.1)
    assert set(scene.answers.asked) == {"g0", "m"}
    scene.answers.held.set()
    await until(lambda: all(scene.row(batch).status in ENDED for batch in [*greedy, modest]))
    running.cancel()


async def test_stalled_batch_is_retried_and_blocks_no_other(scene, monkeypatch):
    journal, broken = scene.vault.journal, set()

    def open_journal(batch):
        if batch.batch_id in broken:
            raise StorageUnavailableError("the disk is full")
        return journal(batch)

    monkeypatch.setattr(scene.vault, "journal", open_journal)
    bad, good = await scene.begin(requests("a")), await scene.begin(requests("b"))
    broken.add(bad.batch_id)
    running = asyncio.ensure_future(scene.runner.run())
    await until(lambda: scene.row(good).status is Status.COMPLETED)
    assert scene.row(bad).status is Status.IN_PROGRESS
    broken.clear()
    scene.clock.now += module.STALLED_SECONDS + 1
    await until(lambda: scene.row(bad).status is Status.COMPLETED)
    running.cancel()


async def test_batch_without_room_for_results_asks_no_worker(scene):
    """The disk keeps its reserve for the audit log; the batch resumes once there is room."""
    scene.answers.held.clear()
    batch = await scene.begin(requests("a", "b", "c"))
    running = asyncio.ensure_future(scene.runner.run())
    await until(lambda: scene.answers.at_once == 3)
    scene.vault._keep_free_bytes = 2**62
    scene.answers.held.set()
    await until(lambda: batch.batch_id in scene.runner._stalled)
    for _ in range(3):
        scene.clock.now += module.STALLED_SECONDS + 1
        scene.runner.wake()
        await until(lambda: scene.runner._stalled.get(batch.batch_id, 0) > scene.clock())
    assert scene.answers.asked == {"a": 1, "b": 1, "c": 1}
    assert scene.row(batch).status is Status.IN_PROGRESS
    scene.vault._keep_free_bytes = 0
    scene.clock.now += module.STALLED_SECONDS + 1
    scene.runner.wake()
    await until(lambda: scene.row(batch).status is Status.COMPLETED)
    assert scene.row(batch).counts.completed == 3
    running.cancel()


async def test_cancellation_on_another_gateway_is_applied(scene):
    scene.answers.held.clear()
    batch = await scene.begin(requests("a"))
    running = asyncio.ensure_future(scene.runner.run())
    await until(lambda: scene.answers.at_once)
    scene.store.move(batch.batch_id, Status.CANCELLING, 1)
    await until(lambda: scene.row(batch).status is Status.CANCELLED)
    assert scene.answers.left == [True]
    running.cancel()


async def test_stop_aborts_lines_and_starts_none(scene):
    """The log records for them that the gateway stopped, not that a client left."""
    scene.answers.held.clear()
    first = await scene.begin(requests("a"))
    running = asyncio.ensure_future(scene.runner.run())
    await until(lambda: scene.answers.at_once)
    await scene.runner.stop()
    await running
    assert scene.answers.left == [False]
    second = await scene.begin(requests("b"))
    await asyncio.sleep(0.05)
    assert scene.row(first).status is Status.IN_PROGRESS
    assert scene.row(second).status is Status.VALIDATING
    assert not scene.answers.asked["b"]
