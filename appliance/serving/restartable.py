"""
Which worker may be restarted while the others serve, and how the new process is told from the old.

Decisions only; `appliance.control.recycle` acts on them.
"""

from collections.abc import Iterable

from appliance.serving.worker import Admission, WorkerId, WorkerSnapshot


def refusal(
    snapshots: Iterable[WorkerSnapshot], worker_id: WorkerId, *, allow_downtime: bool = False
) -> str | None:
    """
    Why a worker may not be recycled as things are, in one line; None if it may.

    A worker that takes no requests anyway may be, whatever the others do, unless one is draining:
    that is how one that was left out comes back.

    Args:
        snapshots: every worker, this one included.
        worker_id: which.
        allow_downtime: whether a model may be without a worker meanwhile.
    """
    known = {snapshot.worker.worker_id: snapshot for snapshot in snapshots}
    chosen = known.pop(worker_id, None)
    if chosen is None:
        return f"there is no worker {worker_id}"
    if chosen.leaving:
        return f"worker {worker_id} is leaving: it is listed no longer"
    others = tuple(other for other in known.values() if not other.leaving)
    if chosen.takes_requests:
        return _unfit(others) or (None if allow_downtime else _missed(chosen, others))
    draining = [other for other in others if other.admission is Admission.DRAINING]
    return _unfit(draining)


def _unfit(others: Iterable[WorkerSnapshot]) -> str | None:
    """Why the others cannot be relied on meanwhile."""
    for other in others:
        name = other.worker.worker_id
        if other.admission is Admission.DRAINING:
            return f"worker {name} is being recycled: wait until that is done"
        if other.admission is not Admission.ADMITTED:
            return f"worker {name} is not admitted: recycle that one first"
        if other.drained:
            return f"worker {name} is drained: let it have requests again first"
        if not other.healthy:
            return f"worker {name} is down: wait until it is back"
    return None


def _missed(chosen: WorkerSnapshot, others: tuple[WorkerSnapshot, ...]) -> str | None:
    """What nobody would serve meanwhile."""
    name = chosen.worker.worker_id
    if not others:
        return f"worker {name} is the only one: start another that serves the same models"
    for served in chosen.models:
        if not any(other.serves(served.name) for other in others):
            return f"worker {name} is the last one that serves {served.name}: start another"
    return None


def is_another(before: WorkerSnapshot, now: WorkerSnapshot, *, was_down: bool) -> bool:
    """
    Whether what is seen now is another process than before.

    Args:
        before: the last look before the restart.
        now: the latest look.
        was_down: whether the worker was seen down since; tells where neither its supervisor nor its
            plugin does, because one that drains may still answer.
    """
    if now.worker is not before.worker:
        return True
    epochs = [look.reading.epoch if look.reading is not None else "" for look in (before, now)]
    return epochs[0] != epochs[1] if all(epochs) else was_down
