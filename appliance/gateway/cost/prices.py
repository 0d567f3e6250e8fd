"""
Converts seconds and joules to money: all formulas of a report.

A year has 365.25 days, a month is a twelfth of it.  A price that is not set adds no cost.
"""

from dataclasses import dataclass

from appliance.infra.settings import CostSettings

HOURS_PER_YEAR = 365.25 * 24
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
JOULES_PER_KWH = 3.6e6
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    capital: float = 0.0
    people: float = 0.0
    energy: float = 0.0

    @property
    def total(self) -> float:
        return self.capital + self.people + self.energy

    def __add__(self, other: "Money") -> "Money":
        return Money(
            capital=self.capital + other.capital,
            people=self.people + other.people,
            energy=self.energy + other.energy,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Over the time of one report; None if not set."""

    capital_per_hour: float | None  # of one worker
    people_per_hour: float | None  # the cost of people, divided by the hours of all workers
    per_kwh: float | None
    pue: float

    def cost(self, *, seconds: float, joules: float) -> Money:
        hours = seconds / SECONDS_PER_HOUR
        return Money(
            capital=hours * (self.capital_per_hour or 0.0),
            people=hours * (self.people_per_hour or 0.0),
            energy=joules / JOULES_PER_KWH * self.pue * (self.per_kwh or 0.0),
        )


def prices_of(settings: CostSettings, *, hours: float, worker_hours: float) -> Prices:
    """Over so many recorded hours, with so many hours of all workers together."""
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
    """Of one worker's machine, rented or depreciated; None if no price is set."""
    if settings.worker_price is not None:
        return settings.worker_price / (settings.depreciation_years * HOURS_PER_YEAR)
    return settings.worker_price_per_hour


def per_million(cost: float, tokens: int) -> float | None:
    """None without tokens or without prices."""
    return cost / tokens * 1e6 if tokens and cost else None
