"""Which batches are run, when, and what becomes of one that cannot go on."""

import asyncio

import pytest

from appliance.errors import StorageUnavailableError
from appliance.gateway.batch import runner as module
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


async def test_a_new_batch_is_begun_at_once_and_run_to_its_end(scene):
    """Nobody waits for the next look."""
    running = asyncio.ensure_future(scene.runner.run())
    await asyncio.sleep(0.05)
    batch = await scene.begin(requests("a", "b"))
    await until(lambda: scene.row(batch).status is Status.COMPLETED)
    await scene.runner.stop()
    await running


async def test_what_was_open_when_the_process_died_is_run_by_the_next(scene, tmp_path):
    """Only this gateway's; another's are left to it."""
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


async def test_a_batch_that_ended_is_never_begun_again(scene):
    """Also where it ended while the database was being asked what is open."""
    running = asyncio.ensure_future(scene.runner.run())
    batches = [await scene.begin(requests(*"abc")) for _ in range(10)]
    await until(lambda: all(scene.row(batch).status in ENDED for batch in batches))
    await asyncio.sleep(0.2)
    assert scene.answers.asked == {"a": 10, "b": 10, "c": 10}
    assert len(scene.sink.of("batch.ended")) == 10
    running.cancel()


async def test_only_so_many_run_at_once_and_every_tenant_has_its_turn(scene):
    """A tenant with many batches does not keep another waiting."""
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


async def test_a_batch_that_cannot_go_on_holds_up_no_other_and_is_tried_again(scene, monkeypatch):
    """A damaged disk is one batch's trouble until it is mended."""
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


async def test_a_batch_that_another_gateway_was_told_to_cancel_is_cancelled(scene):
    """The database is looked at while batches run."""
    scene.answers.held.clear()
    batch = await scene.begin(requests("a"))
    running = asyncio.ensure_future(scene.runner.run())
    await until(lambda: scene.answers.at_once)
    scene.store.move(batch.batch_id, Status.CANCELLING, 1)
    await until(lambda: scene.row(batch).status is Status.CANCELLED)
    assert scene.answers.left == [True]
    running.cancel()


async def test_stopping_breaks_off_what_is_under_way_and_begins_nothing(scene):
    """The log says of those lines that the gateway stopped, not that a client left."""
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
