"""
Metrics that are not moved event by event: gaps within a stream, and counters copied from a worker.

`observe` of a histogram takes two locks and walks its buckets: too much for millions of pieces of answers a
minute.  A stream counts its gaps in a list of its own, and the histogram takes all of them when the request
ends: a piece costs a subtraction, a bisection and an addition.
"""

from bisect import bisect_left

from prometheus_client import Counter, Histogram

GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
"""Upper bounds of the buckets, in seconds; the last bucket has none."""


class Gaps:
    """The gaps of one stream; owned by the task that relays it."""

    __slots__ = ("_counts", "_first", "_last", "_pieces")

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_SECONDS) + 1)
        self._first = self._last = 0.0
        self._pieces = 0

    def observe(self, pieces: int, now: float) -> None:
        """
        Count pieces (at least 1) that were sent together; `now` is the stream's monotonic clock in seconds.
        """
        if self._pieces:
            self._counts[bisect_left(GAP_SECONDS, now - self._last)] += 1
        else:
            self._first = now
        self._last = now
        self._pieces += pieces

    @property
    def first(self) -> float | None:
        return self._first if self._pieces else None

    @property
    def pieces(self) -> int:
        return self._pieces

    @property
    def counts(self) -> list[int]:
        """Gaps by bucket of `GAP_SECONDS`; between pieces sent together they are 0 seconds."""
        counts = list(self._counts)
        counts[0] += max(0, self._pieces - 1) - sum(counts)
        return counts

    @property
    def seconds(self) -> float:
        return self._last - self._first


class GapHistogram(Histogram):
    """A histogram over `GAP_SECONDS` that takes a whole stream at once."""

    def add(self, gaps: Gaps) -> None:
        for bucket, count in zip(self._buckets, gaps.counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(gaps.seconds)


class CopiedCounter(Counter):
    """A counter that a worker keeps; Prometheus takes its fall to 0 at a restart as a reset."""

    def copy(self, value: float) -> None:
        self._value.set(float(value))
