"""
The report as a value and as JSON; docs/reference/cost-report.schema.json is generated from it.

Every second of a worker is on exactly one line: a tenant's, `idle`, or `unattributed`, so the lines add up
to the time and cost of the workers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from appliance.gateway.cost.prices import Money
from appliance.gateway.cost.rows import RecordingPeriod

SILENT_AFTER = 3
"""Missed writes after which a gateway counts as ended."""


class GapKind(StrEnum):
    """Why data is missing."""

    NOT_WRITTEN = "not_written"
    """A gateway ended without writing its latest counts."""
    NO_GATEWAY = "nobody_there"
    """No gateway ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingGap:
    """A time with missing data; Unix times."""

    begin: int
    end: int
    kind: GapKind
    gateway: str | None
    """Whose data; None if no gateway ran."""


def find_gaps(periods: Iterable[RecordingPeriod], begin: int, end: int, now: int) -> tuple[RecordingGap, ...]:
    """Gaps between two Unix times, in order; there are none after `now`."""
    known, end = sorted(periods, key=lambda period: period.began_at), min(end, now)
    gaps = [gap for period in known if (gap := _unwritten(period, known, now)) is not None]
    seen = begin
    for period in known:
        # A gateway that crashed ran for a while after its last write; that time is a gap of its own.
        if period.began_at > seen:
            gaps.append(RecordingGap(begin=seen, end=period.began_at, kind=GapKind.NO_GATEWAY, gateway=None))
        seen = max(seen, now if _is_running(period, known, now) else period.until)
    gaps.append(RecordingGap(begin=seen, end=end, kind=GapKind.NO_GATEWAY, gateway=None))
    clipped = (
        RecordingGap(begin=max(begin, gap.begin), end=min(end, gap.end), kind=gap.kind, gateway=gap.gateway)
        for gap in gaps
    )
    return tuple(
        sorted((gap for gap in clipped if gap.begin < gap.end), key=lambda gap: (gap.begin, gap.end))
    )


def _is_running(period: RecordingPeriod, known: list[RecordingPeriod], now: int) -> bool:
    """Whether it wrote recently and was not restarted since."""
    is_last = all(other.began_at < period.until for other in known if _is_another_start(period, other))
    return is_last and not period.closed and now <= period.until + SILENT_AFTER * period.flush_seconds


def _is_another_start(period: RecordingPeriod, other: RecordingPeriod) -> bool:
    return other.gateway == period.gateway and other.start != period.start


def _unwritten(period: RecordingPeriod, known: list[RecordingPeriod], now: int) -> RecordingGap | None:
    """The time after a gateway's last write in which it may have counted more."""
    if period.closed or _is_running(period, known, now):
        return None
    restarts = [
        other.began_at
        for other in known
        if _is_another_start(period, other) and other.began_at >= period.until
    ]
    end = min([period.until + period.flush_seconds, *restarts])
    return RecordingGap(begin=period.until, end=end, kind=GapKind.NOT_WRITTEN, gateway=period.gateway)


class ReportPart(BaseModel):
    """A part of a report; money is in its currency, not rounded."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cost(ReportPart):
    """A cost by component."""

    capital: float
    people: float
    energy: float
    total: float

    @classmethod
    def of(cls, money: Money) -> "Cost":
        return cls(capital=money.capital, people=money.people, energy=money.energy, total=money.total)


class CostLine(ReportPart):
    """Usage and cost of one tenant's requests for one model."""

    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    delivered_tokens: int
    """Tokens of answers sent to clients."""
    draft_tokens: int
    accepted_tokens: int
    wasted_tokens: int
    """Draft tokens the target did not accept."""
    engine_seconds: float
    """Engine time of its requests."""
    gpu_seconds: float
    """Engine time times the GPUs of each worker; 0 if their number is unknown."""
    joules: float
    cost: Cost
    cost_per_million: float | None
    """Cost of a million delivered tokens, without idle time; null without tokens or prices."""


class Rest(ReportPart):
    """Worker time without tenants' requests."""

    seconds: float
    joules: float
    cost: Cost


class Saving(ReportPart):
    """
    Engine time saved by drafts on a worker, compared with the rate measured without drafts.

    Bounds hold with 95 % confidence, as if all measurements erred the same way.  Negative: drafts cost time.
    """

    compared_seconds: float
    """Engine time of the compared steps with drafts."""
    compared_tokens: int
    """Tokens those steps produced."""
    seconds: float
    """Engine time saved."""
    seconds_low: float
    seconds_high: float
    tokens: float
    """Additional tokens compared with the same engine time without drafts."""
    tokens_low: float
    tokens_high: float
    money: float
    """Cost of the saved engine time at this worker's busy rate."""
    money_low: float
    money_high: float


class WorkerLine(ReportPart):
    worker: str
    observed_seconds: float
    busy_seconds: float
    estimated_seconds: float
    """Part of its busy time that no engine measured: time with a request in flight."""
    attributed_seconds: float
    unattributed_seconds: float
    """Busy without a tenant's request; negative if gateways that share it claimed more than it was busy."""
    joules: float
    metered_seconds: float
    """Part of the observed time with energy measured by GPUs."""
    unknown_power_seconds: float
    """Part of the observed time with unknown power draw."""
    cost: Cost
    saving: Saving


class Day(ReportPart):
    """One day of the site's calendar."""

    day: date
    busy_seconds: float
    idle_seconds: float
    delivered_tokens: int


class Missing(ReportPart):
    """A time with missing data, in UTC."""

    begin: datetime
    end: datetime
    kind: GapKind
    gateway: str | None


class CostReport(ReportPart):
    """Engine time, energy, tokens and their cost over some days."""

    begin: datetime
    end: datetime
    """Exclusive."""
    time_zone: str
    currency: str
    made_at: datetime
    observed_seconds: float
    """Time of all workers observed by any gateway."""
    busy_seconds: float
    lines: tuple[CostLine, ...]
    """The most engine time first."""
    idle: Rest
    unattributed: Rest
    total: CostLine
    """All lines together; seconds, energy and cost include idle and unattributed time."""
    saving: Saving
    workers: tuple[WorkerLine, ...]
    days: tuple[Day, ...]
    missing: tuple[Missing, ...]
    prices: dict[str, float | None]
    """Prices used: per worker hour, per kWh."""
    notes: tuple[str, ...]
    """Caveats."""
