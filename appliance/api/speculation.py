"""
Admin routes for speculation: each worker's mode and reason, overrides, probes and recycling.

An override is recorded before it is in force, and in force before the answer is sent: if the audit log or the
database of overrides fails, nothing changes and the answer is an error.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.body import read_flag, read_members
from appliance.api.services import Services
from appliance.audit.entry import format_time
from appliance.audit.entry_types import EntryType
from appliance.control.override import (
    AUTO,
    EVERY_WORKER,
    Override,
    in_force,
    override_for,
    parse_note,
    parse_override,
)
from appliance.control.view import BucketView, WorkerView
from appliance.errors import ControlUnavailableError, InvalidRequestError, WorkerNotFoundError
from appliance.gateway.attribution import Aspect, Attribution, DraftFigures
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import draft_tokens_at, missing_of
from appliance.tenancy import Caller

OFFENDERS = 10
SHARES = 20
EVENTS = 256
PLACES = 3

router = APIRouter()


@router.get("/speculation")
async def show(request: Request, _caller: AdminCaller) -> Response:
    """Each worker's speculation, the active overrides, and acceptance by tenant, template and context."""
    services: Services = request.app.state.services
    now = services.clock()
    overrides, failure = await read_overrides(services, now)
    workers = []
    for snapshot in services.pool.snapshots:
        worker_id = snapshot.worker.worker_id
        order = override_for(overrides, worker_id, now)
        workers.append(_worker(snapshot, services.control.view(worker_id), order))
    return JSONResponse(
        {
            "now": round(now, PLACES),
            "workers": workers,
            "overrides": [_override(order) for order in overrides],
            "failure": failure,
            "attribution": _attribution(services.attribution),
        }
    )


@router.put("/speculation/override")
async def override(request: Request, caller: AdminCaller) -> Response:
    """Override the mode of a worker for a time, or remove an override (`auto`)."""
    members = await read_members(request)
    order = await set_override(request.app.state.services, caller, members)
    return JSONResponse({"worker": members["worker"], "override": _override(order)})


async def set_override(services: Services, caller: Caller, members: Mapping[str, Any]) -> Override | None:
    """The override in force, or None if it was removed."""
    now = services.clock()
    asked = parse_override(members)
    if asked.mode is not None:
        _known(services, asked.worker, EVERY_WORKER)
    else:
        # A worker that has left the pool may still have an override, which can be removed.
        overridden = {each.worker for each in await services.overrides.list()}
        _known(services, asked.worker, EVERY_WORKER, *overridden)
    order = asked.made_by(caller.key.key_id, now)
    await services.audit.append(
        EntryType.SPECULATION_OVERRIDDEN,
        actor=caller.key.key_id,
        worker=asked.worker,
        mode=str(asked.mode or AUTO),
        draft_tokens=asked.draft_tokens,
        until=format_time(int(order.expires_at * 1000)) if order else None,
        note=asked.note or None,
    )
    if order is None:
        await services.overrides.delete(asked.worker)
    else:
        await services.overrides.put(order)
    return order


@router.post("/workers/{worker}/recycle")
async def recycle(request: Request, worker: str, caller: AdminCaller) -> Response:
    """Start to drain a worker and restart it, with or without its draft."""
    members = await read_members(request, "with_draft", "note")
    with_draft = read_flag(members, "with_draft", default=True)
    start_recycle(request.app.state.services, caller, worker, members)
    return JSONResponse({"worker": worker, "with_draft": with_draft}, status_code=202)


def start_recycle(services: Services, caller: Caller, worker: str, members: Mapping[str, Any]) -> None:
    with_draft = read_flag(members, "with_draft", default=True)
    note = parse_note(members.get("note", ""))
    _known(services, worker)
    services.control.request_recycle(
        WorkerId(worker), with_draft=with_draft, note=note, actor=caller.key.key_id
    )


@router.get("/speculation/events")
async def events(request: Request, _caller: AdminCaller) -> Response:
    """The newest changes after a sequence number, oldest first; numbers restart with the gateway."""
    services: Services = request.app.state.services
    after = request.query_params.get("after", "0")
    if not (after.isascii() and after.isdigit() and len(after) <= len(str(2**53))):
        raise InvalidRequestError("`after` must be the sequence number of an event, or 0.", param="after")
    found = services.control.events(int(after))[-EVENTS:]
    return JSONResponse(
        {"now": round(services.clock(), PLACES), "events": [asdict(event) for event in found]}
    )


async def read_overrides(services: Services, now: float) -> tuple[tuple[Override, ...], str | None]:
    """The active overrides, or why they cannot be read: the rest of the page does not need them."""
    try:
        return in_force(await services.overrides.list(), now), None
    except ControlUnavailableError as error:
        return (), str(error)


def show_acceptance(snapshot: WorkerSnapshot) -> dict[str, Any]:
    """Acceptance over the monitor's window; nulls without drafts."""
    window = snapshot.figures.window
    return {
        "acceptance_length": _rounded(window.acceptance_length if window.drafts else None),
        "acceptance_rate": _rounded(window.acceptance_rate if window.drafts else None),
        "acceptance_rate_per_position": [
            _rounded(rate) for rate in window.acceptance_rate_per_position if window.drafts
        ],
        "window_drafts": window.drafts,
    }


def _known(services: Services, worker: str, *others: str) -> None:
    if services.pool.snapshot(WorkerId(worker)) is None and worker not in others:
        raise WorkerNotFoundError("No worker has this id; GET /admin/v1/speculation lists them.")


def _worker(snapshot: WorkerSnapshot, view: WorkerView | None, order: Override | None) -> dict[str, Any]:
    reading = snapshot.reading
    table = reading.table if reading else ()
    return {
        "worker": snapshot.worker.worker_id,
        "models": [served.name for served in snapshot.models],
        "healthy": snapshot.healthy,
        "admission": snapshot.admission,
        "avoided": snapshot.avoided,
        "speculates": snapshot.speculates,
        "controllable": view is not None and view.controllable,
        "problems": list(view.problems) if view else [],
        "missing_capabilities": missing_of(reading),
        "mode": snapshot.decision.mode,
        "reason": snapshot.decision.reason,
        "since": _rounded(view.since if view else None),
        "table": [list(span) for span in table],
        "batch": reading.batch if reading else 0,
        "draft_tokens": draft_tokens_at(table, max(1, reading.batch)) if reading and table else None,
        **show_acceptance(snapshot),
        "buckets": [_bucket(bucket) for bucket in view.buckets] if view else [],
        "exploration_share": _rounded(view.exploration_share if view else None),
        "override": _override(order),
    }


def _bucket(view: BucketView) -> dict[str, Any]:
    return {
        "bucket": view.bucket,
        "draft_tokens": view.draft_tokens,
        "reason": view.reason,
        "break_even": _rounded(view.break_even),
        "break_evens": {str(k): _rounded(value) for k, value in sorted(view.break_evens.items())},
        "payoff": _rounded(view.payoff),
        "tokens_per_second": {str(k): _rounded(speed) for k, speed in sorted(view.tokens_per_second.items())},
    }


def _override(order: Override | None) -> dict[str, Any] | None:
    return asdict(order) if order else None


def _attribution(attribution: Attribution) -> dict[str, Any]:
    return {
        "offenders": [_figures(offender) for offender in attribution.offenders(OFFENDERS)],
        "by_tenant": [_figures(share) for share in attribution.by(Aspect.TENANT)[:SHARES]],
        "by_template": [_figures(share) for share in attribution.by(Aspect.TEMPLATE)[:SHARES]],
        "by_context": [_figures(share) for share in attribution.by(Aspect.CONTEXT)[:SHARES]],
    }


def _figures(row: DraftFigures) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, float) else value for name, value in asdict(row).items()
    }


def _rounded(value: float | None) -> float | None:
    """A number for JSON, which has no infinity."""
    return round(value, PLACES) if value is not None and math.isfinite(value) else None
