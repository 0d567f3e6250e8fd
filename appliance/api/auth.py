"""
Authenticates the caller of a request, and counts and logs refusals.

The dependencies are coroutines although they never wait: the framework would run plain functions in a thread,
for every request.
"""

from typing import Annotated

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Scope

from appliance.api.scopes import SCOPES, require_scopes
from appliance.api.services import Services
from appliance.errors import InvalidApiKeyError
from appliance.tenancy import Caller
from appliance.tenancy.identity.certificates import EXTENSION
from appliance.tenancy.identity.rejection import RefusedCallerError


async def tenant_caller(request: Request) -> Caller:
    """The caller with a tenant's credential; raises InvalidApiKeyError for any other, also an admin's."""
    caller = identify(request.app.state.services, request.scope)
    if caller.key.admin:
        raise InvalidApiKeyError("This is an admin key: use a tenant's key to call models.")
    # From here on the answer has the tenant's limit headers.
    request.scope.setdefault("state", {})["caller"] = caller
    return caller


async def admin_caller(request: Request) -> Caller:
    """
    The admin whose key or token came with the request.

    Raises InvalidApiKeyError, or MissingScopeError if the key lacks the route's scope.
    """
    caller = identify(request.app.state.services, request.scope)
    if not caller.key.admin:
        raise InvalidApiKeyError("This route needs an admin key.")
    require_scopes(caller.key, SCOPES[f"{request.method} {request.scope['route'].path}"])
    return caller


TenantCaller = Annotated[Caller, Depends(tenant_caller)]
AdminCaller = Annotated[Caller, Depends(admin_caller)]


def identify(services: Services, scope: Scope) -> Caller:
    """The caller; a RefusedCallerError is counted and logged with its reason, never with the credential."""
    extensions = scope.get("extensions")
    certificate = extensions.get(EXTENSION) if extensions else None
    try:
        return services.identity.identify(scope["headers"], certificate)
    except RefusedCallerError as error:
        services.metrics.callers_refused.labels(error.reason).inc()
        services.logger.info(
            "caller_refused", reason=str(error.reason), request_id=scope.get("state", {}).get("request_id")
        )
        raise
