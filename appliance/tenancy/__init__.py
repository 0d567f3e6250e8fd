"""
Tenants and their API keys: permissions, limits and authentication.

Fails open towards the database: while it cannot be read, the last state stays in force, and metrics and
readiness show it.  Fails closed towards callers: unknown credentials are refused.
"""

from appliance.tenancy.allowances import Limits
from appliance.tenancy.directory import Caller, TenantDirectory
from appliance.tenancy.file import encode_tenants, parse_tenants
from appliance.tenancy.keys import KEY_BYTES, KEY_FORMAT, AdminScope, ApiKey, digest_key, make_key
from appliance.tenancy.tenant import (
    ANY_MODEL,
    NAME_FORMAT,
    ContentPolicy,
    Permission,
    PriorityClass,
    SpeculationPolicy,
    Tenant,
)

__all__ = [
    "ANY_MODEL",
    "KEY_BYTES",
    "KEY_FORMAT",
    "NAME_FORMAT",
    "AdminScope",
    "ApiKey",
    "Caller",
    "ContentPolicy",
    "Limits",
    "Permission",
    "PriorityClass",
    "SpeculationPolicy",
    "Tenant",
    "TenantDirectory",
    "digest_key",
    "encode_tenants",
    "make_key",
    "parse_tenants",
]
