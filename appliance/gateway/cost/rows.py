"""
What is recorded: one row for each slot, worker, model and tenant, and one for each slot and worker.

Whole microseconds, millijoules and tokens, so that sums are exact wherever they are made.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self


@dataclass(slots=True)
class Amounts:
    """Whole amounts by name, of which two rows of one kind make a third."""

    def add(self, other: Self) -> None:
        """Count another row as well."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class ShareKey(NamedTuple):
    """Whose share."""

    slot: int
    """Unix time at which the slot begins; see `appliance.gateway.cost.slots`."""
    worker: str
    model: str
    tenant: str


@dataclass(slots=True, kw_only=True)
class Share(Amounts):
    """What one tenant's requests for one model came to on one worker."""

    engine_us: int = 0
    millijoules: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    delivered_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class WorkerKey(NamedTuple):
    """Which worker, and when."""

    slot: int
    worker: str


@dataclass(slots=True, kw_only=True)
class WorkerTime(Amounts):
    """What a gateway saw of one worker, whoever its requests were from."""

    observed_us: int = 0
    """Time it was looked at, busy or not."""
    busy_us: int = 0
    """Time its engine worked."""
    estimated_us: int = 0
    """Of `busy_us`, what no engine said: time with a request of this gateway under way."""
    gpu_us: int = 0
    """`busy_us` times its GPUs, where it says how many it has."""
    millijoules: int = 0
    busy_millijoules: int = 0
    """Of `millijoules`, what fell into `busy_us`."""
    metered_us: int = 0
    """Of `observed_us`, where GPUs measured the energy."""
    unknown_power_us: int = 0
    """Of `observed_us`, where nothing says what was drawn."""
    draft_us: int = 0
    """Engine time of steps with drafts that could be compared."""
    draft_tokens: int = 0
    """Tokens that those steps gave to requests."""
    target_only_us: int = 0
    """What the same tokens take without drafts."""
    target_only_low_us: int = 0
    target_only_high_us: int = 0

    def part(self, share: float) -> "WorkerTime":
        """So much of it, 0..1."""
        return WorkerTime(**{field.name: round(getattr(self, field.name) * share) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """From a gateway's start to its end, or to the last time it wrote anything; Unix times."""

    start: str
    """Names this start of this gateway; no two are ever the same."""
    gateway: str
    began_at: int
    until: int
    flush_seconds: int
    closed: bool
    """Whether it ended in order, with all written."""


class Recorded(NamedTuple):
    """What was recorded, each row with the start of the gateway that wrote it."""

    periods: tuple[Period, ...]
    """All there are, in the order they began."""
    shares: tuple[tuple[str, ShareKey, Share], ...]
    workers: tuple[tuple[str, WorkerKey, WorkerTime], ...]


class Book:
    """
    What this start of this gateway has recorded in slots that are not over, and what is not written yet.

    What it gives to be written are sums since the slot began, not differences: writing the same twice, or
    again after a commit of which nobody knows whether it happened, changes nothing.
    """

    def __init__(self) -> None:
        self.shares: dict[ShareKey, Share] = {}
        self.workers: dict[WorkerKey, WorkerTime] = {}
        self._changed_shares: set[ShareKey] = set()
        self._changed_workers: set[WorkerKey] = set()

    def share(self, key: ShareKey) -> Share:
        """The row, to be added to at once."""
        self._changed_shares.add(key)
        row = self.shares.get(key)
        if row is None:
            row = self.shares[key] = Share()
        return row

    def add_time(self, key: WorkerKey, time: WorkerTime) -> None:
        """Add to a row."""
        self.workers.setdefault(key, WorkerTime()).add(time)
        self._changed_workers.add(key)

    def take_changed(self) -> tuple[dict[ShareKey, Share], dict[WorkerKey, WorkerTime]]:
        """Copies of the rows changed since the last time; `give_back` them if they are not written."""
        shares = {key: replace(self.shares[key]) for key in self._changed_shares}
        workers = {key: replace(self.workers[key]) for key in self._changed_workers}
        self._changed_shares, self._changed_workers = set(), set()
        return shares, workers

    def give_back(self, shares: dict[ShareKey, Share], workers: dict[WorkerKey, WorkerTime]) -> None:
        """Note that these rows were not written."""
        self._changed_shares |= shares.keys()
        self._changed_workers |= workers.keys()

    def forget_before(self, slot: int) -> None:
        """Drop the rows of earlier slots, but for those that are not written yet."""
        for share in [key for key in self.shares if key.slot < slot and key not in self._changed_shares]:
            del self.shares[share]
        for time in [key for key in self.workers if key.slot < slot and key not in self._changed_workers]:
            del self.workers[time]
