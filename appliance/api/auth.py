"""
From a request to its caller: the identity package decides, this reads the request and keeps the record.

The dependencies are coroutines although they wait for nothing: the framework would run plain
functions in a thread, for every request.
"""

from starlette.requests import Request
from starlette.types import Scope

from appliance.api.services import Services
from appliance.errors import InvalidApiKeyError
from appliance.tenancy import Caller
from appliance.tenancy.identity.certificates import EXTENSION
from appliance.tenancy.identity.refusal import RefusedCallerError


async def tenant_caller(request: Request) -> Caller:
    """
    The tenant whose key, token or certificate came with the request.

    Raises:
        InvalidApiKeyError: none, an unknown one, or an admin's, which cannot call models.
    """
    caller = identify(request.app.state.services, request.scope)
    if caller.key.admin:
        message = "This is an admin key: use a tenant's key to call models."
        raise InvalidApiKeyError(message)
    # Every answer from here on says what is left of the tenant's limits.
    request.scope.setdefault("state", {})["caller"] = caller
    return caller


async def admin_caller(request: Request) -> Caller:
    """
    The admin whose key or token came with the request.

    Raises:
        InvalidApiKeyError: it does not open the admin API.
    """
    caller = identify(request.app.state.services, request.scope)
    if not caller.key.admin:
        message = "This needs an admin key."
        raise InvalidApiKeyError(message)
    return caller


def identify(services: Services, scope: Scope) -> Caller:
    """
    Whose this request is; a refusal is counted and logged with its reason, never with what was sent.

    Raises:
        RefusedCallerError: nobody we know; the client learns no more than that.
    """
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
