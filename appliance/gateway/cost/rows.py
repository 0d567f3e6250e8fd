"""
Recorded rows: one for each slot, worker, model and tenant, and one for each slot and worker.

Whole microseconds, millijoules and tokens, so that sums are exact.

Slots are whole hours of the site's local time, not of UTC: in zones offset by half an hour, days and months
begin in the middle of a UTC hour, and its row would belong to two.
"""

from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple, Self
from zoneinfo import ZoneInfo

from appliance.errors import ConfigurationError

SLOT_SECONDS = 3600


def slot_of(time: float, zone: ZoneInfo) -> int:
    """Unix time at which the hour began, in local time."""
    offset = datetime.fromtimestamp(time, UTC).astimezone(zone).utcoffset() or timedelta(0)
    seconds = round(offset.total_seconds())
    return int(time + seconds) // SLOT_SECONDS * SLOT_SECONDS - seconds


def day_of(slot: int, zone: ZoneInfo) -> date:
    return datetime.fromtimestamp(slot, UTC).astimezone(zone).date()


def begin_of(day: date, zone: ZoneInfo) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp())


def parse_day(text: str) -> date:
    """Read `2026-11-21`, or `2026-11` for the first of that month; raises ConfigurationError."""
    try:
        return date.fromisoformat(text if text.count("-") > 1 else f"{text}-01")
    except ValueError as error:
        message = f"{text} is not a day: write 2026-11-21, or 2026-11 for the first of that month"
        raise ConfigurationError(message) from error


@dataclass(slots=True)
class Amounts:
    def add(self, other: Self) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class ShareKey(NamedTuple):
    slot: int  # Unix time at which it begins
    worker: str
    model: str
    tenant: str


@dataclass(slots=True, kw_only=True)
class TenantUsage(Amounts):
    engine_us: int = 0
    millijoules: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    delivered_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class WorkerKey(NamedTuple):
    slot: int
    worker: str


@dataclass(slots=True, kw_only=True)
class WorkerTime(Amounts):
    observed_us: int = 0  # busy or idle
    busy_us: int = 0  # its engine worked
    estimated_us: int = 0  # part of `busy_us` not measured: time with this gateway's requests in flight
    gpu_us: int = 0  # `busy_us` times its number of GPUs, if known
    millijoules: int = 0
    busy_millijoules: int = 0  # part of `millijoules` during `busy_us`
    metered_us: int = 0  # part of `observed_us` with energy measured by GPUs
    unknown_power_us: int = 0  # part of `observed_us` with unknown power draw
    draft_us: int = 0  # engine time of the compared steps with drafts
    draft_tokens: int = 0  # tokens those steps produced
    target_only_us: int = 0  # engine time of the same tokens without drafts
    target_only_low_us: int = 0
    target_only_high_us: int = 0

    def part(self, share: float) -> "WorkerTime":
        return WorkerTime(**{field.name: round(getattr(self, field.name) * share) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPeriod:
    """From a gateway's start to its end, or to its last write; Unix times."""

    start: str  # names this start of this gateway; never used again
    gateway: str
    began_at: int
    until: int
    flush_seconds: int
    closed: bool  # whether it ended after a final write


class Recorded(NamedTuple):
    periods: tuple[RecordingPeriod, ...]  # all of them, in the order they began
    shares: tuple[tuple[str, ShareKey, TenantUsage], ...]
    workers: tuple[tuple[str, WorkerKey, WorkerTime], ...]


class UsageLedger:
    """
    Usage recorded by this start of this gateway: in the current slot, and not yet written.

    It writes sums since the slot began, not differences: writing a sum twice, or again after a commit in
    doubt, changes nothing.
    """

    def __init__(self) -> None:
        self.shares: dict[ShareKey, TenantUsage] = {}
        self.workers: dict[WorkerKey, WorkerTime] = {}
        self._changed_shares: set[ShareKey] = set()
        self._changed_workers: set[WorkerKey] = set()

    def share(self, key: ShareKey) -> TenantUsage:
        """For the caller to add to at once."""
        self._changed_shares.add(key)
        row = self.shares.get(key)
        if row is None:
            row = self.shares[key] = TenantUsage()
        return row

    def add_time(self, key: WorkerKey, time: WorkerTime) -> None:
        self.workers.setdefault(key, WorkerTime()).add(time)
        self._changed_workers.add(key)

    def take_changed(self) -> tuple[dict[ShareKey, TenantUsage], dict[WorkerKey, WorkerTime]]:
        """Copies; call `roll_back` if they are not written."""
        shares = {key: replace(self.shares[key]) for key in self._changed_shares}
        workers = {key: replace(self.workers[key]) for key in self._changed_workers}
        self._changed_shares, self._changed_workers = set(), set()
        return shares, workers

    def roll_back(self, shares: dict[ShareKey, TenantUsage], workers: dict[WorkerKey, WorkerTime]) -> None:
        self._changed_shares |= shares.keys()
        self._changed_workers |= workers.keys()

    def drop_before(self, slot: int) -> None:
        """Drop the written rows of earlier slots."""
        for share in [key for key in self.shares if key.slot < slot and key not in self._changed_shares]:
            del self.shares[share]
        for time in [key for key in self.workers if key.slot < slot and key not in self._changed_workers]:
            del self.workers[time]
