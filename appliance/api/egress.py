"""
The egress check for operators: what the last one showed, and one more now.

The report's shape is `Report.to_json`, described in docs/how-to/check-egress.md.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import admin_caller
from appliance.api.services import Services
from appliance.errors import ControlRefusedError
from appliance.sovereignty.egress.standing import Standing
from appliance.tenancy import Caller

router = APIRouter()
AdminCaller = Annotated[Caller, Depends(admin_caller)]


@router.get("/egress")
async def show(request: Request, _caller: AdminCaller) -> Response:
    """How this gateway's egress checks are set up, how it stands after them, and the last one."""
    services: Services = request.app.state.services
    standing = services.egress_standing()
    return JSONResponse(
        {
            "mode": standing.mode,
            "problem": standing.problem,
            "warnings": list(standing.warnings),
            "last": standing.last.to_json() if standing.last else None,
            "conclusive": standing.conclusive.to_json() if standing.conclusive else None,
        }
    )


@router.post("/egress/check")
async def check(request: Request, caller: AdminCaller) -> Response:
    """Try to get out now, record how that ended, and tell."""
    services: Services = request.app.state.services
    if services.egress is None:
        message = "This gateway makes no egress checks."
        raise ControlRefusedError(message)
    report, receipt = await services.egress.check(caller.key.key_id)
    return JSONResponse(report.to_json() | {"entry": receipt.entry_id})


def summary_of(standing: Standing) -> dict[str, Any]:
    """The last check in short, as in the status; null before the first."""
    last = standing.last
    return {
        "mode": standing.mode,
        "verdict": str(last.verdict) if last else None,
        "time": last.time if last else None,
        "why": last.why if last else "",
    }
