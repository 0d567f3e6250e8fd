"""
Which requests are taken of many: every kind of traffic, no tenant more than its share, within bounds.

    first   one of each stratum (template and context bucket), so that what is rare is there at all
    then    the tenant with the fewest, of its strata the one with the fewest, in a seeded order

A sample counts only once it is taken: for one that turned out useless the next in line is asked for.
The same candidates, seed and answers give the same choice.  Pure.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.drafts.harvest.candidate import Candidate

Stratum = tuple[str, str]
"""Template and context bucket."""
Place = tuple[str, Stratum]
"""A tenant, and one of its strata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much is wanted."""

    samples: int
    tokens: int | None = None
    """Of all samples together; None for no bound."""
    per_stratum: int | None = None
    """Samples of one stratum; None for no bound."""


class Selection:
    """
    Asks for one candidate after the other: `next`, then `take` for each that is taken.

    What does not fit into the bounds is left out for good and counted in `without_room`, when it is
    met; `left` candidates were never asked for.
    """

    def __init__(self, candidates: Iterable[Candidate], bounds: Bounds, *, seed: str) -> None:
        self.bounds = bounds
        self.samples = 0
        self.tokens = 0
        self.without_room = 0
        self._of_tenant: Counter[str] = Counter()
        self._of_stratum: Counter[Stratum] = Counter()
        self._seed = seed
        self._waiting: dict[Place, list[Candidate]] = {}
        for candidate in candidates:
            self._waiting.setdefault((candidate.tenant, candidate.stratum), []).append(candidate)
        for waiting in self._waiting.values():
            # Taken from the end.
            waiting.sort(key=lambda candidate: self._chance(candidate.request_id), reverse=True)
        # Of each tenant the strata to come, those with the fewest samples first.  A count in here may
        # be too low, for others add to the same stratum, and is put right when it comes up.
        self._strata: dict[str, list[tuple[int, bytes, Stratum]]] = {}
        self._new: dict[str, list[Stratum]] = {}
        """Strata nobody was taken of yet, the next one last."""
        for tenant, stratum in sorted(self._waiting):
            entry = (0, self._chance(tenant, *stratum), stratum)
            heapq.heappush(self._strata.setdefault(tenant, []), entry)
        for tenant, strata in self._strata.items():
            self._new[tenant] = [stratum for _, _, stratum in sorted(strata, reverse=True)]

    @property
    def left(self) -> int:
        """Candidates that were not asked for so far."""
        return sum(map(len, self._waiting.values()))

    def next(self) -> Candidate | None:
        """The candidate to try now, or None: there is no more of them, or no more room."""
        while self.samples < self.bounds.samples:
            place = self._next_new() or self._next_fair()
            if place is None:
                return None
            candidate = self._waiting[place].pop()
            if self.bounds.tokens is None or self.tokens + candidate.tokens <= self.bounds.tokens:
                return candidate
            self.without_room += 1
        return None

    def take(self, candidate: Candidate, tokens: int | None = None) -> bool:
        """
        Count a candidate as taken, unless it does not fit after all.

        Args:
            candidate: what `next` gave.
            tokens: what it really has; by default what the worker counted.
        """
        tokens = candidate.tokens if tokens is None else tokens
        if self.bounds.tokens is not None and self.tokens + tokens > self.bounds.tokens:
            self.without_room += 1
            return False
        self.samples += 1
        self.tokens += tokens
        self._of_tenant[candidate.tenant] += 1
        self._of_stratum[candidate.stratum] += 1
        return True

    def _next_new(self) -> Place | None:
        """Of the tenants with strata nobody was taken of, that with the fewest samples, and one of them."""
        for tenant, strata in list(self._new.items()):
            while strata and (self._of_stratum[strata[-1]] or not self._waiting[tenant, strata[-1]]):
                strata.pop()
            if not strata:
                del self._new[tenant]
        first = self._fewest(self._new)
        return None if first is None else (first, self._new[first][-1])

    def _next_fair(self) -> Place | None:
        """The tenant with the fewest samples, and of its strata the one with the fewest."""
        while (tenant := self._fewest(self._strata)) is not None:
            strata = self._strata[tenant]
            while strata:
                counted, chance, stratum = strata[0]
                count = self._of_stratum[stratum]
                full = self.bounds.per_stratum is not None and count >= self.bounds.per_stratum
                if full or not self._waiting[tenant, stratum]:
                    heapq.heappop(strata)
                elif count != counted:
                    heapq.heapreplace(strata, (count, chance, stratum))
                else:
                    return tenant, stratum
            del self._strata[tenant]
        return None

    def _fewest(self, tenants: Iterable[str]) -> str | None:
        return min(tenants, key=lambda tenant: (self._of_tenant[tenant], tenant), default=None)

    def _chance(self, *what: str) -> bytes:
        """A number that the seed decides, the same on every machine."""
        text = "\0".join((self._seed, *what))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
