"""Ledgers of limits in memory, for tests of one process."""

from collections.abc import Callable, Mapping

from appliance.tenancy.limits.ledger import LeaseTerms, LedgerReply, TenantLedger, exchange
from appliance.tenancy.limits.store import ExchangeRequest


class MemoryLedgerStore:
    """A `LedgerStore` that ends with the process."""

    def __init__(self, *, gateway: str, terms: LeaseTerms, clock: Callable[[], float]) -> None:
        self._gateway, self._terms, self._clock = gateway, terms, clock
        self.ledgers: dict[str, TenantLedger] = {}

    def exchange(self, requests: Mapping[str, ExchangeRequest]) -> dict[str, LedgerReply]:
        now = self._clock()
        return {
            tenant: exchange(
                self.ledgers.setdefault(tenant, TenantLedger()), quotas, self._gateway, report,
                now=now, terms=self._terms,
            )
            for tenant, (quotas, report) in requests.items()
        }  # fmt: skip
