"""
The bounded fair queue.

    priority classes ─► tenants in turn ─► first come, first served

A lower priority class is served when no higher one waits, and also gets a share of the turns, so that it
never starves.  Within a class tenants take turns, however many requests each has queued: a tenant with a
thousand requests delays one with a single request by one turn.  A request of several sequences takes as many
turns, so that its tenant is passed over until the others had theirs; it owes them while others wait, also if
it has no request queued for a while.  Nor can one tenant fill the queue: when
it is full, the newest request of the tenant that holds most is displaced by a tenant with less.

A request waits in a *lane*, with those that the same workers can serve, so that a model whose workers are
full does not block another model.  Turns are counted over all lanes.

Pure: no clock and no event loop.  `admission` owns deadlines and wake-ups.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from appliance.tenancy import PriorityClass

_CLASSES = tuple(PriorityClass)  # highest first


class Lane(NamedTuple):
    """Requests that the same workers can serve."""

    model: str
    may_speculate: bool  # False leaves only workers that were started without a draft


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    requests: int
    size_bytes: int

    def part(self, requests: int, size_bytes: int) -> float:
        """Share of the bounds that so much takes; above 1 it is too much."""
        return max(requests / max(1, self.requests), size_bytes / max(1, self.size_bytes))


@dataclass(eq=False, slots=True, kw_only=True)
class Waiter:
    """One queued request; compared by identity."""

    lane: Lane
    tenant: str
    priority: PriorityClass
    size_bytes: int  # held while it waits
    sequences: int = 1  # turns that it takes
    number: int = 0  # among all requests ever queued; set by the queue


@dataclass(slots=True)
class _Tenant:
    turns: int  # left before the next tenant's turn; below 1 if it owes some, with or without requests
    requests: int = 0
    size_bytes: int = 0
    lanes: dict[Lane, dict[Waiter, None]] = field(default_factory=dict)  # first come, first served

    def newest_first(self) -> Iterator[Waiter]:
        lines = [reversed(line) for line in self.lanes.values()]
        return heapq.merge(*lines, key=lambda waiter: -waiter.number)


class _Class:
    """Its tenants are in the order of their turns."""

    def __init__(self, share: float, weights: Mapping[str, int]) -> None:
        self.share = share
        self.credit = 0.0  # turns not used yet; an empty class accumulates none
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
            if not tenant.lanes and tenant.turns >= 1:
                del self._tenants[waiter.tenant]
        self.requests -= 1
        self.size_bytes -= waiter.size_bytes
        self.lanes[waiter.lane] -= 1
        if not self.lanes[waiter.lane]:
            del self.lanes[waiter.lane]
        if not self.requests:
            self.credit = 0.0
            self._tenants.clear()
        return True

    def displaced(self, name: str, size_bytes: int, bounds: QueueBounds) -> list[Waiter] | None:
        """
        The requests to displace for one more of a tenant; None if that one must be refused instead.

        They are the newest of the tenant that holds most, which keeps at least as much as the other gets.
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
        """The next request of the tenant whose turn it is; only if `is_waiting`."""
        served = [
            (name, tenant)
            for name, tenant in self._tenants.items()
            if not tenant.lanes or any(lane in tenant.lanes for lane in lanes)
        ]
        able = [(name, tenant) for name, tenant in served if tenant.lanes]
        if all(tenant.turns < 1 for _, tenant in able):
            # Every one owes turns: skip the rounds in which none is served.
            rounds = min(-(-(1 - tenant.turns) // self._weight(name)) for name, tenant in able)
            for name, tenant in served:
                tenant.turns += rounds * self._weight(name)
        for name, tenant in served:
            if tenant.turns < 1:
                self._end_turn(name, tenant)
            elif tenant.lanes:
                break
            if not tenant.lanes and tenant.turns >= 1:
                del self._tenants[name]
        waiter = min(
            (next(iter(line)) for lane, line in tenant.lanes.items() if lane in lanes),
            key=lambda first: first.number,
        )
        tenant.turns -= waiter.sequences
        if tenant.turns < 1:
            self._end_turn(name, tenant)
        self.discard(waiter)
        return waiter

    def _end_turn(self, name: str, tenant: _Tenant) -> None:
        """To the end of the round."""
        tenant.turns += self._weight(name)
        self._tenants[name] = self._tenants.pop(name)

    def _weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)


class FairQueue:
    def __init__(
        self,
        bounds: QueueBounds,
        *,
        shares: Mapping[PriorityClass, float] | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """
        Make an empty queue; `bounds` are those of each class.

        `shares` are the share of all turns that a class gets while it waits, whatever waits above it (below 1
        in total, 0 without an entry); `weights` are a tenant's turns in a row (1 without an entry).
        """
        self._bounds = bounds
        self._classes = {
            priority: _Class((shares or {}).get(priority, 0.0), weights or {}) for priority in _CLASSES
        }
        self._length = 0
        self._pushed = 0

    def __len__(self) -> int:
        return self._length

    def has_room(self, tenant: str, priority: PriorityClass, size_bytes: int) -> bool:
        return self._classes[priority].displaced(tenant, size_bytes, self._bounds) is not None

    def push(self, waiter: Waiter) -> list[Waiter] | None:
        """Returns the displaced requests, all of one tenant that holds more; None without room."""
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
        """False if it is not queued."""
        found = self._classes[waiter.priority].discard(waiter)
        self._length -= found
        return found

    def take(self, lanes: Collection[Lane]) -> Waiter | None:
        """Remove and return the next request in one of these lanes."""
        waiting = [each for each in self._classes.values() if each.is_waiting(lanes)]
        if not waiting:
            return None
        # A class with a full credit goes first, the higher class before the lower.
        chosen = next((each for each in waiting if each.credit >= 1), waiting[0])
        for each in waiting:
            each.credit += each.share
        chosen.credit = max(0.0, chosen.credit - 1) if chosen.share else 0.0
        self._length -= 1
        return chosen.take(lanes)

    @property
    def lanes(self) -> set[Lane]:
        return {lane for each in self._classes.values() for lane in each.lanes}

    def requests(self, priority: PriorityClass) -> int:
        return self._classes[priority].requests

    def size_bytes(self, priority: PriorityClass) -> int:
        return self._classes[priority].size_bytes
