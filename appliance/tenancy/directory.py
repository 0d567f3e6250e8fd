"""
All tenants in memory: authenticates API keys without I/O.

The content is replaced as a whole: a request sees either all of a change or nothing of it.  Expiry is
checked with every request.
"""

import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from appliance.errors import InvalidApiKeyError
from appliance.tenancy.allowances import UNLIMITED, KeyLimits
from appliance.tenancy.keys import KEY_FORMAT, KEY_ID_FORMAT, ApiKey, digest_key
from appliance.tenancy.tenant import Tenant

REFUSAL = "Incorrect API key provided. Send your key as `Authorization: Bearer sk-...`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The tenant a request belongs to, and the key it came with."""

    tenant: Tenant
    key: ApiKey
    maker: ApiKey | None = None
    """The key that made the key, and bounds it as long as it exists."""
    key_limits: tuple[KeyLimits, ...] = ()
    """Beside the tenant's; the narrowest first."""

    def may_use(self, model: str) -> bool:
        made_for = self.maker is None or self.maker.may_use(model)
        return self.tenant.may_use(model) and self.key.may_use(model) and made_for

    def has_maker_at(self, now: float) -> bool:
        """Whether the key that made the key, if one did, is valid at this Unix time."""
        if self.maker is not None:
            return self.maker.is_valid_at(now)
        return self.key.made_by is None or not KEY_ID_FORMAT.fullmatch(self.key.made_by)

    def is_valid_at(self, now: float) -> bool:
        """Whether the key is valid at this Unix time, and the one that made it."""
        return self.key.is_valid_at(now) and self.has_maker_at(now)


class EndedMakerError(InvalidApiKeyError):
    """The key that made this key is no longer valid."""


def callers_of(tenant: Tenant) -> dict[str, Caller]:
    """By id of the key."""
    keys = {key.key_id: key for key in tenant.keys}
    callers = {}
    for key in tenant.keys:
        maker = keys.get(key.made_by or "")
        limited = {"this key": key} | ({} if maker is None else {"the key that made this one": maker})
        callers[key.key_id] = Caller(
            tenant=tenant,
            key=key,
            maker=maker,
            key_limits=tuple(
                KeyLimits(ledger=f"key:{_first_of(each, keys)}", limits=each.limits, holder=holder)
                for holder, each in limited.items()
                if each.limits != UNLIMITED
            ),
        )
    return callers


def _first_of(key: ApiKey, keys: Mapping[str, ApiKey]) -> str:
    """The id of the key that this one and those before it replace: they share what is used of its limits."""
    seen = {key.key_id}
    while (previous := keys.get(key.replaces or "")) is not None and previous.key_id not in seen:
        key = previous
        seen.add(key.key_id)
    return key.key_id


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
        self._by_key = {key_id: caller for tenant in served for key_id, caller in callers_of(tenant).items()}

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
        """
        The caller with this key; raises InvalidApiKeyError, with the same message for every cause.

        It is an EndedMakerError if only the key that made it is no longer valid.
        """
        match = KEY_FORMAT.match(presented or "")
        caller = self._by_key.get(match["key_id"]) if match else None
        # The comparison runs for unknown keys too, so that timing does not tell which ids exist.
        expected = caller.key.digest if caller else "0" * 64
        matches = hmac.compare_digest(digest_key(presented or ""), expected)
        if caller is None or not matches or not caller.key.is_valid_at(self._clock()):
            raise InvalidApiKeyError(REFUSAL)
        if not caller.has_maker_at(self._clock()):
            raise EndedMakerError(REFUSAL)
        return caller

    def caller(self, key_id: str) -> Caller | None:
        """The caller of this key, valid or not; None if there is none, or its tenant is disabled."""
        return self._by_key.get(key_id)
