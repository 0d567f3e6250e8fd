"""
Chooses requests: every kind of traffic, fair shares between tenants, within limits.

    first   one of each stratum (template and context bucket), so that rare traffic is present
    then    the tenant with the fewest samples, its stratum with the fewest, in a seeded order

A sample counts only once it is taken; for an unusable one the next candidate follows.  The same candidates,
seed and answers give the same choice.  Pure.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.drafts.harvest.candidate import HarvestCandidate

Stratum = tuple[str, str]
"""Template and context bucket."""
TenantStratum = tuple[str, Stratum]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionLimits:
    samples: int
    tokens: int | None = None
    """Of all samples together."""
    per_stratum: int | None = None
    """None for no limit, as for `tokens`."""


class SampleSelection:
    """Call `next`, then `take` for each one taken; those over a limit are counted in `without_room`."""

    def __init__(self, candidates: Iterable[HarvestCandidate], bounds: SelectionLimits, *, seed: str) -> None:
        self.bounds = bounds
        self.samples = 0
        self.tokens = 0
        self.without_room = 0
        self._of_tenant: Counter[str] = Counter()
        self._of_stratum: Counter[Stratum] = Counter()
        self._seed = seed
        self._waiting: dict[TenantStratum, list[HarvestCandidate]] = {}
        for candidate in candidates:
            self._waiting.setdefault((candidate.tenant, candidate.stratum), []).append(candidate)
        for waiting in self._waiting.values():
            # `next` pops from the end.
            waiting.sort(key=lambda candidate: self._random(candidate.request_id), reverse=True)
        # Each tenant's strata, fewest samples first.  A count may be outdated, because other tenants add to
        # the same stratum; it is corrected when it reaches the top.
        self._strata: dict[str, list[tuple[int, bytes, Stratum]]] = {}
        self._new: dict[str, list[Stratum]] = {}
        """Strata without a sample yet, the next one last."""
        for tenant, stratum in sorted(self._waiting):
            entry = (0, self._random(tenant, *stratum), stratum)
            heapq.heappush(self._strata.setdefault(tenant, []), entry)
        for tenant, strata in self._strata.items():
            self._new[tenant] = [stratum for _, _, stratum in sorted(strata, reverse=True)]

    @property
    def left(self) -> int:
        return sum(map(len, self._waiting.values()))

    def next(self) -> HarvestCandidate | None:
        while self.samples < self.bounds.samples:
            place = self._next_new() or self._next_fair()
            if place is None:
                return None
            candidate = self._waiting[place].pop()
            if self.bounds.tokens is None or self.tokens + candidate.tokens <= self.bounds.tokens:
                return candidate
            self.without_room += 1
        return None

    def take(self, candidate: HarvestCandidate, tokens: int | None = None) -> bool:
        """Count a candidate as taken; False if its real number of tokens exceeds the limit."""
        tokens = candidate.tokens if tokens is None else tokens
        if self.bounds.tokens is not None and self.tokens + tokens > self.bounds.tokens:
            self.without_room += 1
            return False
        self.samples += 1
        self.tokens += tokens
        self._of_tenant[candidate.tenant] += 1
        self._of_stratum[candidate.stratum] += 1
        return True

    def _next_new(self) -> TenantStratum | None:
        for tenant, strata in list(self._new.items()):
            while strata and (self._of_stratum[strata[-1]] or not self._waiting[tenant, strata[-1]]):
                strata.pop()
            if not strata:
                del self._new[tenant]
        first = self._fewest(self._new)
        return None if first is None else (first, self._new[first][-1])

    def _next_fair(self) -> TenantStratum | None:
        while (tenant := self._fewest(self._strata)) is not None:
            strata = self._strata[tenant]
            while strata:
                counted, random, stratum = strata[0]
                count = self._of_stratum[stratum]
                full = self.bounds.per_stratum is not None and count >= self.bounds.per_stratum
                if full or not self._waiting[tenant, stratum]:
                    heapq.heappop(strata)
                elif count != counted:
                    heapq.heapreplace(strata, (count, random, stratum))
                else:
                    return tenant, stratum
            del self._strata[tenant]
        return None

    def _fewest(self, tenants: Iterable[str]) -> str | None:
        return min(tenants, key=lambda tenant: (self._of_tenant[tenant], tenant), default=None)

    def _random(self, *what: str) -> bytes:
        text = "\0".join((self._seed, *what))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
