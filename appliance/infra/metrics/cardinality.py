"""
Bounds on the series that grow with tenants, and with labels that clients can invent.

A monitoring server holds every series of every gateway in memory.  Once `most` series have a tenant label,
over all metrics together, further tenants are counted under `(other)`, so sums stay complete.  A label that
clients can invent gets a series only once it is frequent (`HeavyHitters`).
"""

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

OTHER = "(other)"
"""Label of the rest; no name has parentheses."""
Family = TypeVar("Family", "TenantCounter", "TenantGauge")


class TenantSeries:
    def __init__(self, most: int) -> None:
        self._most = most
        self._families: list[TenantCounter | TenantGauge] = []

    @property
    def is_full(self) -> bool:
        return sum(len(family._metrics) for family in self._families) >= self._most  # noqa: SLF001

    def counter(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> Counter:
        return self._bounded(TenantCounter(name, text, labels, registry=registry))

    def gauge(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> Gauge:
        return self._bounded(TenantGauge(name, text, labels, registry=registry))

    def _bounded(self, family: Family) -> Family:
        family.bound = self
        self._families.append(family)
        return family


class TenantCounter(Counter):
    """A counter that counts tenants beyond the bound under `(other)`."""

    bound: TenantSeries

    def labels(self, *values: object, **named: object) -> Self:
        wanted = _in_order(self, values, named)
        if wanted not in self._metrics and self.bound.is_full:
            wanted = (OTHER, *wanted[1:])
        return super().labels(*wanted)


class TenantGauge(Gauge):
    """A gauge that does not export tenants beyond the bound: states of several tenants have no sum."""

    bound: TenantSeries

    def labels(self, *values: object, **named: object) -> Self:
        wanted = _in_order(self, values, named)
        if wanted not in self._metrics and self.bound.is_full:
            return type(self)(
                self._name, self._documentation, self._labelnames, registry=None, _labelvalues=wanted
            )
        return super().labels(*wanted)


def _in_order(
    family: TenantCounter | TenantGauge, values: Sequence[object], named: dict[str, object]
) -> tuple[str, ...]:
    return tuple(map(str, values or (named[name] for name in family._labelnames)))  # noqa: SLF001


class HeavyHitters:
    """
    Tells frequent labels from rare ones: only frequent ones get a series.

    Labels are frequent once observed `often` within the last one to two spans of `among` observations; memory
    is bounded by these.  Beyond `most`, further ones wait until one was absent for a whole span; `on_gone` is
    called with that one.
    """

    def __init__(
        self, *, most: int, often: int, among: int, on_gone: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._most, self._often, self._among = most, often, among
        self._on_gone = on_gone
        self._named: set[tuple[str, ...]] = set()
        self._current: dict[tuple[str, ...], int] = {}
        self._previous: dict[tuple[str, ...], int] = {}
        self._seen = 0

    def observe(self, labels: tuple[str, ...]) -> bool:
        """Count one observation; return whether these labels are frequent now."""
        if self._seen >= self._among:
            self._previous, self._current, self._seen = self._current, {}, 0
        self._seen += 1
        count = self._current[labels] = self._current.get(labels, 0) + 1
        if labels in self._named:
            return True
        if count + self._previous.get(labels, 0) < self._often or not self._has_room():
            return False
        self._named.add(labels)
        return True

    def _has_room(self) -> bool:
        if len(self._named) < self._most:
            return True
        gone = {each for each in self._named if each not in self._current and each not in self._previous}
        self._named -= gone
        for each in gone:
            self._on_gone(each)
        return len(self._named) < self._most
