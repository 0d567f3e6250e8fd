"""
What a report says: its JSON, with docs/reference/cost-report.schema.json made from here.

Every second of a worker is on exactly one line: a tenant's, `idle`, or `unattributed`, so the lines add up
to what the workers took and cost.
"""

from datetime import date, datetime

from pydantic import BaseModel, ConfigDict

from appliance.gateway.cost.gaps import GapKind
from appliance.gateway.cost.prices import Money


class Part(BaseModel):
    """A part of a report; money is in its currency, not rounded."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Cost(Part):
    """What something cost, by what it was for."""

    capital: float
    people: float
    energy: float
    total: float

    @classmethod
    def of(cls, money: Money) -> "Cost":
        """Money as a part of a report."""
        return cls(capital=money.capital, people=money.people, energy=money.energy, total=money.total)


class Line(Part):
    """What one tenant's requests for one model came to."""

    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    delivered_tokens: int
    """Tokens of answers that were sent to the client."""
    draft_tokens: int
    accepted_tokens: int
    wasted_tokens: int
    """Draft tokens the target did not accept."""
    engine_seconds: float
    """Engine time that went into its requests."""
    gpu_seconds: float
    """The same times the GPUs of each worker; 0 where workers do not say how many they have."""
    joules: float
    cost: Cost
    cost_per_million: float | None
    """Cost of a million delivered tokens, without a share of idle time; null where none was delivered or
    nothing is priced."""


class Rest(Part):
    """Time of workers that no request of a tenant had."""

    seconds: float
    joules: float
    cost: Cost


class Saving(Part):
    """
    What drafting saved on a worker, against the rate measured without drafts.

    Bounds hold with 95 % confidence, as if all measurements erred the same way.  Below 0: it cost.
    """

    compared_seconds: float
    """Engine time of the steps with drafts that were compared."""
    compared_tokens: int
    """Tokens those steps gave."""
    seconds: float
    """Engine time saved."""
    seconds_low: float
    seconds_high: float
    tokens: float
    """Tokens more than the same engine time would have given without drafts."""
    tokens_low: float
    tokens_high: float
    money: float
    """What the saved engine time would have cost, at this worker's busy rate."""
    money_low: float
    money_high: float


class WorkerLine(Part):
    """What one worker did."""

    worker: str
    observed_seconds: float
    busy_seconds: float
    estimated_seconds: float
    """Of its busy time, what no engine measured: time with a request under way."""
    attributed_seconds: float
    unattributed_seconds: float
    """Busy for no tenant's request; below 0 where gateways that share it claimed more than it was busy."""
    joules: float
    metered_seconds: float
    """Of the time observed, where GPUs measured the energy."""
    unknown_power_seconds: float
    """Of the time observed, where nothing says what was drawn."""
    cost: Cost
    saving: Saving


class Day(Part):
    """One day of the site's calendar."""

    day: date
    busy_seconds: float
    idle_seconds: float
    delivered_tokens: int


class Missing(Part):
    """A time of which something is missing, in UTC."""

    begin: datetime
    end: datetime
    kind: GapKind
    gateway: str | None


class Report(Part):
    """Engine time, energy, tokens and their cost over some days."""

    begin: datetime
    end: datetime
    """The first moment that is not in it."""
    time_zone: str
    currency: str
    made_at: datetime
    observed_seconds: float
    """Time of all workers that any gateway saw."""
    busy_seconds: float
    lines: tuple[Line, ...]
    """The costliest first."""
    idle: Rest
    unattributed: Rest
    total: Line
    """All lines together, with idle and unattributed time in seconds, energy and cost: what it took to
    deliver these tokens."""
    saving: Saving
    workers: tuple[WorkerLine, ...]
    days: tuple[Day, ...]
    missing: tuple[Missing, ...]
    prices: dict[str, float | None]
    """What it was priced with: per hour of a worker, per kWh."""
    notes: tuple[str, ...]
    """What to know before relying on it."""
