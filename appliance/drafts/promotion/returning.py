"""
Workers that have a draft which was taken out get the one in service again, one at a time.

For as long as it takes: a worker that nobody could stand in for is not restarted, and the promotion says
what it waits for.  Whatever starts anew meanwhile starts with the draft in service by itself.
"""

from appliance.control.recycle import RecycleResult
from appliance.drafts.promotion.crew import POLL_SECONDS
from appliance.drafts.promotion.passage import RETRY_SECONDS, Passage
from appliance.drafts.promotion.promotion import Stage
from appliance.errors import ControlRefusedError
from appliance.serving.worker import WorkerId

ABSENT_SECONDS = 60.0
"""How long a worker that is not in the pool is waited for: a new gateway may not have found it yet."""


async def return_workers(passage: Passage, actor: str) -> None:
    """
    Return once no worker that is seen has the draft of a promotion.

    Args:
        passage: the promotion that is given back.
        actor: who wanted that.

    Raises:
        LeaseLostError: this gateway does not steer any more.
    """
    crew, began = passage.crew, passage.crew.clock()
    done: set[WorkerId] = set()
    not_before: dict[WorkerId, float] = {}
    while True:
        await crew.insist()
        left = [
            seen.worker.worker_id
            for seen in crew.members(passage.promotion.target)
            if seen.draft == passage.promotion.draft and seen.worker.worker_id not in done
        ]
        coming = _unseen(passage, crew.clock() - began)
        if not left and not coming:
            return
        why = f"worker {coming[0]} is not back yet" if coming else None
        free: WorkerId | None = None
        for worker_id in left:
            refused = crew.refusal(worker_id, passage.promotion)
            if refused is not None:
                why = refused
            elif crew.clock() >= not_before.get(worker_id, began):
                free = worker_id
                break
        if free is None:
            passage.wait_for(why)
            await crew.sleep(POLL_SECONDS)
            continue
        if await _returned(passage, free, actor):
            done.add(free)
        else:
            not_before[free] = crew.clock() + RETRY_SECONDS


async def _returned(passage: Passage, worker_id: WorkerId, actor: str) -> bool:
    """Restart one worker with the draft in service; whether it is back, with that draft or without."""
    await passage.surely(lambda: passage.move(Stage.RETURNING, f"worker {worker_id} is given back"))
    try:
        result = await passage.crew.restart(worker_id, passage.promotion, actor=actor, candidate=None)
    except ControlRefusedError:
        return False
    return result in {RecycleResult.RECYCLED, RecycleResult.WITHOUT_DRAFT}


def _unseen(passage: Passage, seconds: float) -> list[str]:
    """Workers that were told to have the draft, and have not been seen to run since; for a while."""
    if seconds >= passage.parts.recycle.start_seconds:
        return []  # whenever one of them starts from now on, it starts with the draft in service
    found: list[str] = []
    for name in passage.promotion.workers:
        seen = passage.crew.pool.snapshot(WorkerId(name))
        is_absent = seen is None and seconds < ABSENT_SECONDS
        if is_absent or (seen is not None and not seen.leaving and not (seen.healthy and seen.weights)):
            found.append(name)
    return found
