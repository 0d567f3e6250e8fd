"""OpenAI's batch API: requests in a file, run on idle capacity."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import address_class
from appliance.api.body import read_members
from appliance.api.error_responses import UNEXPECTED_MESSAGE, error_response, render
from appliance.api.files import StorageCaller
from appliance.api.paging import page, parse_window
from appliance.api.services import Services
from appliance.errors import UNEXPECTED, ApplianceError, RouteNotFoundError
from appliance.gateway.batch.batch import Batch, BatchProblem
from appliance.gateway.batch.batches import Batches
from appliance.gateway.batch.request import parse_batch_request

PATH = "/v1/batches"
MOST_BATCHES, USUAL_BATCHES = 100, 20
_MOMENTS = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip

router = APIRouter()


@router.post(PATH)
async def create_batch(request: Request, caller: StorageCaller) -> Response:
    """Create a batch."""
    order = parse_batch_request(await read_members(request))
    client = address_class(request.client.host if request.client else "")
    return JSONResponse(show_batch(await _batches(request).create(caller, order, client=client)))


@router.get(PATH)
async def list_batches(request: Request, caller: StorageCaller) -> Response:
    """The tenant's batches, newest first."""
    window = parse_window(request, usual=USUAL_BATCHES, most=MOST_BATCHES)
    return page(await _batches(request).list(caller.tenant.name, window), window, show_batch)


@router.get(f"{PATH}/{{batch_id}}")
async def get_batch(request: Request, batch_id: str, caller: StorageCaller) -> Response:
    """One batch and its progress."""
    return JSONResponse(show_batch(await _batches(request).get(caller.tenant.name, batch_id)))


@router.post(f"{PATH}/{{batch_id}}/cancel")
async def cancel_batch(request: Request, batch_id: str, caller: StorageCaller) -> Response:
    """Cancel a batch; finished lines can be downloaded."""
    return JSONResponse(show_batch(await _batches(request).cancel(caller.tenant.name, batch_id)))


def show_batch(batch: Batch) -> dict[str, Any]:
    moments = {f"{status}_at": moment for status, moment in batch.moments.items()}
    errors = {"object": "list", "data": [_show_problem(problem) for problem in batch.errors]}
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": str(batch.status),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: moments.get(name) for name in _MOMENTS},
        "request_counts": {
            "total": batch.counts.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "metadata": dict(batch.metadata) or None,
    }


def render_line(error: Exception, path: str) -> tuple[int, str, bool]:
    """Status and body for a line of a batch that failed, and whether a retry can help."""
    if isinstance(error, ApplianceError):
        response = render(error, path)
    else:
        response = error_response(UNEXPECTED, UNEXPECTED_MESSAGE, path)
    should_retry = response.headers["x-should-retry"] == "true"
    return response.status_code, bytes(response.body).decode(), should_retry


def _show_problem(problem: BatchProblem) -> dict[str, Any]:
    return {"code": problem.code, "message": problem.message, "param": problem.param, "line": problem.line}


def _batches(request: Request) -> Batches:
    services: Services = request.app.state.services
    if services.batches is None:
        raise RouteNotFoundError("This gateway runs no batches.")
    return services.batches
