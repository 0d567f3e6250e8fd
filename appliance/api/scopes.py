"""
Which scope each route of the admin API needs.

Fails closed: a route that is not listed is refused, and a test compares the list with the routes.
"""

from collections.abc import Mapping

from appliance.errors import MissingScopeError
from appliance.tenancy import AdminScope, ApiKey

ADMIN = "/admin/v1"

_ROUTES: Mapping[AdminScope, tuple[str, ...]] = {
    AdminScope.READ: (
        "GET /status",
        "GET /audit/approvals",
        "GET /audit/holds",
        # Records what its caller reads elsewhere.
        "POST /audit/reads",
        "GET /drafts",
        "GET /egress",
        "GET /speculation",
        "GET /speculation/events",
        "GET /tenants",
        "GET /tenants/{name}",
        "GET /workers",
    ),
    AdminScope.TENANTS: (
        "POST /tenants",
        "PATCH /tenants/{name}",
        "DELETE /tenants/{name}",
        "POST /tenants/{name}/keys",
        "POST /keys/{key_id}/rotate",
        "POST /keys/{key_id}/revoke",
    ),
    AdminScope.WORKERS: (
        "POST /egress/check",
        "PUT /speculation/override",
        "POST /workers/reload",
        "POST /workers/{worker}/drain",
        "POST /workers/{worker}/recycle",
        "POST /workers/{worker}/undrain",
    ),
    AdminScope.RETENTION: (
        "POST /audit/approvals/{approval}",
        "DELETE /audit/approvals/{approval}",
        "POST /audit/erasures",
        "POST /audit/holds",
        "POST /audit/holds/releases",
        "POST /audit/prunes",
    ),
    AdminScope.DRAFTS: ("POST /drafts/promotions", "POST /drafts/rollbacks"),
}
SCOPES: Mapping[str, AdminScope] = {
    f"{method} {ADMIN}{path}": scope
    for scope, routes in _ROUTES.items()
    for method, path in (route.split() for route in routes)
}
"""By method and path of the route."""


def require_scopes(key: ApiKey, *scopes: AdminScope) -> None:
    """Raises MissingScopeError unless an admin's key or token has all of these scopes."""
    for scope in scopes:
        if not key.has_scope(scope):
            raise MissingScopeError(f"This key or token lacks the scope `{scope}`: use one that has it.")
