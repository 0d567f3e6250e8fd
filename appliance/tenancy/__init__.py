"""
Tenants and their API keys: who may call, what, how much, and with which key.

- `tenant`, `limits`, `keys`, `directory`: what is known of them, in memory; pure.
- `file`, `moments`: the same as YAML and JSON; pure.
- `roster`, `edits`: one state, and how it becomes the next; pure.
- `tables`, `store`: the database.  `watch`: follows it while a gateway runs.

Fails open towards the database: while it cannot be read, what was read last stays in force, and
metrics and readiness say so.  Fails closed towards callers: what is not known opens nothing.
"""

from appliance.tenancy.allowances import Limits
from appliance.tenancy.directory import Caller, TenantDirectory
from appliance.tenancy.file import encode_tenants, parse_tenants
from appliance.tenancy.keys import KEY_BYTES, KEY_FORMAT, ApiKey, digest_key, make_key
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
