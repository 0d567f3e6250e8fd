"""
Changes to tenants and keys: each function returns all tenants after the change.

Pure: the store compares and writes.  An unknown tenant or key raises TenantNotFoundError.  A revocation is
final, and importing an older file does not undo a rotation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from appliance.errors import TenantConflictError
from appliance.tenancy.file import encode_policy, parse_policy
from appliance.tenancy.keys import ApiKey
from appliance.tenancy.roster import find_key, find_tenant, has_admin
from appliance.tenancy.tenant import Tenant

Tenants = tuple[Tenant, ...]


def create_tenant(tenants: Tenants, name: str, members: Mapping[str, Any]) -> Tenants:
    """
    Add a tenant without keys; `members` are as in the tenants file.

    Raises ConfigurationError if a member cannot be understood, TenantConflictError if the name is taken.
    """
    created = parse_policy(name, members)
    if any(tenant.name == name for tenant in tenants):
        raise TenantConflictError(f"The tenant {name!r} exists already.")
    return (*tenants, created)


def change_tenant(tenants: Tenants, name: str, patch: Mapping[str, Any]) -> Tenants:
    """
    Change the members in `patch` and keep the rest (RFC 7396: null resets to the default).

    Raises ConfigurationError if a member cannot be understood.
    """
    tenant = find_tenant(tenants, name)
    changed = parse_policy(name, merge_patch(encode_policy(tenant), patch))
    return _with(tenants, changed.with_keys(tenant.keys))


def delete_tenant(tenants: Tenants, name: str) -> Tenants:
    gone = find_tenant(tenants, name)
    return tuple(tenant for tenant in tenants if tenant is not gone)


def add_key(tenants: Tenants, name: str, key: ApiKey) -> Tenants:
    tenant = find_tenant(tenants, name)
    return _with(tenants, tenant.with_keys((*tenant.keys, key)))


def rotate_key(
    tenants: Tenants, key_id: str, successor: ApiKey, *, now: int, overlap_seconds: int
) -> Tenants:
    """
    Replace a key by another; the old one stays valid for the overlap.

    The successor has the same permissions; unless it has an expiry, it gets the lifetime of the old key.
    Raises TenantConflictError if the key has a successor, or is no longer valid.
    """
    tenant, key = find_key(tenants, key_id)
    if key.rotated_at is not None:
        raise TenantConflictError(f"The key {key_id} has been rotated already: rotate its successor.")
    if not key.is_valid_at(now):
        raise TenantConflictError(f"The key {key_id} is no longer valid: create another.")
    expires_at = successor.expires_at
    if expires_at is None and key.expires_at is not None:
        expires_at = now + key.expires_at - (now if key.created_at is None else key.created_at)
    retired = replace(key, rotated_at=now, expires_at=_earliest(key.expires_at, now + overlap_seconds))
    taking_over = replace(
        successor,
        admin=key.admin,
        scopes=key.scopes,
        models=key.models,
        replaces=key_id,
        expires_at=expires_at,
    )
    keys = tuple(retired if each is key else each for each in tenant.keys)
    return _with(tenants, tenant.with_keys((*keys, taking_over)))


def revoke_key(tenants: Tenants, key_id: str, *, now: int) -> Tenants:
    """Final and idempotent."""
    tenant, key = find_key(tenants, key_id)
    revoked = replace(key, revoked_at=_earliest(key.revoked_at, now))
    return _with(tenants, tenant.with_keys(tuple(revoked if each is key else each for each in tenant.keys)))


def import_tenants(tenants: Tenants, wanted: Tenants, *, prune: bool, now: float) -> Tenants:
    """
    Apply a tenants file; with `prune`, remove tenants and keys that it does not contain.

    Raises TenantConflictError if a key of the file is known under another tenant, digest or purpose, or
    pruning would leave no key for the admin API.
    """
    known = {key.key_id: (tenant.name, key) for tenant in tenants for key in tenant.keys}
    merged = {} if prune else {tenant.name: tenant for tenant in tenants}
    for tenant in wanted:
        kept = merged[tenant.name].keys if tenant.name in merged and not prune else ()
        keys = {key.key_id: key for key in kept}
        for key in tenant.keys:
            owner, stored = known.get(key.key_id, (tenant.name, key))
            if (owner, stored.digest, stored.admin) != (tenant.name, key.digest, key.admin):
                raise TenantConflictError(
                    f"The key {key.key_id} of tenant {tenant.name} is known with another tenant, digest or "
                    "purpose: make a new key."
                )
            keys[key.key_id] = _import_key(stored, key)
        merged[tenant.name] = tenant.with_keys(tuple(keys.values()))
    if prune and not has_admin(merged.values(), now):
        raise TenantConflictError(
            "The file has no valid admin key, so the admin API would be unreachable: add one."
        )
    return tuple(merged.values())


def merge_patch(target: object, patch: object) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def _import_key(stored: ApiKey, wanted: ApiKey) -> ApiKey:
    expires_at = wanted.expires_at
    if stored.rotated_at is not None:
        expires_at = _earliest(stored.expires_at, expires_at)
    return replace(
        wanted,
        created_at=stored.created_at if wanted.created_at is None else wanted.created_at,
        replaces=stored.replaces if wanted.replaces is None else wanted.replaces,
        expires_at=expires_at,
        rotated_at=_earliest(stored.rotated_at, wanted.rotated_at),
        revoked_at=_earliest(stored.revoked_at, wanted.revoked_at),
    )


def _with(tenants: Tenants, changed: Tenant) -> Tenants:
    return tuple(changed if tenant.name == changed.name else tenant for tenant in tenants)


def _earliest(*moments: int | None) -> int | None:
    return min((moment for moment in moments if moment is not None), default=None)
