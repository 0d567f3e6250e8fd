"""A snapshot of all tenants with their keys."""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.errors import TenantNotFoundError
from appliance.tenancy.keys import ApiKey
from appliance.tenancy.tenant import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Tenants by name, their keys by age, and the number of changes that led here."""

    generation: int = 0
    """0 before the first change."""
    tenants: tuple[Tenant, ...] = ()


def sorted_tenants(tenants: Iterable[Tenant]) -> tuple[Tenant, ...]:
    """Tenants by name, the keys of each by age and then by id."""
    return tuple(
        tenant.with_keys(tuple(sorted(tenant.keys, key=lambda key: (key.created_at or 0, key.key_id))))
        for tenant in sorted(tenants, key=lambda tenant: tenant.name)
    )


def find_tenant(tenants: Iterable[Tenant], name: str) -> Tenant:
    """The tenant of this name, even if disabled; raises TenantNotFoundError."""
    for tenant in tenants:
        if tenant.name == name:
            return tenant
    raise TenantNotFoundError(f"There is no tenant {name!r}.")


def find_key(tenants: Iterable[Tenant], key_id: str) -> tuple[Tenant, ApiKey]:
    """The key of this id and the tenant it belongs to; raises TenantNotFoundError."""
    for tenant in tenants:
        for key in tenant.keys:
            if key.key_id == key_id:
                return tenant, key
    # The input is not repeated: it may be a whole key, by mistake.
    raise TenantNotFoundError("There is no key with this id. An id is the eight characters after `sk-`.")


def has_admin(tenants: Iterable[Tenant], now: float) -> bool:
    """Whether there is a valid admin key at this Unix time."""
    return any(
        key.admin and key.is_valid_at(now) for tenant in tenants if not tenant.disabled for key in tenant.keys
    )
