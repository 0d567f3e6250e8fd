"""Admin routes for workers: list, reload, drain."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.body import read_flag, read_members
from appliance.api.services import Services
from appliance.control.override import parse_note
from appliance.errors import WorkerNotFoundError
from appliance.serving.worker import WorkerId, WorkerSnapshot

router = APIRouter()


@router.get("/workers")
async def show(request: Request, _caller: AdminCaller) -> Response:
    """Every worker of this gateway, whether it gets requests, and its slots."""
    services: Services = request.app.state.services
    return JSONResponse({"workers": [_worker(services, seen) for seen in services.pool.snapshots]})


@router.post("/workers/reload")
async def reload(request: Request, caller: AdminCaller) -> Response:
    """Reload the list of workers from the settings file, as SIGHUP does."""
    services: Services = request.app.state.services
    changes = await services.workers.reload(caller.key.key_id)
    return JSONResponse({"joined": list(changes.joined), "left": list(changes.left)})


@router.post("/workers/{worker}/drain")
async def drain(request: Request, worker: str, caller: AdminCaller) -> Response:
    """Send a worker no new requests; those in flight finish."""
    services: Services = request.app.state.services
    members = await read_members(request, "note", "force")
    force = read_flag(members, "force")
    seen = _known(services, worker)
    note = parse_note(members.get("note", ""))
    await services.workers.drain(seen.worker.worker_id, actor=caller.key.key_id, note=note, force=force)
    return JSONResponse(_worker(services, _known(services, worker)), status_code=202)


@router.post("/workers/{worker}/undrain")
async def undrain(request: Request, worker: str, caller: AdminCaller) -> Response:
    """Send a worker requests again."""
    services: Services = request.app.state.services
    members = await read_members(request, "note")
    seen = _known(services, worker)
    note = parse_note(members.get("note", ""))
    await services.workers.undrain(seen.worker.worker_id, actor=caller.key.key_id, note=note)
    return JSONResponse(_worker(services, _known(services, worker)))


def _known(services: Services, worker: str) -> WorkerSnapshot:
    seen = services.pool.snapshot(WorkerId(worker))
    if seen is None:
        raise WorkerNotFoundError("No worker has this id; GET /admin/v1/workers lists them.")
    return seen


def _worker(services: Services, seen: WorkerSnapshot) -> dict[str, Any]:
    worker_id, metrics = seen.worker.worker_id, seen.metrics
    return {
        "worker": worker_id,
        "url": seen.worker.url,
        "models": [served.name for served in seen.models],
        "takes_requests": seen.takes_requests,
        "healthy": seen.healthy,
        "admission": seen.admission,
        "drained": seen.drained,
        "leaving": seen.leaving,
        "avoided": seen.avoided,
        "breaker": services.gateway.admission.breaker(worker_id),
        "in_flight": services.pool.in_flight.get(worker_id, 0),
        "places": services.gateway.admission.slots(worker_id),
        "running": metrics.running if metrics else 0,
        "waiting": metrics.waiting if metrics else 0,
    }
