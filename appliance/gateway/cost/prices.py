"""
From seconds and joules to money: every formula a report uses, and nothing else.

Years have 365.25 days, months are a twelfth of them.  A price that is not set makes no cost.
"""

from dataclasses import dataclass

from appliance.infra.settings import CostSettings

HOURS_PER_YEAR = 365.25 * 24
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """A cost by what it is for, in the currency of the settings."""

    capital: float = 0.0
    people: float = 0.0
    energy: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.capital + self.people + self.energy

    def __add__(self, other: "Money") -> "Money":
        """Both together."""
        return Money(
            capital=self.capital + other.capital,
            people=self.people + other.people,
            energy=self.energy + other.energy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What things cost over the time of one report; None for what is not priced."""

    capital_per_hour: float | None
    """Of one worker."""
    people_per_hour: float | None
    """Of one worker: what people cost over the whole time, spread over the hours of all workers."""
    per_kwh: float | None
    pue: float

    def cost(self, *, seconds: float, joules: float) -> Money:
        """The cost of so much time of one worker, and of the energy taken meanwhile."""
        hours = seconds / SECONDS_PER_HOUR
        return Money(
            capital=hours * (self.capital_per_hour or 0.0),
            people=hours * (self.people_per_hour or 0.0),
            energy=joules / JOULES_PER_KWH * self.pue * (self.per_kwh or 0.0),
        )


def prices_of(settings: CostSettings, *, hours: float, worker_hours: float) -> Prices:
    """
    The prices of a report.

    Args:
        settings: the `cost` section.
        hours: how long anything was recorded.
        worker_hours: hours of all workers together meanwhile.
    """
    people = None
    if settings.people_per_month is not None:
        spread = hours / worker_hours if worker_hours else 0.0
        people = settings.people_per_month / HOURS_PER_MONTH * spread
    return Prices(
        capital_per_hour=capital_per_hour(settings),
        people_per_hour=people,
        per_kwh=settings.power_price_per_kwh,
        pue=settings.pue,
    )


def capital_per_hour(settings: CostSettings) -> float | None:
    """What an hour of one worker's machine costs, rented or written off; None where it has no price."""
    if settings.worker_price is not None:
        return settings.worker_price / (settings.depreciation_years * HOURS_PER_YEAR)
    return settings.worker_price_per_hour


def per_million(cost: float, tokens: int) -> float | None:
    """Cost of a million tokens; None for none, and where nothing is priced."""
    return cost / tokens * 1e6 if tokens and cost else None
