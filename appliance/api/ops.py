"""Health and readiness, on both listeners, and metrics for Prometheus.  None of these is audited."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.services import Services
from appliance.infra.metrics.page import page

health = APIRouter()
metrics = APIRouter()


@health.get("/healthz")
async def healthz() -> Response:
    """Liveness: the process answers."""
    return JSONResponse({"status": "ok"})


@health.get("/readyz")
async def readyz(request: Request) -> Response:
    """
    Readiness: whether a request would be served now, each check, and warnings.

    With `exclude=workers` a gateway stays ready when all workers are away: out of its Service it would refuse
    connections, instead of letting requests wait or answering 503.  Before its first worker it has no models.
    """
    services: Services = request.app.state.services
    excludes_workers = request.query_params.get("exclude") == "workers" and services.pool.had_healthy()
    audit, egress = services.audit_health(), services.egress_status()
    others = (services.tenants_warning(), services.forward_warning(), services.wall.warning)
    checks = {
        "audit": audit.problem(services.audit.state().failure) or "ok",
        "workers": "ok" if services.pool.any_healthy() else "no worker is healthy",
    }
    if egress.mode != "off":
        checks["egress"] = egress.problem or "ok"
    ready = all(state == "ok" or (name == "workers" and excludes_workers) for name, state in checks.items())
    return JSONResponse(
        {
            "status": "ready" if ready else "not_ready",
            "checks": checks,
            "warnings": [*audit.warnings, *filter(None, others), *egress.warnings],
        },
        status_code=200 if ready else 503,
    )


@metrics.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """All metrics as Prometheus text, or as OpenMetrics with exemplars if requested."""
    services: Services = request.app.state.services
    text, content_type = await page(services.metrics.registry, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})
