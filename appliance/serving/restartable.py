"""
Which worker may be restarted while the others serve, and whether a process is a new one.

Decisions only; `appliance.control.recycle` acts on them.
"""

from collections.abc import Iterable

from appliance.serving.worker import Admission, WorkerId, WorkerSnapshot


def refusal(
    snapshots: Iterable[WorkerSnapshot], worker_id: WorkerId, *, allow_downtime: bool = False
) -> str | None:
    """
    Why a worker must not be recycled now, in one line; None if it may.

    A worker that receives no requests anyway may be, whatever the others do, unless one is draining: that
    is how an excluded worker returns.  `allow_downtime` permits that a model is without a worker meanwhile.
    """
    known = {snapshot.worker.worker_id: snapshot for snapshot in snapshots}
    chosen = known.pop(worker_id, None)
    if chosen is None:
        return f"there is no worker {worker_id}"
    if chosen.leaving:
        return f"worker {worker_id} is leaving: it is no longer listed"
    others = tuple(other for other in known.values() if not other.leaving)
    if chosen.takes_requests:
        return _unfit(others) or (None if allow_downtime else _missed(chosen, others))
    draining = [other for other in others if other.admission is Admission.DRAINING]
    return _unfit(draining)


def _unfit(others: Iterable[WorkerSnapshot]) -> str | None:
    for other in others:
        name = other.worker.worker_id
        if other.admission is Admission.DRAINING:
            return f"worker {name} is being recycled: wait until that is done"
        if other.admission is not Admission.ADMITTED:
            return f"worker {name} is not admitted: recycle that one first"
        if other.drained:
            return f"worker {name} is drained: undrain it first"
        if not other.healthy:
            return f"worker {name} is down: wait until it is back"
    return None


def _missed(chosen: WorkerSnapshot, others: tuple[WorkerSnapshot, ...]) -> str | None:
    name = chosen.worker.worker_id
    if not others:
        return f"worker {name} is the only one: start another that serves the same models"
    for served in chosen.models:
        if not any(other.serves(served.name) for other in others):
            return f"worker {name} is the last one that serves {served.name}: start another"
    return None


def is_new_process(before: WorkerSnapshot, now: WorkerSnapshot, *, was_down: bool) -> bool:
    """
    Whether the latest snapshot is of another process than the one before the restart.

    `was_down` decides if neither supervisor nor plugin identifies the process: a draining worker may still
    answer.
    """
    if now.worker is not before.worker:
        return True
    epochs = [each.reading.epoch if each.reading is not None else "" for each in (before, now)]
    return epochs[0] != epochs[1] if all(epochs) else was_down
