"""
Admin routes for stored content: erase, prune, hold, and the approval of a second administrator.

Fails closed: an erasure is in the log before content is deleted, and a hold before the answer is sent.
"""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.body import read_members
from appliance.api.services import Services
from appliance.audit.content.retention import (
    MISDATED,
    NAMED_PER_ENTRY,
    Erased,
    Erasure,
    Retention,
    parse_erasure,
    parse_line,
    parse_moment,
    parse_tenant,
)
from appliance.audit.entry import format_time
from appliance.control.approvals import Approval, Approvals, Operation
from appliance.errors import ControlRefusedError, InvalidRequestError
from appliance.tenancy.moments import format_moment

router = APIRouter()


@router.post("/audit/erasures")
async def erase(request: Request, caller: AdminCaller) -> Response:
    """Erase content of a tenant: of named requests, from before a time, or all; then its files too."""
    services: Services = request.app.state.services
    wanted = parse_erasure(await read_members(request))
    if services.approvals is None:
        return JSONResponse(await _erase(request, wanted, caller.key.key_id))
    if len(wanted.requests) > NAMED_PER_ENTRY:
        message = f"Name at most {NAMED_PER_ENTRY} `requests`, so that one entry shows what is approved."
        raise InvalidRequestError(message, param="requests")
    return await _request_approval(
        request,
        Operation.ERASE,
        actor=caller.key.key_id,
        tenant=wanted.tenant,
        requests=wanted.requests or None,
        before=None if wanted.before_ms is None else format_time(wanted.before_ms),
        legal_basis=wanted.basis,
    )


@router.post("/audit/prunes")
async def prune(request: Request, caller: AdminCaller) -> Response:
    """Erase every tenant's content from before a time, except content under a hold."""
    services: Services = request.app.state.services
    members = await read_members(request, "before")
    before_ms = parse_moment(members.get("before"), "before")
    if services.approvals is None or not services.approvals.needed_to_prune(before_ms):
        return JSONResponse(await _prune(request, before_ms, caller.key.key_id))
    return await _request_approval(
        request, Operation.PRUNE, actor=caller.key.key_id, before=format_time(before_ms)
    )


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
    services: Services = request.app.state.services
    members = await read_members(request, "tenant", "reason")
    tenant, reason = parse_tenant(members), parse_line(members, "reason")
    if services.approvals is None:
        index = await _retention(request).release_hold(tenant, reason, actor=caller.key.key_id)
        return JSONResponse({"tenant": tenant, "index": index}, status_code=201)
    return await _request_approval(
        request, Operation.RELEASE, actor=caller.key.key_id, tenant=tenant, reason=reason
    )


@router.get("/audit/approvals")
async def list_approvals(request: Request, _caller: AdminCaller) -> Response:
    """The requests that wait for a second administrator, oldest first."""
    services: Services = request.app.state.services
    pending = [] if services.approvals is None else await services.approvals.pending()
    return JSONResponse({"approvals": [_shown(approval) for approval in pending]})


@router.post("/audit/approvals/{approval}")
async def approve(request: Request, approval: str, caller: AdminCaller) -> Response:
    """Approve a request of another administrator, and carry it out."""
    async with _approvals(request).approved(approval, by=caller.key.key_id) as approved:
        done = await _carry_out(request, approved, caller.key.key_id)
    return JSONResponse({"operation": approved.operation, **done})


@router.delete("/audit/approvals/{approval}")
async def withdraw(request: Request, approval: str, caller: AdminCaller) -> Response:
    """Withdraw a request, one's own or another administrator's."""
    await _approvals(request).withdraw(approval, by=caller.key.key_id)
    return JSONResponse({"approval": approval, "withdrawn": True})


async def _request_approval(
    request: Request,
    operation: Operation,
    **fields: Any,  # noqa: ANN401 - as the registry has them
) -> Response:
    _retention(request)
    approval = await _approvals(request).request(operation, **fields)
    return JSONResponse(_shown(approval), status_code=202)


async def _carry_out(request: Request, approval: Approval, approved_by: str) -> dict[str, Any]:
    fields, actor = approval.fields, approval.actor
    before_ms = parse_moment(fields["before"], "before") if "before" in fields else None
    match approval.operation:
        case Operation.ERASE:
            wanted = Erasure(
                tenant=fields["tenant"],
                requests=tuple(fields.get("requests", ())),
                before_ms=before_ms,
                basis=fields["legal_basis"],
                approved_by=approved_by,
            )
            return await _erase(request, wanted, actor)
        case Operation.PRUNE:
            assert before_ms is not None  # noqa: S101 - a prune without a time is no valid request
            return await _prune(request, before_ms, actor, approved_by)
        case Operation.RELEASE:
            tenant, reason = fields["tenant"], fields["reason"]
            index = await _retention(request).release_hold(
                tenant, reason, actor=actor, approved_by=approved_by
            )
            return {"tenant": tenant, "index": index}


async def _erase(request: Request, wanted: Erasure, actor: str) -> dict[str, Any]:
    services: Services = request.app.state.services
    erased = await _retention(request).erase(wanted, actor=actor)
    _warn(services, erased)
    files = 0
    # After a crash before this line encrypted files have lost their keys and are swept; the others need
    # another request.
    if services.files is not None and not wanted.requests:
        files = await services.files.erase(wanted.tenant, wanted.before_ms)
    return {**asdict(erased), "files": files}


async def _prune(
    request: Request, before_ms: int, actor: str, approved_by: str | None = None
) -> dict[str, Any]:
    erased = await _retention(request).prune(before_ms, actor=actor, approved_by=approved_by)
    _warn(request.app.state.services, *erased)
    return {"erased": [asdict(each) for each in erased]}


def _shown(approval: Approval) -> dict[str, Any]:
    return {
        "approval": approval.approval_id,
        "operation": approval.operation,
        "actor": approval.actor,
        "expires_at": format_moment(approval.expires_at),
        **approval.fields,
    }


def _warn(services: Services, *erased: Erased) -> None:
    for each in erased:
        if each.misdated:
            services.logger.warning(
                "content_misdated", tenant=each.tenant, count=each.misdated, detail=MISDATED
            )


def _retention(request: Request) -> Retention:
    services: Services = request.app.state.services
    if services.retention is None:
        raise ControlRefusedError("This gateway stores no content.")
    return services.retention


def _approvals(request: Request) -> Approvals:
    services: Services = request.app.state.services
    if services.approvals is None:
        raise ControlRefusedError("This gateway needs no approvals: audit.two_person is off.")
    return services.approvals
