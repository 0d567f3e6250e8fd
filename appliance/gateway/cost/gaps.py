"""
From when to when something is missing: gateways that ended without writing, and times without any.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from appliance.gateway.cost.rows import Period

SILENT_AFTER = 3
"""A gateway that has missed so many writes has ended."""


class GapKind(StrEnum):
    """Why something is missing."""

    NOT_WRITTEN = "not_written"
    """A gateway ended without writing what it had counted last."""
    NOBODY_THERE = "nobody_there"
    """No gateway ran, so nobody saw the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time of which something is missing; Unix times."""

    begin: int
    end: int
    kind: GapKind
    gateway: str | None
    """Whose records; None where there was no gateway."""


def find_gaps(periods: Iterable[Period], begin: int, end: int, now: int) -> tuple[Gap, ...]:
    """
    What is missing between two times, in their order.

    Args:
        periods: all that are known, in the order they began.
        begin: Unix time.
        end: Unix time; nothing is missing after `now`.
        now: Unix time.
    """
    known, end = sorted(periods, key=lambda period: period.began_at), min(end, now)
    gaps = [gap for period in known if (gap := _unwritten(period, known, now)) is not None]
    seen = begin
    for period in known:
        # Whoever ended in disorder was there for a while longer, of which nothing is known anyway.
        if period.began_at > seen:
            gaps.append(Gap(begin=seen, end=period.began_at, kind=GapKind.NOBODY_THERE, gateway=None))
        seen = max(seen, now if _is_running(period, known, now) else period.until)
    gaps.append(Gap(begin=seen, end=end, kind=GapKind.NOBODY_THERE, gateway=None))
    clipped = (
        Gap(begin=max(begin, gap.begin), end=min(end, gap.end), kind=gap.kind, gateway=gap.gateway)
        for gap in gaps
    )
    return tuple(
        sorted((gap for gap in clipped if gap.begin < gap.end), key=lambda gap: (gap.begin, gap.end))
    )


def _is_running(period: Period, known: list[Period], now: int) -> bool:
    """Whether it is still there: it wrote lately, and has not been started again since."""
    is_last = all(other.began_at < period.until for other in known if _is_another_start(period, other))
    return is_last and not period.closed and now <= period.until + SILENT_AFTER * period.flush_seconds


def _is_another_start(period: Period, other: Period) -> bool:
    return other.gateway == period.gateway and other.start != period.start


def _unwritten(period: Period, known: list[Period], now: int) -> Gap | None:
    """The time after a gateway's last write in which it may still have counted."""
    if period.closed or _is_running(period, known, now):
        return None
    restarts = [
        other.began_at
        for other in known
        if _is_another_start(period, other) and other.began_at >= period.until
    ]
    end = min([period.until + period.flush_seconds, *restarts])
    return Gap(begin=period.until, end=end, kind=GapKind.NOT_WRITTEN, gateway=period.gateway)
