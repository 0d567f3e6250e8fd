"""
From the Authorization header to the caller.

The dependencies are coroutines although they wait for nothing: the framework would run plain
functions in a thread, for every request.
"""

from starlette.requests import Request

from appliance.api.services import Services
from appliance.errors import InvalidApiKeyError
from appliance.tenancy import Caller


async def tenant_caller(request: Request) -> Caller:
    """
    The tenant whose key came with the request.

    Raises:
        InvalidApiKeyError: no key, an unknown one, or an admin key, which cannot call models.
    """
    caller = _authenticate(request)
    if caller.key.admin:
        message = "This is an admin key: use a tenant's key to call models."
        raise InvalidApiKeyError(message)
    return caller


async def admin_caller(request: Request) -> Caller:
    """
    The admin whose key came with the request.

    Raises:
        InvalidApiKeyError: the key does not open the admin API.
    """
    caller = _authenticate(request)
    if not caller.key.admin:
        message = "This needs an admin key."
        raise InvalidApiKeyError(message)
    return caller


def _authenticate(request: Request) -> Caller:
    services: Services = request.app.state.services
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return services.tenants.authenticate(key.strip() if scheme.lower() == "bearer" else None)
