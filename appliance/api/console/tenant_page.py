"""A tenant's page: its keys, which are created, rotated and revoked as through the admin API."""

from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from appliance.api import tenants as api
from appliance.api.console import views
from appliance.api.console.console import Console
from appliance.api.console.operators import Operator, page
from appliance.api.console.sessions import Notice
from appliance.api.services import Services
from appliance.tenancy import Caller
from appliance.tenancy.allowances import BOUNDS, LARGEST
from appliance.tenancy.directory import callers_of
from appliance.tenancy.file import spell_limits
from appliance.tenancy.roster import find_tenant

LONG = 7
"""Digits of a number of hours that nobody means."""
SHOWN_ONCE = "Copy it now: only its digest is stored, so it cannot be shown again."


def path_of(request: Request) -> str:
    return f"/tenants/{quote(request.path_params['name'], safe='')}/keys"


async def show(request: Request, services: Services, console: Console, operator: Operator) -> Response:
    return page(console, "tenant", operator=operator, **_view(request, services))


async def create_key(
    request: Request, services: Services, operator: Operator, form: dict[str, str]
) -> Notice:
    models = [name for each in form.get("models", "").split(",") if (name := each.strip())]
    limits = {name: _number(form.get(name, "")) for name in BOUNDS if form.get(name, "").strip()}
    members = {
        "models": models or None,
        "limits": limits or None,
        "manage_keys": form.get("manage_keys") == "on",
        "expires_at": form.get("expires_at") or None,
    }
    made = await api.create_key(services, operator.caller, request.path_params["name"], members)
    return Notice(text=f"Created the key {made['key_id']}. {SHOWN_ONCE}", key=made["key"])


async def rotate_key(
    request: Request, services: Services, operator: Operator, form: dict[str, str]
) -> Notice:
    key_id, hours = request.path_params["key_id"], form.get("overlap_hours", "")
    overlap = int(hours) * 3600 if len(hours) < LONG and hours.isascii() and hours.isdecimal() else hours
    made = await api.replace_key(services, operator.caller, key_id, {"overlap_seconds": overlap})
    return Notice(text=f"{made['key_id']} replaces the key {key_id}. {SHOWN_ONCE}", key=made["key"])


async def revoke_key(
    request: Request, services: Services, operator: Operator, form: dict[str, str]
) -> Notice:
    key_id = request.path_params["key_id"]
    await api.end_key(services, operator.caller, key_id, {"reason": form.get("reason") or None})
    return Notice(text=f"Revoked the key {key_id}.")


def _number(text: str) -> int | str:
    """What is no number stays as it is, for the error."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST)) else text


def _view(request: Request, services: Services) -> dict[str, Any]:
    now = services.clock()
    tenant = find_tenant(services.tenants.tenants, request.path_params["name"])
    return {
        "tenant": views.tenant(services, tenant, now),
        "keys": [_key(caller, now) for caller in reversed(callers_of(tenant).values())],
        "key_bounds": [(name, name.replace("_", " ").capitalize()) for name in BOUNDS],
        "models": sorted(model for model in services.pool.models() if tenant.may_use(model)),
        "can_change": services.registrar is not None,
    }


def _key(caller: Caller, now: float) -> dict[str, Any]:
    tenant, key = caller.tenant, caller.key
    is_valid = key.is_valid_at(now)
    if key.revoked_at is not None:
        state = "revoked"
    elif not is_valid:
        state = "expired"
    elif not caller.has_maker_at(now):
        state = "maker ended"
    elif tenant.disabled:
        state = "tenant disabled"
    else:
        state = "rotated" if key.rotated_at is not None else "valid"
    scopes = "all scopes" if key.scopes is None else ", ".join(sorted(key.scopes)) or "no scope"
    models = "all of the tenant's" if key.models is None else ", ".join(key.models) or "none"
    return {
        "id": key.key_id,
        "admits_to": f"admin API: {scopes}" if key.admin else models,
        "created": key.created_at or 0,
        "expires": key.expires_at or 0,
        "replaces": key.replaces,
        "made_by": key.made_by,
        "limits": ", ".join(spell_limits(key.limits)),
        "manages": key.manage_keys,
        "state": state,
        "can_rotate": is_valid and key.rotated_at is None,
        "can_revoke": is_valid,
    }
