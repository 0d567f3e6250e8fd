"""
The trial of a draft on its first worker, beside the others: look, count, judge, until something is decided.

It ends at once where the first worker dies, or where its drafts collapse and the others' do not.  While
the monitor keeps either side from drafting there is nothing to compare, and the trial waits.
"""

from dataclasses import replace

from appliance.drafts.promotion.evidence import Meters
from appliance.drafts.promotion.passage import EndedError, Passage
from appliance.drafts.promotion.promotion import Stage
from appliance.drafts.promotion.trial import Judgement, Trial, Verdict, follow, judge
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason

SILENT_SECONDS = 10.0
"""How long the first worker may not be seen healthy before it counts as dead."""


async def try_out(
    passage: Passage, canary: WorkerId, trial: Trial, equipped: WorkerSnapshot | None
) -> Judgement:
    """
    Return what was decided; the numbers are in the promotion as well, at all times.

    Args:
        passage: the promotion.
        canary: the worker that has the draft.
        trial: as it begins.
        equipped: the worker when it came back with the draft: no other process may take its place.

    Raises:
        EndedError: the first worker is gone, its drafts collapsed, or somebody wants it given back.
        LeaseLostError: this gateway does not steer any more.
    """
    mine, theirs, life = Meters(), Meters(), _Life(canary, equipped)
    judgement, judged = judge(trial, trial.began), 0
    while True:
        await passage.crew.pause()
        passage.heed_stop()
        now = passage.crew.clock()
        seen = life.look(passage, now)
        mates = _comparable(passage, canary)
        if seen is not None and seen.reading is not None:
            mine.saw(canary, seen.reading)
            for mate in mates:
                if mate.reading is not None:
                    theirs.saw(mate.worker.worker_id, mate.reading)
        trial = follow(trial, mine.total(), theirs.total())
        if seen is not None and has_collapsed(seen) and not (mates and all(map(has_collapsed, mates))):
            passage.promotion = replace(passage.promotion, numbers=judge(trial, now).numbers)
            raise EndedError(Stage.REFUSED, f"its drafts collapsed on worker {canary}")
        if len(trial.lengths) > judged or now - trial.began >= trial.rules.seconds:
            judgement, judged = judge(trial, now), len(trial.lengths)
        stopped = _stopped((seen, *mates) if seen is not None else mates)
        passage.promotion = replace(
            passage.promotion, numbers=judgement.numbers, waits=judgement.reason + stopped
        )
        if judgement.verdict is Verdict.UNDECIDED:
            return replace(judgement, reason=judgement.reason + stopped)
        if judgement.verdict is not Verdict.GO_ON:
            return judgement


def has_collapsed(seen: WorkerSnapshot) -> bool:
    """Whether the monitor finds a worker's drafts as good as useless."""
    return seen.watch.verdict is Reason.COLLAPSED


class _Life:
    """The first worker's life: one process, from its admission to the end of the trial."""

    def __init__(self, canary: WorkerId, equipped: WorkerSnapshot | None) -> None:
        self._canary = canary
        reading = equipped.reading if equipped is not None else None
        self._epoch = reading.epoch if reading is not None else ""
        self._silent_since: float | None = None

    def look(self, passage: Passage, now: float) -> WorkerSnapshot | None:
        """The worker as seen now, None while it is not; raises `EndedError` once it is another or none."""
        seen = passage.crew.pool.snapshot(self._canary)
        if seen is None:
            raise EndedError(Stage.FAILED, f"worker {self._canary} has left the pool")
        if not seen.healthy:
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since >= SILENT_SECONDS:
                raise EndedError(Stage.FAILED, f"worker {self._canary}, which tries it, is down")
            return None
        self._silent_since = None
        if seen.reading is None or not seen.reading.epoch:
            return None
        if self._epoch not in {"", seen.reading.epoch} or seen.draft != passage.promotion.draft:
            reason = f"worker {self._canary}, which tries it, has died and started anew"
            raise EndedError(Stage.FAILED, reason)
        self._epoch = seen.reading.epoch
        return seen


def _comparable(passage: Passage, canary: WorkerId) -> tuple[WorkerSnapshot, ...]:
    """The workers that serve the same target with the draft in service, as seen now."""
    return tuple(
        seen
        for seen in passage.crew.members(passage.promotion.target)
        if seen.worker.worker_id != canary and seen.healthy and seen.draft == passage.promotion.incumbent
    )


def _stopped(seen: tuple[WorkerSnapshot, ...]) -> str:
    """Where the monitor keeps workers from drafting: without drafts nothing can be compared."""
    stopped = [f"{each.worker.worker_id} ({each.watch.verdict})" for each in seen if each.watch.verdict]
    return f"; the monitor has stopped drafting on {', '.join(stopped)}" if stopped else ""
