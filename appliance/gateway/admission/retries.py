"""
How many second tries there may be: a share of the requests, so that failures do not multiply.

When workers fail because they have too much to do, trying everything again elsewhere gives the others
too much to do as well.  The budget fills with requests and empties with second tries; a reserve lets a
quiet gateway survive the death of a full worker.
"""


class RetryBudget:
    """Counts requests and second tries of one gateway."""

    def __init__(self, *, share: float, reserve: float) -> None:
        """
        Begin with the reserve.

        Args:
            share: second tries for each request.
            reserve: most second tries that may be saved up.
        """
        self._share = share
        self._reserve = reserve
        self._left = reserve

    @property
    def left(self) -> float:
        """Second tries that may be made now."""
        return self._left

    def saw_request(self) -> None:
        """Count a first try."""
        self._left = min(self._reserve, self._left + self._share)

    def take(self) -> bool:
        """Whether a second try may be made; it is counted if so."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
