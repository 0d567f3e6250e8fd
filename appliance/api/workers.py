"""Admin routes for workers: list, reload, drain."""

from collections.abc import Mapping
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
from appliance.tenancy import Caller

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
    members = await read_members(request, "note", "force")
    return JSONResponse(
        await set_drained(request.app.state.services, caller, worker, members, drained=True), status_code=202
    )


@router.post("/workers/{worker}/undrain")
async def undrain(request: Request, worker: str, caller: AdminCaller) -> Response:
    """Send a worker requests again."""
    members = await read_members(request, "note")
    return JSONResponse(await set_drained(request.app.state.services, caller, worker, members, drained=False))


async def set_drained(
    services: Services, caller: Caller, worker: str, members: Mapping[str, Any], *, drained: bool
) -> dict[str, Any]:
    """The worker as it is then."""
    worker_id, note = known(services, worker).worker.worker_id, parse_note(members.get("note", ""))
    actor = caller.key.key_id
    if drained:
        force = read_flag(members, "force")
        await services.workers.drain(worker_id, actor=actor, note=note, force=force)
    else:
        await services.workers.undrain(worker_id, actor=actor, note=note)
    return _worker(services, known(services, worker))


def known(services: Services, worker: str) -> WorkerSnapshot:
    """Raises WorkerNotFoundError for a worker that is not in the pool."""
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
