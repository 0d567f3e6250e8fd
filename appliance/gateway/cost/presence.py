"""
Requests in a worker over time: a running sum of request-seconds per tenant and model.

A request costs two additions when it starts and two when it ends; nothing else is kept of it.  Owned by one
event loop.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ActiveRequests:
    """Of one tenant for one model in one worker."""

    presence: "Presence"
    count: int = 0
    seconds: float = 0.0  # since the last `take`, up to `since`
    since: float = 0.0

    def advance(self, now: float) -> None:
        self.seconds += self.count * (now - self.since)
        self.since = now


@dataclass(slots=True)
class Presence:
    groups: dict[tuple[str, str], ActiveRequests] = field(default_factory=dict)
    count: int = 0
    peak: int = 0  # concurrent requests since `reset_peak`
    any_seconds: float = 0.0  # with any request since the last `take`, up to `since`
    since: float = 0.0

    def begin(self, tenant: str, model: str, now: float) -> ActiveRequests:
        """Count a request until `end` is called with the result."""
        group = self.groups.get((tenant, model))
        if group is None:
            group = self.groups[tenant, model] = ActiveRequests(self, since=now)
        group.advance(now)
        group.count += 1
        self._advance(now)
        self.count += 1
        self.peak = max(self.peak, self.count)
        return group

    def end(self, group: ActiveRequests, now: float) -> None:
        group.advance(now)
        group.count -= 1
        self._advance(now)
        self.count -= 1

    def reset_peak(self) -> None:
        self.peak = self.count

    def take(self, now: float) -> tuple[dict[tuple[str, str], float], float]:
        """Since the last call: positive request-seconds by tenant and model, and time with any request."""
        self._advance(now)
        taken: dict[tuple[str, str], float] = {}
        for key, group in list(self.groups.items()):
            group.advance(now)
            if group.seconds > 0:
                taken[key] = group.seconds
                group.seconds = 0.0
            elif not group.count:
                del self.groups[key]
        any_seconds, self.any_seconds = self.any_seconds, 0.0
        return taken, any_seconds

    def _advance(self, now: float) -> None:
        if self.count:
            self.any_seconds += now - self.since
        self.since = now
