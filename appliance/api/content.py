"""
Admin routes for stored content: erase, prune, hold.

Fails closed: an erasure is in the log before content is deleted, and a hold before the answer is sent.
"""

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.body import read_members
from appliance.api.services import Services
from appliance.audit.content.retention import Retention, parse_erasure, parse_line, parse_moment, parse_tenant
from appliance.errors import ControlRefusedError

router = APIRouter()


@router.post("/audit/erasures")
async def erase(request: Request, caller: AdminCaller) -> Response:
    """Erase content of a tenant: of named requests, from before a time, or all; then its files too."""
    services: Services = request.app.state.services
    wanted = parse_erasure(await read_members(request))
    erased = await _retention(request).erase(wanted, actor=caller.key.key_id)
    files = 0
    # After a crash before this line encrypted files have lost their keys and are swept; the others need
    # another request.
    if services.files is not None and not wanted.requests:
        before_ms = services.clock() * 1000 + 1 if wanted.before_ms is None else wanted.before_ms
        files = await services.files.erase(wanted.tenant, int(before_ms))
    return JSONResponse({**asdict(erased), "files": files})


@router.post("/audit/prunes")
async def prune(request: Request, caller: AdminCaller) -> Response:
    """Erase every tenant's content from before a time, except content under a hold."""
    members = await read_members(request, "before")
    before_ms = parse_moment(members.get("before"), "before")
    erased = await _retention(request).prune(before_ms, actor=caller.key.key_id)
    return JSONResponse({"erased": [asdict(each) for each in erased]})


@router.get("/audit/holds")
async def list_holds(request: Request, _caller: AdminCaller) -> Response:
    """The tenants under a legal hold, with the reason."""
    return JSONResponse({"holds": await _retention(request).holds()})


@router.post("/audit/holds")
async def place_hold(request: Request, caller: AdminCaller) -> Response:
    """Forbid to erase and prune the content of a tenant."""
    members = await read_members(request, "tenant", "reason")
    tenant, reason = parse_tenant(members), parse_line(members, "reason")
    index = await _retention(request).place_hold(tenant, reason, actor=caller.key.key_id)
    return JSONResponse({"tenant": tenant, "index": index}, status_code=201)


@router.post("/audit/holds/releases")
async def release_hold(request: Request, caller: AdminCaller) -> Response:
    """End a tenant's hold."""
    members = await read_members(request, "tenant", "reason")
    tenant, reason = parse_tenant(members), parse_line(members, "reason")
    index = await _retention(request).release_hold(tenant, reason, actor=caller.key.key_id)
    return JSONResponse({"tenant": tenant, "index": index}, status_code=201)


def _retention(request: Request) -> Retention:
    services: Services = request.app.state.services
    if services.retention is None:
        raise ControlRefusedError("This gateway stores no content.")
    return services.retention
