"""The audit entries of a change of tenants and keys: names and ids, never a key or a digest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from appliance.audit.entry_types import EntryType
from appliance.tenancy.file import POLICY, spell_limits
from appliance.tenancy.keys import ApiKey
from appliance.tenancy.tenant import Tenant

Value = str | bool | list[str]
_REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChange:
    """One entry: its type, and its fields without the actor."""

    type: EntryType
    fields: Mapping[str, Value]


def changes_between(
    before: tuple[Tenant, ...], after: tuple[Tenant, ...], *, reason: str | None = None
) -> tuple[TenantChange, ...]:
    """The entries of every difference; `reason` is that of revocations."""
    old = {tenant.name: tenant for tenant in before}
    new = {tenant.name: tenant for tenant in after}
    found: list[TenantChange] = []
    for name, tenant in new.items():
        was = old.get(name)
        if was is None:
            found.append(_change(EntryType.TENANT_CREATED, tenant=name, models=list(tenant.models)))
        elif changed := [member for member in POLICY if getattr(was, member) != getattr(tenant, member)]:
            found.append(_change(EntryType.TENANT_CHANGED, tenant=name, changes=changed))
        found += _of_keys(name, was.keys if was else (), tenant.keys, reason)
    for name, tenant in old.items():
        if name not in new:
            found += _of_keys(name, tenant.keys, (), reason)
            found.append(_change(EntryType.TENANT_DELETED, tenant=name))
    return tuple(found)


def _of_keys(
    tenant: str, before: tuple[ApiKey, ...], after: tuple[ApiKey, ...], reason: str | None
) -> Iterator[TenantChange]:
    old = {key.key_id: key for key in before}
    new = {key.key_id: key for key in after}
    rotated = {key.replaces for key_id, key in new.items() if key_id not in old and _is_successor(key, old)}
    for key_id, key in new.items():
        was = old.get(key_id)
        if was is None and key.replaces in rotated:
            yield _change(
                EntryType.KEY_ROTATED,
                tenant=tenant,
                key_id=key_id,
                previous_key_id=str(key.replaces),
                **_maker_of(key),
            )
        elif was is None:
            yield _change(
                EntryType.KEY_CREATED, tenant=tenant, key_id=key_id, admin=key.admin, **_permissions_of(key)
            )
        elif changed := _changed(was, key, ignored={"rotated_at", "expires_at"} if key_id in rotated else ()):
            yield _change(
                EntryType.TENANT_CHANGED, tenant=tenant, changes=changed, **_changed_permissions(was, key)
            )
        if key.revoked_at is not None and (was is None or was.revoked_at is None):
            yield _revoked(tenant, key, reason)
    for key_id, was in old.items():
        if key_id not in new and was.revoked_at is None:
            yield _revoked(tenant, was, reason or _REMOVED)
        elif key_id not in new:
            yield _change(EntryType.TENANT_CHANGED, tenant=tenant, changes=[f"keys.{key_id}"])


def _changed(was: ApiKey, key: ApiKey, *, ignored: set[str] | tuple[()]) -> list[str]:
    """Without a revocation, which has an entry of its own."""
    return [
        f"keys.{key.key_id}.{field.name}"
        for field in fields(ApiKey)
        if field.name not in {"revoked_at", *ignored} and getattr(was, field.name) != getattr(key, field.name)
    ]


def _is_successor(key: ApiKey, old: Mapping[str, ApiKey]) -> bool:
    """Whether it replaces a key and may do the same: an entry of a rotation names no permissions."""
    replaced = old.get(key.replaces or "")
    return replaced is not None and (key.admin, _permissions_of(key)) == (
        replaced.admin,
        _permissions_of(replaced),
    )


def _changed_permissions(was: ApiKey, key: ApiKey) -> dict[str, Value]:
    """What a comparison with the log needs to know."""
    found: dict[str, Value] = {}
    if was.limits != key.limits:
        found["limits"] = spell_limits(key.limits)
    if was.manage_keys != key.manage_keys:
        found["manage_keys"] = key.manage_keys
    return found


def _revoked(tenant: str, key: ApiKey, reason: str | None) -> TenantChange:
    why = {} if reason is None else {"reason": reason}
    return _change(EntryType.KEY_REVOKED, tenant=tenant, key_id=key.key_id, **why, **_maker_of(key))


def _permissions_of(key: ApiKey) -> dict[str, Value]:
    found: dict[str, Value] = {} if key.scopes is None else {"scopes": sorted(map(str, key.scopes))}
    if limits := spell_limits(key.limits):
        found["limits"] = limits
    if key.manage_keys:
        found["manage_keys"] = True
    return found | _maker_of(key)


def _maker_of(key: ApiKey) -> dict[str, Value]:
    return {} if key.made_by is None else {"made_by": key.made_by}


def _change(type_: EntryType, **values: Value) -> TenantChange:
    return TenantChange(type=type_, fields=values)
