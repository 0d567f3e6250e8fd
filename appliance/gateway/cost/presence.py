"""
Who has requests with a worker, and for how long: a running sum for each tenant and model.

A request costs two additions when it goes to the worker and two when it comes back; nothing is kept of
it.  Owned by one event loop.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Line:
    """The requests of one tenant for one model that are with one worker."""

    presence: "Presence"
    count: int = 0
    seconds: float = 0.0
    """Request-seconds since the last `take`, up to `since`."""
    since: float = 0.0

    def turn(self, now: float) -> None:
        """Bring the sum up to now."""
        self.seconds += self.count * (now - self.since)
        self.since = now


@dataclass(slots=True)
class Presence:
    """All requests of this gateway that are with one worker."""

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    count: int = 0
    peak: int = 0
    """Most requests at once since `watch`."""
    any_seconds: float = 0.0
    """Time with any request since the last `take`, up to `since`."""
    since: float = 0.0

    def begin(self, tenant: str, model: str, now: float) -> Line:
        """Count a request as under way, until `end` is called with what this returns."""
        line = self.lines.get((tenant, model))
        if line is None:
            line = self.lines[tenant, model] = Line(self, since=now)
        line.turn(now)
        line.count += 1
        self._turn(now)
        self.count += 1
        self.peak = max(self.peak, self.count)
        return line

    def end(self, line: Line, now: float) -> None:
        """Count one request of a line as under way no longer."""
        line.turn(now)
        line.count -= 1
        self._turn(now)
        self.count -= 1

    def watch(self) -> None:
        """Begin to look for the most requests at once."""
        self.peak = self.count

    def take(self, now: float) -> tuple[dict[tuple[str, str], float], float]:
        """
        What has added up since the last time, and begin anew.

        Returns:
            Request-seconds by tenant and model, without those of nothing; and the time with any request.
        """
        self._turn(now)
        taken: dict[tuple[str, str], float] = {}
        for key, line in list(self.lines.items()):
            line.turn(now)
            if line.seconds > 0:
                taken[key] = line.seconds
                line.seconds = 0.0
            elif not line.count:
                del self.lines[key]
        any_seconds, self.any_seconds = self.any_seconds, 0.0
        return taken, any_seconds

    def _turn(self, now: float) -> None:
        if self.count:
            self.any_seconds += now - self.since
        self.since = now
