"""Admin routes of the egress check; docs/how-to/check-egress.md describes the report."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.services import Services
from appliance.errors import ControlRefusedError
from appliance.sovereignty.egress.egress_status import EgressStatus

router = APIRouter()


@router.get("/egress")
async def show(request: Request, _caller: AdminCaller) -> Response:
    """The mode of this gateway's egress checks, its status, and the last report."""
    services: Services = request.app.state.services
    status = services.egress_status()
    return JSONResponse(
        {
            "mode": status.mode,
            "problem": status.problem,
            "warnings": list(status.warnings),
            "last": status.last.to_json() if status.last else None,
            "conclusive": status.conclusive.to_json() if status.conclusive else None,
        }
    )


@router.post("/egress/check")
async def check(request: Request, caller: AdminCaller) -> Response:
    """Check egress now, record the result, and return it."""
    services: Services = request.app.state.services
    if services.egress is None:
        raise ControlRefusedError("This gateway makes no egress checks.")
    report, receipt = await services.egress.check(caller.key.key_id)
    return JSONResponse(report.to_json() | {"entry": receipt.entry_id})


def summary_of(status: EgressStatus) -> dict[str, Any]:
    """The last check in short; null before the first."""
    last = status.last
    return {
        "mode": status.mode,
        "verdict": str(last.verdict) if last else None,
        "time": last.time if last else None,
        "why": last.why if last else "",
    }
