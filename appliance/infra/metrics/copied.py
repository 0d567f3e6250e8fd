"""
Counters that somebody else keeps.
"""

from prometheus_client import Counter


class CopiedCounter(Counter):
    """
    Set to what its keeper says, and back at 0 when the keeper starts anew.

    Prometheus takes a counter that falls for one that was reset, whoever kept it, so rates stay right.
    """

    def copy(self, value: float) -> None:
        """Export this value from now on."""
        self._value.set(float(value))
