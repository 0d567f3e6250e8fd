"""
How often an address may try to log in.

Keys are too long to be guessed; this keeps attempts from filling the log, and slows down who tries
stolen ones.  An attempt that succeeds is forgiven.
"""

from collections import deque
from collections.abc import Callable

ATTEMPTS = 10
"""Maximum failed logins from one address within `SECONDS`; then the address has to wait."""
SECONDS = 60.0
MOST_ADDRESSES = 4096
"""Beyond it the one that tried first is forgotten."""


class Logins:
    """Attempts that failed lately, by address."""

    def __init__(
        self, *, clock: Callable[[], float], attempts: int = ATTEMPTS, seconds: float = SECONDS
    ) -> None:
        self._attempts, self._seconds, self._clock = attempts, seconds, clock
        self._failed: dict[str, deque[float]] = {}

    def wait_seconds(self, address: str) -> float:
        """How long this address has to wait before it may try; 0 if it may now."""
        failed = self._failed.get(address)
        if failed is None or len(failed) < self._attempts:
            return 0.0
        return max(0.0, failed[0] + self._seconds - self._clock())

    def failed(self, address: str) -> None:
        """Remember an attempt that failed."""
        if address not in self._failed and len(self._failed) >= MOST_ADDRESSES:
            del self._failed[next(iter(self._failed))]
        self._failed.setdefault(address, deque(maxlen=self._attempts)).append(self._clock())

    def succeeded(self, address: str) -> None:
        """Forget what failed before."""
        self._failed.pop(address, None)
