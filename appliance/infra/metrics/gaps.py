"""
The time between two pieces of an answer, for millions of pieces a minute.

A histogram's `observe` takes two locks and walks its buckets.  A stream counts its gaps for itself instead,
in a list that nobody else has, and the histogram is given all of them when the request ends: a piece costs
a subtraction, a bisection and an addition.  What a crash loses of it is what the metrics lose anyway.
"""

from bisect import bisect_left

from prometheus_client import Histogram

GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
"""Upper bounds of the buckets, in seconds; the last bucket has none."""


class Gaps:
    """The gaps of one stream; owned by the task that relays it."""

    __slots__ = ("_counts", "_first", "_last", "_pieces")

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_SECONDS) + 1)
        self._first = self._last = 0.0
        self._pieces = 0

    def saw(self, pieces: int, now: float) -> None:
        """
        Note that pieces were sent together.

        Args:
            pieces: how many, at least 1.
            now: reading in seconds of a clock that never goes backwards, the same for a whole stream.
        """
        if self._pieces:
            self._counts[bisect_left(GAP_SECONDS, now - self._last)] += 1
        else:
            self._first = now
        self._last = now
        self._pieces += pieces

    @property
    def first(self) -> float | None:
        """When the first piece was sent; None before it was."""
        return self._first if self._pieces else None

    @property
    def pieces(self) -> int:
        """Pieces sent."""
        return self._pieces

    @property
    def counts(self) -> list[int]:
        """Gaps by bucket of `GAP_SECONDS`; those between pieces sent together are of 0 seconds."""
        counts = list(self._counts)
        counts[0] += max(0, self._pieces - 1) - sum(counts)
        return counts

    @property
    def seconds(self) -> float:
        """All gaps together."""
        return self._last - self._first


class GapHistogram(Histogram):
    """A histogram over `GAP_SECONDS` that takes a whole stream at once."""

    def add(self, gaps: Gaps) -> None:
        """Count every gap of a stream that has ended."""
        for bucket, count in zip(self._buckets, gaps.counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(gaps.seconds)
