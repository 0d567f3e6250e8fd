"""
Routes of tenants for the keys that they make themselves, with a key or token that has `manage_keys`.

A caller sees the keys that it made, and no others.  `tenancy.edits` bounds what they may do.
"""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from appliance.api.body import read_members
from appliance.api.files import StorageCaller
from appliance.api.services import Services
from appliance.api.tenants import (
    answer,
    apply_key,
    apply_revocation,
    new_key,
    new_successor,
    registrar_of,
    shown_key,
)
from appliance.errors import MissingScopeError
from appliance.tenancy import Caller, Tenant
from appliance.tenancy.edits import find_minted_key, mint_key, revoke_key, rotate_minted_key
from appliance.tenancy.roster import find_tenant

PATH = "/v1/appliance/keys"

router = APIRouter()


async def key_manager(caller: StorageCaller) -> Caller:
    """The caller in one of its tenant's slots; raises MissingScopeError if it may not make keys."""
    if not caller.key.manage_keys:
        raise MissingScopeError("This key or token lacks the permission `manage_keys`: ask the operator.")
    return caller


KeyManager = Annotated[Caller, Depends(key_manager)]


@router.get(PATH)
async def list_keys(request: Request, caller: KeyManager) -> Response:
    """The keys that this key or token made."""
    services: Services = request.app.state.services
    roster = await registrar_of(services).roster()
    tenant, now = find_tenant(roster.tenants, caller.tenant.name), services.clock()
    made = [key.key_id for key in tenant.keys if key.made_by == caller.key.key_id]
    return answer({"keys": [shown_key((tenant,), key_id, now) for key_id in made]})


@router.post(PATH)
async def make(request: Request, caller: KeyManager) -> Response:
    """Create a key of the caller's tenant, with no more than the caller's models, limits and expiry."""
    services: Services = request.app.state.services
    text, key = new_key(services, await read_members(request, "models", "limits", "expires_at"))
    now, name, maker = int(services.clock()), caller.tenant.name, caller.key
    made = await apply_key(
        services, caller, text, key.key_id, lambda tenants: mint_key(tenants, name, maker, key, now=now)
    )
    return answer(made, 201)


@router.post(PATH + "/{key_id}/rotate")
async def rotate(request: Request, key_id: str, caller: KeyManager) -> Response:
    """Create a key that replaces one that the caller made; only this answer has the new key."""
    services: Services = request.app.state.services
    text, key, overlap = new_successor(services, await read_members(request, "overlap_seconds", "expires_at"))
    now, name, maker = int(services.clock()), caller.tenant.name, caller.key
    made = await apply_key(
        services,
        caller,
        text,
        key.key_id,
        lambda tenants: rotate_minted_key(
            tenants, name, maker, key_id, key, now=now, overlap_seconds=overlap
        ),
    )
    return answer(made, 201)


@router.delete(PATH + "/{key_id}")
async def revoke(request: Request, key_id: str, caller: KeyManager) -> Response:
    """Revoke a key that the caller made."""
    services: Services = request.app.state.services
    name, maker = caller.tenant.name, caller.key

    def end(tenants: tuple[Tenant, ...], now: int) -> tuple[Tenant, ...]:
        find_minted_key(tenants, name, maker, key_id)
        return revoke_key(tenants, key_id, now=now)

    return answer(await apply_revocation(services, caller, key_id, end))
