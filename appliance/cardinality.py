"""
A bound on the series that name a tenant, over all metrics together.

A monitoring server holds every series of every gateway in memory.  Tenants are what their number grows
with; once `most` series name one, what further tenants do is counted under `(other)`, so sums stay whole.
"""

from collections.abc import Sequence
from typing import Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

OTHER = "(other)"
"""In the place of a tenant's name, which never has parentheses."""
Family = TypeVar("Family", "TenantCounter", "TenantGauge")


class TenantSeries:
    """Makes the metrics whose first label is `tenant`, and counts their series."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._families: list[TenantCounter | TenantGauge] = []

    @property
    def is_full(self) -> bool:
        """Whether no further series may name a tenant."""
        return sum(len(family._metrics) for family in self._families) >= self._most  # noqa: SLF001

    def counter(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> Counter:
        """Make a counter whose first label is `tenant`."""
        return self._bounded(TenantCounter(name, text, labels, registry=registry))

    def gauge(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> Gauge:
        """Make a gauge whose first label is `tenant`."""
        return self._bounded(TenantGauge(name, text, labels, registry=registry))

    def _bounded(self, family: Family) -> Family:
        family.bound = self
        self._families.append(family)
        return family


class TenantCounter(Counter):
    """A counter that adds up under `(other)` whom there is no room for."""

    bound: TenantSeries

    def labels(self, *values: object, **named: object) -> Self:
        """The child of these labels, or the one of `(other)`."""
        wanted = _in_order(self, values, named)
        if wanted not in self._metrics and self.bound.is_full:
            wanted = (OTHER, *wanted[1:])
        return super().labels(*wanted)


class TenantGauge(Gauge):
    """A gauge that does not show whom there is no room for: states of several tenants make no sum."""

    bound: TenantSeries

    def labels(self, *values: object, **named: object) -> Self:
        """The child of these labels; one that nobody reads where there is no room."""
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
