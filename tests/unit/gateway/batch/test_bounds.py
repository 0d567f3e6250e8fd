"""What files and batches use at once."""

import asyncio
import threading

import pytest

from appliance.errors import AtCapacityError
from appliance.gateway.batch.bounds import THREADS, StorageThreads, TenantSlots


def test_each_tenant_has_its_own_slots_and_all_together_have_a_maximum():
    slots = TenantSlots("uploads", per_tenant=2, total=3)
    with slots.taken("a"), slots.taken("a"):
        with pytest.raises(AtCapacityError, match="This tenant has 2 uploads"), slots.taken("a"):
            pass
        with slots.taken("b"), pytest.raises(AtCapacityError, match="The gateway has 3"), slots.taken("c"):
            pass
        with slots.taken("c"):
            pass
    with slots.taken("a"), slots.taken("a"):
        pass


async def test_blocked_storage_threads_block_no_others():
    """Calls beyond their number wait for each other, not for the gateway's default threads."""
    threads, blocked = StorageThreads(), threading.Event()
    running = [asyncio.ensure_future(threads.run(blocked.wait)) for _ in range(3 * THREADS)]
    assert await asyncio.to_thread(lambda: "served") == "served"
    blocked.set()
    assert await asyncio.gather(*running) == [True] * len(running)
    threads.close()


async def test_lists_are_read_one_at_a_time():
    """Threads that build rows compete with the event loop for the interpreter's lock."""
    threads, turn, at_once = StorageThreads(), threading.Lock(), []

    def read():
        is_alone = turn.acquire(blocking=False)
        at_once.append(not is_alone)
        threading.Event().wait(0.001)
        if is_alone:
            turn.release()

    await asyncio.gather(*(threads.run_alone(read) for _ in range(20)))
    assert at_once == [False] * 20
    threads.close()


async def test_cancelled_caller_returns_after_its_thread_has_ended():
    """What it then removes is not written to any more."""
    threads, started, blocked = StorageThreads(), threading.Event(), threading.Event()
    steps = []

    def write():
        started.set()
        blocked.wait()
        steps.append("written")

    async def store():
        try:
            await threads.run(write)
        finally:
            steps.append("removed")

    storing = asyncio.ensure_future(store())
    await asyncio.to_thread(started.wait)
    storing.cancel()
    await asyncio.sleep(0)
    assert not storing.done()
    blocked.set()
    with pytest.raises(asyncio.CancelledError):
        await storing
    assert steps == ["written", "removed"]
    threads.close()
