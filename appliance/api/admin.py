"""The admin API."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api import audit, content, drafts, egress, speculation, tenants, workers
from appliance.api.auth import AdminCaller
from appliance.api.egress import summary_of
from appliance.api.scopes import ADMIN
from appliance.api.services import Services
from appliance.serving.worker import WorkerSnapshot

router = APIRouter(prefix=ADMIN)
router.include_router(audit.router)
router.include_router(content.router)
router.include_router(drafts.router)
router.include_router(egress.router)
router.include_router(speculation.router)
router.include_router(tenants.router)
router.include_router(workers.router)


@router.get("/status")
async def status(request: Request, _caller: AdminCaller) -> Response:
    """Workers, their speculation and the audit head, as `appliance status` shows them."""
    services: Services = request.app.state.services
    health = services.audit_health()
    return JSONResponse(
        {
            "version": services.version,
            "wall": {"is_up": services.wall.is_up, "detail": services.wall.detail},
            "egress": summary_of(services.egress_status()),
            "workers": [
                _worker(snapshot, services.pool.in_flight.get(snapshot.worker.worker_id, 0))
                for snapshot in services.pool.snapshots
            ],
            "audit": asdict(services.audit.state())
            | {"health": asdict(health), "warnings": list(health.warnings)},
        }
    )


def _worker(snapshot: WorkerSnapshot, in_flight: int) -> dict[str, Any]:
    metrics = snapshot.metrics
    return {
        "worker": snapshot.worker.worker_id,
        "url": snapshot.worker.url,
        "healthy": snapshot.healthy,
        "models": [served.name for served in snapshot.models],
        "engine": snapshot.engine,
        "mode": snapshot.decision.mode,
        "reason": snapshot.decision.reason,
        **speculation.show_acceptance(snapshot),
        "tokens_per_second": round(snapshot.tokens_per_second, 1),
        "running": metrics.running if metrics else 0,
        "waiting": metrics.waiting if metrics else 0,
        "kv_cache_usage": round(metrics.kv_cache_usage, 3) if metrics else 0.0,
        "in_flight": in_flight,
        "weights": snapshot.weights,
        "draft": snapshot.draft,
    }
