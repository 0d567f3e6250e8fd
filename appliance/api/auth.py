"""
Authenticates the caller of a request, and counts refusals.

The dependencies are coroutines although they seldom wait: the framework would run plain functions in a
thread, for every request.
"""

import ipaddress
from functools import lru_cache
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Scope

from appliance.api.refusals import Surface
from appliance.api.scopes import SCOPES, require_scopes
from appliance.api.services import Services
from appliance.errors import InvalidApiKeyError
from appliance.tenancy import Caller
from appliance.tenancy.identity.certificates import EXTENSION
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError


async def tenant_caller(request: Request) -> Caller:
    """The caller with a tenant's credential; raises InvalidApiKeyError for any other, also an admin's."""
    services = request.app.state.services
    caller = await identify(services, request.scope, Surface.API)
    if caller.key.admin:
        count_refusal(services, request.scope, Surface.API, RefusalReason.ROLE)
        raise InvalidApiKeyError("This is an admin key: use a tenant's key to call models.")
    # From here on the answer has the tenant's limit headers.
    request.scope.setdefault("state", {})["caller"] = caller
    return caller


async def admin_caller(request: Request) -> Caller:
    """
    The admin whose key or token came with the request.

    Raises InvalidApiKeyError, or MissingScopeError if the key lacks the route's scope.
    """
    services = request.app.state.services
    caller = await identify(services, request.scope, Surface.ADMIN)
    if not caller.key.admin:
        count_refusal(services, request.scope, Surface.ADMIN, RefusalReason.ROLE)
        raise InvalidApiKeyError("This route needs an admin key.")
    require_scopes(caller.key, SCOPES[f"{request.method} {request.scope['route'].path}"])
    return caller


TenantCaller = Annotated[Caller, Depends(tenant_caller)]
AdminCaller = Annotated[Caller, Depends(admin_caller)]


async def identify(services: Services, scope: Scope, surface: Surface) -> Caller:
    """The caller; a RefusedCallerError is counted with its reason, never with the credential."""
    extensions = scope.get("extensions")
    certificate = extensions.get(EXTENSION) if extensions else None
    try:
        return await services.identity.find(scope["headers"], certificate)
    except RefusedCallerError as error:
        count_refusal(services, scope, surface, error.reason)
        raise


def count_refusal(services: Services, scope: Scope, surface: Surface, reason: RefusalReason) -> None:
    request_id = scope.get("state", {}).get("request_id", "")
    services.refused.count(surface, reason, client_class(scope), request_id)


def client_class(scope: Scope) -> str:
    """The class of the client's address, as the audit log records it."""
    client = scope.get("client")
    return address_class(client[0] if client else "")


@lru_cache(maxsize=1024)
def address_class(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    return "private" if address.is_private else "public"
