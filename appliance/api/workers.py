"""
Workers for operators: which there are and how full, and orders about them.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import admin_caller
from appliance.api.body import read_members
from appliance.api.services import Services
from appliance.control.override import parse_note
from appliance.errors import InvalidRequestError, WorkerNotFoundError
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.tenancy import Caller

router = APIRouter()
AdminCaller = Annotated[Caller, Depends(admin_caller)]


@router.get("/workers")
async def show(request: Request, _caller: AdminCaller) -> Response:
    """Every worker of this gateway, whether it gets requests, and how many it may have."""
    services: Services = request.app.state.services
    return JSONResponse({"workers": [_worker(services, seen) for seen in services.pool.snapshots]})


@router.post("/workers/reload")
async def reload(request: Request, caller: AdminCaller) -> Response:
    """Take over the list of workers from the settings file, as SIGHUP does."""
    services: Services = request.app.state.services
    changes = await services.workers.reload(caller.key.key_id)
    return JSONResponse({"joined": list(changes.joined), "left": list(changes.left)})


@router.post("/workers/{worker}/drain")
async def drain(request: Request, worker: str, caller: AdminCaller) -> Response:
    """Keep requests away from a worker; what it has is finished."""
    services: Services = request.app.state.services
    members = await read_members(request, "note", "force")
    force = members.get("force", False)
    if not isinstance(force, bool):
        message = "`force` must be true or false."
        raise InvalidRequestError(message, param="force")
    seen = _known(services, worker)
    note = parse_note(members.get("note", ""))
    await services.workers.drain(seen.worker.worker_id, actor=caller.key.key_id, note=note, force=force)
    return JSONResponse(_worker(services, _known(services, worker)), status_code=202)


@router.post("/workers/{worker}/undrain")
async def undrain(request: Request, worker: str, caller: AdminCaller) -> Response:
    """Let a worker take requests again."""
    services: Services = request.app.state.services
    members = await read_members(request, "note")
    seen = _known(services, worker)
    note = parse_note(members.get("note", ""))
    await services.workers.undrain(seen.worker.worker_id, actor=caller.key.key_id, note=note)
    return JSONResponse(_worker(services, _known(services, worker)))


def _known(services: Services, worker: str) -> WorkerSnapshot:
    seen = services.pool.snapshot(WorkerId(worker))
    if seen is None:
        message = "No worker has this id; GET /admin/v1/workers lists them."
        raise WorkerNotFoundError(message)
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
