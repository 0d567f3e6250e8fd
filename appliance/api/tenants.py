"""
Admin routes for tenants and keys, used by `appliance tenant` and `appliance key`.

A change is in the audit log before it is made, and in force on this gateway before the answer is sent; other
gateways apply it at their next poll.  No answer has a digest, and only the one that creates a key has the
key.
"""

import secrets
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.body import read_flag, read_line, read_members
from appliance.api.scopes import require_scopes
from appliance.api.services import Services
from appliance.control.tenants.registrar import Edit, Registrar
from appliance.errors import ConfigurationError, InvalidRequestError, TenantsUnavailableError
from appliance.tenancy import KEY_BYTES, AdminScope, ApiKey, Caller, Tenant, make_key
from appliance.tenancy.edits import (
    add_key,
    change_tenant,
    create_tenant,
    delete_tenant,
    merge_patch,
    revoke_key,
    rotate_key,
)
from appliance.tenancy.file import describe_key, encode_policy, parse_models, parse_scopes
from appliance.tenancy.moments import parse_moment
from appliance.tenancy.roster import find_key, find_tenant

OVERLAP_SECONDS = 24 * 3600
MAX_OVERLAP_SECONDS = 365 * 86400
REASON_CHARACTERS = 200

router = APIRouter()


@router.get("/tenants")
async def list_tenants(request: Request, _caller: AdminCaller) -> Response:
    """Every tenant with its policy, its limits and the public part of its keys."""
    roster = await _registrar(request).roster()
    now = _now(request)
    return _answer({"tenants": [_shown(tenant, now) for tenant in roster.tenants]})


@router.post("/tenants")
async def create(request: Request, caller: AdminCaller) -> Response:
    """Create a tenant from `name` and the members of the tenants file."""
    members = await read_members(request)
    name = members.pop("name", None)
    if not isinstance(name, str):
        raise InvalidRequestError("`name` must be the new tenant's name.", param="name")
    policy = merge_patch({}, members)
    return await _apply(request, caller, name, lambda tenants: create_tenant(tenants, name, policy), 201)


@router.get("/tenants/{name}")
async def show(request: Request, name: str, _caller: AdminCaller) -> Response:
    """One tenant."""
    roster = await _registrar(request).roster()
    return _answer(_shown(find_tenant(roster.tenants, name), _now(request)))


@router.patch("/tenants/{name}")
async def change(request: Request, name: str, caller: AdminCaller) -> Response:
    """Change the members in the body (RFC 7396: null restores the default)."""
    patch = await read_members(request)
    return await _apply(request, caller, name, lambda tenants: change_tenant(tenants, name, patch))


@router.delete("/tenants/{name}")
async def delete(request: Request, name: str, caller: AdminCaller) -> Response:
    """Remove a tenant and all its keys."""
    await _registrar(request).apply(lambda tenants: delete_tenant(tenants, name), actor=caller.key.key_id)
    return _answer({"name": name, "deleted": True})


@router.post("/tenants/{name}/keys")
async def make(request: Request, name: str, caller: AdminCaller) -> Response:
    """Create a key; only this answer has it."""
    members = await read_members(request, "models", "expires_at", "admin", "scopes")
    admin, models, now = read_flag(members, "admin"), members.get("models"), int(_now(request))
    try:
        text, key = make_key(
            secrets.token_bytes(KEY_BYTES),
            admin=admin,
            scopes=parse_scopes("the key", members.get("scopes"), admin=admin),
            models=None if models is None else parse_models("the key", models),
            created_at=now,
            expires_at=_expiry(members),
        )
    except ConfigurationError as error:
        raise InvalidRequestError(f"{error}.") from error
    _require_scopes_of(key, caller)
    return await _apply_key(request, caller, text, key.key_id, lambda tenants: add_key(tenants, name, key))


@router.post("/keys/{key_id}/rotate")
async def rotate(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """Create a key that replaces another, which expires later; only this answer has the new key."""
    members = await read_members(request, "overlap_seconds", "expires_at")
    overlap, now = members.get("overlap_seconds", OVERLAP_SECONDS), int(_now(request))
    if not isinstance(overlap, int) or isinstance(overlap, bool) or not 0 <= overlap <= MAX_OVERLAP_SECONDS:
        message = f"`overlap_seconds` must be a whole number from 0 to {MAX_OVERLAP_SECONDS}."
        raise InvalidRequestError(message, param="overlap_seconds")
    text, key = make_key(secrets.token_bytes(KEY_BYTES), created_at=now, expires_at=_expiry(members))

    def edit(tenants: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
        # The caller gets the successor, with the permissions of the key.
        _require_scopes_of(find_key(tenants, key_id)[1], caller)
        return rotate_key(tenants, key_id, key, now=now, overlap_seconds=overlap)

    return await _apply_key(request, caller, text, key.key_id, edit)


@router.post("/keys/{key_id}/revoke")
async def revoke(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """Revoke a key."""
    members = await read_members(request, "reason")
    reason = None if members.get("reason") is None else read_line(members, "reason", REASON_CHARACTERS)
    now = _now(request)
    roster = await _registrar(request).apply(
        lambda tenants: revoke_key(tenants, key_id, now=int(now)), actor=caller.key.key_id, reason=reason
    )
    return _answer(_shown_key(roster.tenants, key_id, now))


def _require_scopes_of(key: ApiKey, caller: Caller) -> None:
    """Raises MissingScopeError if the caller would get a key that may do more than its own."""
    require_scopes(caller.key, *(scope for scope in AdminScope if key.has_scope(scope)))


async def _apply(request: Request, caller: Caller, name: str, edit: Edit, status: int = 200) -> Response:
    try:
        roster = await _registrar(request).apply(edit, actor=caller.key.key_id)
    except ConfigurationError as error:
        raise InvalidRequestError(f"{error}.") from error
    return _answer(_shown(find_tenant(roster.tenants, name), _now(request)), status)


async def _apply_key(request: Request, caller: Caller, text: str, key_id: str, edit: Edit) -> Response:
    roster = await _registrar(request).apply(edit, actor=caller.key.key_id)
    return _answer({"key": text, **_shown_key(roster.tenants, key_id, _now(request))}, 201)


def _shown(tenant: Tenant, now: float) -> dict[str, Any]:
    keys = [_shown_key((tenant,), key.key_id, now) for key in tenant.keys]
    return {"name": tenant.name, **encode_policy(tenant), "keys": keys}


def _shown_key(tenants: tuple[Tenant, ...], key_id: str, now: float) -> dict[str, Any]:
    tenant, key = find_key(tenants, key_id)
    return {
        "key_id": key_id,
        "tenant": tenant.name,
        "admin": key.admin,
        "in_force": key.is_valid_at(now) and not tenant.disabled,
        **describe_key(key),
    }


def _expiry(members: dict[str, Any]) -> int | None:
    if members.get("expires_at") is None:
        return None
    try:
        return parse_moment("`expires_at`", members["expires_at"])
    except ConfigurationError as error:
        raise InvalidRequestError(f"{error}.", param="expires_at") from error


def _answer(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status_code=status, headers={"Cache-Control": "no-store"})


def _now(request: Request) -> float:
    services: Services = request.app.state.services
    return services.clock()


def _registrar(request: Request) -> Registrar:
    services: Services = request.app.state.services
    if services.registrar is None:
        raise TenantsUnavailableError("This gateway has no database of tenants.")
    return services.registrar
