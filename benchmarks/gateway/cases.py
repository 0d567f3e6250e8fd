"""
What is measured of each target, in rounds that alternate between them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import psutil

from benchmarks.audit.figures import Times, times
from benchmarks.gateway.client import Segment, Target, WrongAnswerError, drive, pace
from benchmarks.gateway.upstream import FRAMES

PACE = 20
"""Frames a second of each paced stream."""
BURST_CONCURRENCY = 16
PLAIN_CONCURRENCY = (1, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One kind of load."""

    name: str
    concurrency: int
    stream: bool = False
    paced: bool = False


LOADS = (
    *(Load(name=f"plain, {count} at a time", concurrency=count) for count in PLAIN_CONCURRENCY),
    Load(name=f"bursts of {FRAMES} frames, 16 at a time", concurrency=BURST_CONCURRENCY, stream=True),
)


def paced_loads(counts: Sequence[int]) -> tuple[Load, ...]:
    """Loads of so many steady streams."""
    return tuple(
        Load(name=f"{count} streams of {PACE} frames/s", concurrency=count, stream=True, paced=True)
        for count in counts
    )


@dataclass(slots=True, kw_only=True)
class Found:
    """What was measured of one target under one load; times in milliseconds."""

    target: str
    load: Load
    segments: list[Segment] = field(default_factory=list)
    failure: str = ""

    @property
    def first_byte(self) -> Times:
        """To the first byte of the body."""
        return times([value for segment in self.segments for value in segment.first_bytes])

    @property
    def delay(self) -> Times:
        """Of a frame, from being written by the upstream to being read by the client."""
        return times([value for segment in self.segments for value in segment.delays])

    @property
    def per_second(self) -> float:
        """Requests or streams answered in a second, median of the rounds."""
        rates = [len(segment.first_bytes) / segment.seconds for segment in self.segments]
        return statistics.median(rates) if rates else 0.0

    @property
    def cpu_ms(self) -> float | None:
        """CPU time of a request, or of a paced frame; median of the rounds."""
        found = [
            1000 * segment.cpu_seconds / segment.units
            for segment in self.segments
            if segment.cpu_seconds is not None and segment.units
        ]
        return statistics.median(found) if found else None

    @property
    def failed(self) -> int:
        """Paced streams that were not answered whole and in order."""
        return sum(segment.failed for segment in self.segments)


async def measure(load: Load, target: Target, found: Found, *, requests: int, seconds: float) -> None:
    """One round of one load on one target; a target that fails is measured no more."""
    if found.failure:
        return
    before = cpu_seconds(target)
    try:
        if load.paced:
            segment = await pace(target, load.concurrency, PACE, seconds, ramp=min(2.0, seconds / 3))
        else:
            members = {"stream": True} if load.stream else {}
            segment = await drive(target, requests, load.concurrency, **members)
    except* (WrongAnswerError, OSError) as errors:
        found.failure = str(errors.exceptions[0])
    else:
        spent = None if before is None else (cpu_seconds(target) or 0.0) - before
        found.segments.append(replace(segment, cpu_seconds=spent))


def cpu_seconds(target: Target) -> float | None:
    if target.pid is None:
        return None
    process = psutil.Process(target.pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


async def resident_growth(target: Target, requests: int) -> tuple[float, float]:
    """Megabytes of a process before and after so many plain requests, warmed up by a fifth as many."""
    process = psutil.Process(target.pid)
    await drive(target, requests // 5, BURST_CONCURRENCY)
    before = process.memory_info().rss
    await drive(target, requests, BURST_CONCURRENCY)
    return before / 2**20, process.memory_info().rss / 2**20
