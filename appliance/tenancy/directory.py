"""
All tenants in memory: authenticates API keys without I/O.

The content is replaced as a whole: a request sees either all of a change or nothing of it.  Expiry is
checked with every request.
"""

import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from appliance.errors import InvalidApiKeyError
from appliance.tenancy.keys import KEY_FORMAT, ApiKey, digest_key
from appliance.tenancy.tenant import Tenant

REFUSAL = "Incorrect API key provided. Send your key as `Authorization: Bearer sk-...`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The tenant a request belongs to, and the key it came with."""

    tenant: Tenant
    key: ApiKey

    def may_use(self, model: str) -> bool:
        return self.tenant.may_use(model) and self.key.may_use(model)


class TenantDirectory:
    def __init__(
        self,
        tenants: Iterable[Tenant] = (),
        *,
        clock: Callable[[], float] = time.time,  # noqa: TID251 - it is the argument
    ) -> None:
        self._clock = clock
        self.replace(tenants)

    def replace(self, tenants: Iterable[Tenant]) -> None:
        self.tenants = tuple(tenants)
        served = [tenant for tenant in self.tenants if not tenant.disabled]
        self._by_name = {tenant.name: tenant for tenant in served}
        self._by_key = {
            key.key_id: Caller(tenant=tenant, key=key) for tenant in served for key in tenant.keys
        }

    def tenant(self, name: str) -> Tenant | None:
        """The tenant of this name; None if it does not exist or is disabled."""
        return self._by_name.get(name)

    @property
    def next_key_expiry(self) -> int:
        """Unix time of the next expiry of a valid key without a successor; 0 if there is none."""
        now = self._clock()
        keys = [caller.key for caller in self._by_key.values() if caller.key.is_valid_at(now)]
        return min((key.expires_at for key in keys if key.expires_at and not key.rotated_at), default=0)

    def authenticate(self, presented: str | None) -> Caller:
        """The caller with this key; raises InvalidApiKeyError, with the same message for every cause."""
        match = KEY_FORMAT.match(presented or "")
        caller = self._by_key.get(match["key_id"]) if match else None
        # The comparison runs for unknown keys too, so that timing does not tell which ids exist.
        expected = caller.key.digest if caller else "0" * 64
        matches = hmac.compare_digest(digest_key(presented or ""), expected)
        if caller is None or not matches or not caller.key.is_valid_at(self._clock()):
            raise InvalidApiKeyError(REFUSAL)
        return caller
