"""
Changes to tenants and keys: each function returns all tenants after the change.

Pure: the store compares and writes.  An unknown tenant or key raises TenantNotFoundError.  A revocation is
final, and importing an older file does not undo a rotation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from appliance.errors import KeyExceedsMakerError, TenantConflictError
from appliance.tenancy.allowances import exceeded_limit
from appliance.tenancy.file import encode_policy, parse_policy
from appliance.tenancy.keys import KEY_ID_FORMAT, ApiKey
from appliance.tenancy.moments import format_moment
from appliance.tenancy.roster import find_key, find_tenant, has_admin
from appliance.tenancy.tenant import Tenant

Tenants = tuple[Tenant, ...]

LONGEST_BY_TOKEN_SECONDS = 90 * 86400
"""Maximum lifetime of a key that a token's subject makes: nothing tells when the subject leaves."""
MOST_MINTED = 100
"""Maximum keys that one key or subject has made, as far as they are stored."""


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

    The successor has the same permissions and limits, and takes over the keys that the old one made; unless
    it has an expiry, it gets the lifetime of the old key.
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
        limits=key.limits,
        manage_keys=key.manage_keys,
        made_by=key.made_by,
        replaces=key_id,
        expires_at=expires_at,
    )
    keys = tuple(
        retired
        if each is key
        else replace(each, made_by=successor.key_id)
        if each.made_by == key_id
        else each
        for each in tenant.keys
    )
    return _with(tenants, tenant.with_keys((*keys, taking_over)))


def revoke_key(tenants: Tenants, key_id: str, *, now: int) -> Tenants:
    """Final and idempotent."""
    tenant, key = find_key(tenants, key_id)
    revoked = replace(key, revoked_at=_earliest(key.revoked_at, now))
    return _with(tenants, tenant.with_keys(tuple(revoked if each is key else each for each in tenant.keys)))


def mint_key(tenants: Tenants, name: str, maker: ApiKey, key: ApiKey, *, now: int) -> Tenants:
    """
    Add a key that a caller of the tenant makes for it; `maker` is the caller's key or token.

    What is not set is as for the maker.  Raises KeyExceedsMakerError if the key would allow more than that
    allows, TenantConflictError if the maker may make no key now.
    """
    tenant = find_tenant(tenants, name)
    maker = _stored(tenant, maker, now)
    models = maker.models if key.models is None else key.models
    for model in models or ():
        if not (tenant.may_use(model) and maker.may_use(model)) and key.models is not None:
            raise KeyExceedsMakerError(f"You may not use the model `{model}`.", param="models")
    for most in (maker.limits, tenant.limits):
        if (limit := exceeded_limit(key.limits, most)) is not None:
            raise KeyExceedsMakerError(f"The limit `{limit}` is above yours.", param="limits")
    minted = replace(
        key,
        models=models,
        made_by=maker.key_id,
        manage_keys=False,
        expires_at=_expiry_within(maker, key.expires_at, now),
    )
    room = _with_room(tenant, maker.key_id, now)
    return _with(tenants, room.with_keys((*room.keys, minted)))


def rotate_minted_key(
    tenants: Tenants,
    name: str,
    maker: ApiKey,
    key_id: str,
    successor: ApiKey,
    *,
    now: int,
    overlap_seconds: int,
) -> Tenants:
    """As `rotate_key`, by the maker of the key; the successor ends with the maker too."""
    find_minted_key(tenants, name, maker, key_id)
    tenant = find_tenant(tenants, name)
    maker = _stored(tenant, maker, now)
    if successor.expires_at is not None:
        _expiry_within(maker, successor.expires_at, now)
    rotated = rotate_key(
        _with(tenants, _with_room(tenant, maker.key_id, now, kept=key_id)),
        key_id,
        successor,
        now=now,
        overlap_seconds=overlap_seconds,
    )
    changed, made = find_key(rotated, successor.key_id)
    bounded = replace(made, expires_at=_earliest(made.expires_at, _latest_expiry(maker, now)))
    return _with(
        rotated, changed.with_keys(tuple(bounded if each is made else each for each in changed.keys))
    )


def find_minted_key(tenants: Tenants, name: str, maker: ApiKey, key_id: str) -> ApiKey:
    """Raises TenantNotFoundError, as if there were none, unless this caller made it."""
    tenant = find_tenant(tenants, name)
    own = tenant.with_keys(tuple(key for key in tenant.keys if key.made_by == maker.key_id))
    return find_key((own,), key_id)[1]


def _stored(tenant: Tenant, maker: ApiKey, now: int) -> ApiKey:
    """The maker as it is now: what was read when the request came may be older.  A token has no row."""
    if not KEY_ID_FORMAT.fullmatch(maker.key_id):
        return maker
    stored = next((key for key in tenant.keys if key.key_id == maker.key_id), None)
    if stored is None or not stored.manage_keys or not stored.is_valid_at(now):
        raise TenantConflictError("Your key may no longer make keys.")
    if stored.rotated_at is not None:
        raise TenantConflictError("Your key has been rotated: use its successor.")
    return stored


def _latest_expiry(maker: ApiKey, now: int) -> int | None:
    return maker.expires_at if KEY_ID_FORMAT.fullmatch(maker.key_id) else now + LONGEST_BY_TOKEN_SECONDS


def _expiry_within(maker: ApiKey, expires_at: int | None, now: int) -> int | None:
    latest = _latest_expiry(maker, now)
    if expires_at is None and not KEY_ID_FORMAT.fullmatch(maker.key_id):
        message = (
            f"A key made with a token needs `expires_at`, within {LONGEST_BY_TOKEN_SECONDS // 86400} days."
        )
        raise KeyExceedsMakerError(message, param="expires_at")
    if latest is not None and expires_at is not None and expires_at > latest:
        raise KeyExceedsMakerError(
            f"It may expire at {format_moment(latest)} at the latest.", param="expires_at"
        )
    return latest if expires_at is None else expires_at


def _with_room(tenant: Tenant, maker_id: str, now: int, *, kept: str = "") -> Tenant:
    """Without the oldest key that ended, if the maker has made as many as are stored."""
    made = [key for key in tenant.keys if key.made_by == maker_id]
    if len(made) < MOST_MINTED:
        return tenant
    ended = next((key for key in made if not key.is_valid_at(now) and key.key_id != kept), None)
    if ended is None:
        raise TenantConflictError(f"You have {MOST_MINTED} keys in force: revoke one.")
    return tenant.with_keys(tuple(key for key in tenant.keys if key is not ended))


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
        made_by=stored.made_by,
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
