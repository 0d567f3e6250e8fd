"""
A clock that only tests move.
"""


class Clock:
    """Seconds since some moment; `now` may be set."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class TickingClock(Clock):
    """One that moves a millisecond at each reading, so that no two times are the same."""

    def __call__(self) -> float:
        self.now += 0.001
        return self.now
