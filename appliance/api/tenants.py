"""
Admin routes for tenants and keys, used by `appliance tenant` and `appliance key`.

A change is in the audit log before it is made, and in force on this gateway before the answer is sent; other
gateways apply it at their next poll.  No answer has a digest, and only the one that creates a key has the
key.
"""

import secrets
from collections.abc import Callable, Mapping
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
from appliance.tenancy.directory import callers_of
from appliance.tenancy.edits import (
    add_key,
    change_tenant,
    create_tenant,
    delete_tenant,
    merge_patch,
    revoke_key,
    rotate_key,
)
from appliance.tenancy.file import (
    describe_key,
    encode_policy,
    parse_key_limits,
    parse_manage_keys,
    parse_models,
    parse_scopes,
)
from appliance.tenancy.moments import parse_moment
from appliance.tenancy.roster import find_key, find_tenant

OVERLAP_SECONDS = 24 * 3600
MAX_OVERLAP_SECONDS = 365 * 86400
REASON_CHARACTERS = 200

router = APIRouter()


@router.get("/tenants")
async def list_tenants(request: Request, _caller: AdminCaller) -> Response:
    """Every tenant with its policy, its limits and the public part of its keys."""
    services: Services = request.app.state.services
    roster = await registrar_of(services).roster()
    now = services.clock()
    return answer({"tenants": [_shown(tenant, now) for tenant in roster.tenants]})


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
    services: Services = request.app.state.services
    roster = await registrar_of(services).roster()
    return answer(_shown(find_tenant(roster.tenants, name), services.clock()))


@router.patch("/tenants/{name}")
async def change(request: Request, name: str, caller: AdminCaller) -> Response:
    """Change the members in the body (RFC 7396: null restores the default)."""
    patch = await read_members(request)
    return await _apply(request, caller, name, lambda tenants: change_tenant(tenants, name, patch))


@router.delete("/tenants/{name}")
async def delete(request: Request, name: str, caller: AdminCaller) -> Response:
    """Remove a tenant and all its keys."""
    services: Services = request.app.state.services
    await registrar_of(services).apply(lambda tenants: delete_tenant(tenants, name), actor=caller.key.key_id)
    return answer({"name": name, "deleted": True})


@router.post("/tenants/{name}/keys")
async def make(request: Request, name: str, caller: AdminCaller) -> Response:
    """Create a key; only this answer has it."""
    members = await read_members(request, "models", "limits", "expires_at", "admin", "scopes", "manage_keys")
    return answer(await create_key(request.app.state.services, caller, name, members), 201)


@router.post("/keys/{key_id}/rotate")
async def rotate(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """Create a key that replaces another, which expires later; only this answer has the new key."""
    members = await read_members(request, "overlap_seconds", "expires_at")
    return answer(await replace_key(request.app.state.services, caller, key_id, members), 201)


@router.post("/keys/{key_id}/revoke")
async def revoke(request: Request, key_id: str, caller: AdminCaller) -> Response:
    """Revoke a key."""
    members = await read_members(request, "reason")
    return answer(await end_key(request.app.state.services, caller, key_id, members))


async def create_key(
    services: Services, caller: Caller, name: str, members: Mapping[str, Any]
) -> dict[str, Any]:
    """The new key and what is stored of it."""
    text, key = new_key(services, members)
    _require_scopes_of(key, caller)
    return await apply_key(services, caller, text, key.key_id, lambda tenants: add_key(tenants, name, key))


def new_key(services: Services, members: Mapping[str, Any]) -> tuple[str, ApiKey]:
    """The text of a key and its stored form; raises InvalidRequestError."""
    admin, models, now = read_flag(members, "admin"), members.get("models"), int(services.clock())
    try:
        return make_key(
            secrets.token_bytes(KEY_BYTES),
            admin=admin,
            scopes=parse_scopes("the key", members.get("scopes"), admin=admin),
            models=None if models is None else parse_models("the key", models),
            limits=parse_key_limits("the key", members.get("limits"), admin=admin),
            manage_keys=parse_manage_keys("the key", members.get("manage_keys", False), admin=admin),
            created_at=now,
            expires_at=_expiry(members),
        )
    except ConfigurationError as error:
        raise InvalidRequestError(f"{error}.") from error


async def replace_key(
    services: Services, caller: Caller, key_id: str, members: Mapping[str, Any]
) -> dict[str, Any]:
    """The new key and what is stored of it."""
    text, key, overlap = new_successor(services, members)
    now = int(services.clock())

    def edit(tenants: tuple[Tenant, ...]) -> tuple[Tenant, ...]:
        # The caller gets the successor, with the permissions of the key.
        _require_scopes_of(find_key(tenants, key_id)[1], caller)
        return rotate_key(tenants, key_id, key, now=now, overlap_seconds=overlap)

    return await apply_key(services, caller, text, key.key_id, edit)


def new_successor(services: Services, members: Mapping[str, Any]) -> tuple[str, ApiKey, int]:
    """The text of a key, its stored form, and the seconds that the key it replaces stays valid."""
    overlap = members.get("overlap_seconds", OVERLAP_SECONDS)
    if not isinstance(overlap, int) or isinstance(overlap, bool) or not 0 <= overlap <= MAX_OVERLAP_SECONDS:
        message = f"`overlap_seconds` must be a whole number from 0 to {MAX_OVERLAP_SECONDS}."
        raise InvalidRequestError(message, param="overlap_seconds")
    text, key = make_key(
        secrets.token_bytes(KEY_BYTES), created_at=int(services.clock()), expires_at=_expiry(members)
    )
    return text, key, overlap


async def end_key(
    services: Services, caller: Caller, key_id: str, members: Mapping[str, Any]
) -> dict[str, Any]:
    """What is stored of the revoked key."""
    reason = None if members.get("reason") is None else read_line(members, "reason", REASON_CHARACTERS)
    return await apply_revocation(
        services, caller, key_id, lambda tenants, now: revoke_key(tenants, key_id, now=now), reason=reason
    )


async def apply_revocation(
    services: Services,
    caller: Caller,
    key_id: str,
    revoke: Callable[[tuple[Tenant, ...], int], tuple[Tenant, ...]],
    *,
    reason: str | None = None,
) -> dict[str, Any]:
    """What is stored of the revoked key."""
    now = services.clock()
    roster = await registrar_of(services).apply(
        lambda tenants: revoke(tenants, int(now)), actor=caller.key.key_id, reason=reason
    )
    return shown_key(roster.tenants, key_id, now)


def _require_scopes_of(key: ApiKey, caller: Caller) -> None:
    """Raises MissingScopeError if the caller would get a key that may do more than its own."""
    require_scopes(caller.key, *(scope for scope in AdminScope if key.has_scope(scope)))


async def _apply(request: Request, caller: Caller, name: str, edit: Edit, status: int = 200) -> Response:
    services: Services = request.app.state.services
    try:
        roster = await registrar_of(services).apply(edit, actor=caller.key.key_id)
    except ConfigurationError as error:
        raise InvalidRequestError(f"{error}.") from error
    return answer(_shown(find_tenant(roster.tenants, name), services.clock()), status)


async def apply_key(services: Services, caller: Caller, text: str, key_id: str, edit: Edit) -> dict[str, Any]:
    roster = await registrar_of(services).apply(edit, actor=caller.key.key_id)
    return {"key": text, **shown_key(roster.tenants, key_id, services.clock())}


def _shown(tenant: Tenant, now: float) -> dict[str, Any]:
    keys = [shown_key((tenant,), key.key_id, now) for key in tenant.keys]
    return {"name": tenant.name, **encode_policy(tenant), "keys": keys}


def shown_key(tenants: tuple[Tenant, ...], key_id: str, now: float) -> dict[str, Any]:
    tenant, key = find_key(tenants, key_id)
    return {
        "key_id": key_id,
        "tenant": tenant.name,
        "admin": key.admin,
        "in_force": callers_of(tenant)[key_id].is_valid_at(now) and not tenant.disabled,
        **describe_key(key),
    }


def _expiry(members: Mapping[str, Any]) -> int | None:
    if members.get("expires_at") is None:
        return None
    try:
        return parse_moment("`expires_at`", members["expires_at"])
    except ConfigurationError as error:
        raise InvalidRequestError(f"{error}.", param="expires_at") from error


def answer(content: dict[str, Any], status: int = 200) -> Response:
    return JSONResponse(content, status_code=status, headers={"Cache-Control": "no-store"})


def registrar_of(services: Services) -> Registrar:
    if services.registrar is None:
        raise TenantsUnavailableError("This gateway has no database of tenants.")
    return services.registrar
