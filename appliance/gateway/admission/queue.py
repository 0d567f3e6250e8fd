"""
The bounded fair queue: who waits, and who is next.

    priority classes ─► tenants in turn ─► first come, first served

A class of lower priority is served when no higher one waits, and besides gets a share of the turns, so
that it never starves.  Within a class tenants take turns, whatever each of them has waiting: a tenant
with a thousand requests delays one with a single request by one turn.  Nor can it take all the places to
wait: where there is none left, the newest request of whoever holds most makes way for a tenant with less.

A request waits in a *lane*, with those that the same workers can serve, so that a model whose workers
are full holds up no other.  Turns are counted over all lanes.

Pure: no clock and no event loop.  Deadlines and wake-ups are `admission`'s business.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.tenancy import PriorityClass

_CLASSES = tuple(PriorityClass)
"""Highest first."""


class Lane(NamedTuple):
    """Requests that the same workers can serve."""

    model: str
    may_speculate: bool
    """False leaves only workers that were started without a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Most of one priority class that may wait."""

    requests: int
    size_bytes: int

    def part(self, requests: int, size_bytes: int) -> float:
        """What part of the bounds so much takes; above 1 it is too much."""
        return max(requests / max(1, self.requests), size_bytes / max(1, self.size_bytes))


@dataclass(eq=False, slots=True, kw_only=True)
class Waiter:
    """One request that waits; itself and no other, whatever it holds."""

    lane: Lane
    tenant: str
    priority: PriorityClass
    size_bytes: int
    """What it keeps in memory while it waits."""
    number: int = 0
    """Its place among all that ever waited; the queue's to set."""


@dataclass(slots=True)
class _Tenant:
    """What one tenant has waiting in one class."""

    turns: int
    """How many more may be taken before it is the next tenant's turn."""
    requests: int = 0
    size_bytes: int = 0
    lanes: dict[Lane, dict[Waiter, None]] = field(default_factory=dict)
    """First come, first served; a dict for its order and for taking one out of the middle."""

    def newest_first(self) -> Iterator[Waiter]:
        lines = [reversed(line) for line in self.lanes.values()]
        return heapq.merge(*lines, key=lambda waiter: -waiter.number)


class _Class:
    """One priority class: its tenants, in the order of their turns."""

    def __init__(self, share: float, weights: Mapping[str, int]) -> None:
        self.share = share
        self.credit = 0.0
        """Turns it is owed; it never saves up any while it has nothing to send."""
        self.requests = 0
        self.size_bytes = 0
        self.lanes: Counter[Lane] = Counter()
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}

    def push(self, waiter: Waiter) -> None:
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None:
            tenant = self._tenants[waiter.tenant] = _Tenant(self._weight(waiter.tenant))
        tenant.lanes.setdefault(waiter.lane, {})[waiter] = None
        tenant.requests += 1
        tenant.size_bytes += waiter.size_bytes
        self.requests += 1
        self.size_bytes += waiter.size_bytes
        self.lanes[waiter.lane] += 1

    def discard(self, waiter: Waiter) -> bool:
        tenant = self._tenants.get(waiter.tenant)
        line = tenant.lanes.get(waiter.lane) if tenant is not None else None
        if tenant is None or line is None or waiter not in line:
            return False
        del line[waiter]
        tenant.requests -= 1
        tenant.size_bytes -= waiter.size_bytes
        if not line:
            del tenant.lanes[waiter.lane]
            if not tenant.lanes:
                del self._tenants[waiter.tenant]
        self.requests -= 1
        self.size_bytes -= waiter.size_bytes
        self.lanes[waiter.lane] -= 1
        if not self.lanes[waiter.lane]:
            del self.lanes[waiter.lane]
        if not self.requests:
            self.credit = 0.0
        return True

    def displaced(self, name: str, size_bytes: int, bounds: Bounds) -> list[Waiter] | None:
        """
        Who has to make way for one more of a tenant; None where it has to stay out itself.

        The newest of whoever holds most, as long as that one is left with no less than the other gets.
        """
        requests, total = self.requests + 1, self.size_bytes + size_bytes
        if requests <= bounds.requests and total <= bounds.size_bytes:
            return []
        if not self._tenants:
            return None
        own = self._tenants.get(name, _Tenant(0))
        mine = bounds.part(own.requests + 1, own.size_bytes + size_bytes)
        most = max(self._tenants.values(), key=lambda each: bounds.part(each.requests, each.size_bytes))
        if most is own:
            return None
        left_requests, left_bytes, gone = most.requests, most.size_bytes, []
        for waiter in most.newest_first():
            left_requests, left_bytes = left_requests - 1, left_bytes - waiter.size_bytes
            if bounds.part(left_requests, left_bytes) < mine:
                return None
            gone.append(waiter)
            requests, total = requests - 1, total - waiter.size_bytes
            if requests <= bounds.requests and total <= bounds.size_bytes:
                return gone
        return None

    def is_waiting(self, lanes: Collection[Lane]) -> bool:
        return any(lane in self.lanes for lane in lanes)

    def take(self, lanes: Collection[Lane]) -> Waiter:
        """The next one of the tenant whose turn it is; only where `is_waiting`."""
        name, tenant = next(
            (name, tenant)
            for name, tenant in self._tenants.items()
            if any(lane in tenant.lanes for lane in lanes)
        )
        waiter = min(
            (next(iter(line)) for lane, line in tenant.lanes.items() if lane in lanes),
            key=lambda first: first.number,
        )
        tenant.turns -= 1
        if not tenant.turns:
            # To the end of the round; whoever was behind is now before it.
            tenant.turns = self._weight(name)
            self._tenants[name] = self._tenants.pop(name)
        self.discard(waiter)
        return waiter

    def _weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)


class FairQueue:
    """Requests that wait, bounded for each priority class by their number and by their bytes."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        shares: Mapping[PriorityClass, float] | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """
        Make an empty queue.

        Args:
            bounds: what each class may hold.
            shares: of all turns, the part a class gets while it waits, whatever waits above it; below 1
                in total.  None for a class that is not named.
            weights: turns in a row by tenant; 1 for one that is not named.
        """
        self._bounds = bounds
        self._classes = {
            priority: _Class((shares or {}).get(priority, 0.0), weights or {}) for priority in _CLASSES
        }
        self._length = 0
        self._pushed = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._length

    def has_place(self, tenant: str, priority: PriorityClass, size_bytes: int) -> bool:
        """Whether one more of a tenant and a class may wait."""
        return self._classes[priority].displaced(tenant, size_bytes, self._bounds) is not None

    def push(self, waiter: Waiter) -> list[Waiter] | None:
        """
        Have a request wait.

        Returns:
            Those that had to make way for it and wait no longer, of one tenant that holds more; None,
            and nothing done, where it has no place.
        """
        waiting = self._classes[waiter.priority]
        displaced = waiting.displaced(waiter.tenant, waiter.size_bytes, self._bounds)
        if displaced is None:
            return None
        for each in displaced:
            self.discard(each)
        self._pushed += 1
        waiter.number = self._pushed
        waiting.push(waiter)
        self._length += 1
        return displaced

    def discard(self, waiter: Waiter) -> bool:
        """Take out one that waits no longer; False where it had gone already."""
        found = self._classes[waiter.priority].discard(waiter)
        self._length -= found
        return found

    def take(self, lanes: Collection[Lane]) -> Waiter | None:
        """
        Take out the next one that waits in one of these lanes; None where none does.

        Args:
            lanes: those with a worker that has room.
        """
        waiting = [each for each in self._classes.values() if each.is_waiting(lanes)]
        if not waiting:
            return None
        # Whoever is owed a turn goes first, the higher class before the lower.
        chosen = next((each for each in waiting if each.credit >= 1), waiting[0])
        for each in waiting:
            each.credit += each.share
        chosen.credit = max(0.0, chosen.credit - 1) if chosen.share else 0.0
        self._length -= 1
        return chosen.take(lanes)

    @property
    def lanes(self) -> set[Lane]:
        """The lanes in which something waits."""
        return {lane for each in self._classes.values() for lane in each.lanes}

    def requests(self, priority: PriorityClass) -> int:
        """How many of a class wait."""
        return self._classes[priority].requests

    def size_bytes(self, priority: PriorityClass) -> int:
        """What they hold in memory."""
        return self._classes[priority].size_bytes
