"""
What orchestrators and Prometheus ask: alive, ready, metrics.  None of these is audited.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.services import Services
from appliance.infra.metrics.page import page

router = APIRouter()


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers; says nothing about the rest."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Whether a request would be served now, what is missing if not, and what needs to be looked at."""
    services: Services = request.app.state.services
    health, late = services.audit_health(), services.tenants_warning()
    egress = services.egress_standing()
    checks = {
        "audit": health.problem(services.audit.state().failure) or "ok",
        "workers": "ok" if services.pool.any_healthy() else "no worker is healthy",
    }
    if egress.mode != "off":
        checks["egress"] = egress.problem or "ok"
    ready = all(state == "ok" for state in checks.values())
    return JSONResponse(
        {
            "status": "ready" if ready else "not_ready",
            "checks": checks,
            "warnings": [*health.warnings, *([late] if late else []), *egress.warnings],
        },
        status_code=200 if ready else 503,
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything measured, as Prometheus text, or as OpenMetrics, which has exemplars, if asked for."""
    services: Services = request.app.state.services
    text, content_type = await page(services.metrics.registry, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})
