"""
A gateway by itself: a share of one tenant's limits, while the database is away.

It begins with what was known to be used, and what it lets in is entered in the book as soon as there
is one again, requests still under way with what was reserved for them.  Gateways cut off together
keep a limit together if their shares come to no more than one.
"""

import math
from dataclasses import replace
from types import MappingProxyType

from appliance.tenancy.allowances import BOUNDS, Limits
from appliance.tenancy.limits.book import Book, Terms, exchange
from appliance.tenancy.limits.estimate import Estimate
from appliance.tenancy.limits.refusal import refusal
from appliance.tenancy.limits.reservation import Reservation
from appliance.tenancy.limits.share import Share
from appliance.tenancy.limits.window import slot_at

NAME = "alone"


class Alone:
    """
    A book of one's own.

    Args:
        share: what this gateway held when it lost the database.
        part: of each limit, 0..1, what may be used here.
        terms: as with the database.
        now: Unix time.
    """

    def __init__(self, share: Share, part: float, terms: Terms, now: float) -> None:
        self._terms = terms
        self._share = Share(scaled(share.limits, part))
        self._book = Book()
        self._known: dict[str, tuple[str, int]] = {}
        for key, holding in share.holdings.items():
            if not holding.is_concurrent:
                # What was held counts as used: it was, or will be given back.
                used = math.ceil(part * max(0, holding.quota.limit - holding.pool))
                mark = holding.batch.period or str(slot_at(now))
                self._known[key], self._book.spent[key] = (mark, used), {mark: used}

    def take(self, model: str, estimate: Estimate, *, now: float, wall_time: float) -> Reservation:
        """
        Let a request in.

        Args:
            model: the model it is for.
            estimate: the tokens it may come to.
            now: monotonic time.
            wall_time: Unix time.

        Raises:
            LimitReachedError: the share of a limit is used up, or the request is larger than it.
        """
        need = self._share.need(model, estimate)
        if (reservation := self._share.take(need, now)) is not None:
            return reservation
        report = self._share.report([need])
        reply = exchange(self._book, self._share.quotas, NAME, report, now=wall_time, terms=self._terms)
        self._share.enter(reply, asked=now, now=now)
        if (reservation := self._share.take(need, now)) is not None:
            return reservation
        (decision,) = reply.decisions
        units = next(units for holding, units in need if holding.key == decision.key)
        quota = self._share.quotas[decision.key]
        raise refusal(quota, decision, units, now=wall_time, zone=self._terms.zone)

    def owe(self, share: Share) -> None:
        """Charge a share with what was used here, of the minute and the periods that are not over."""
        for key, (mark, known) in self._known.items():
            here, there = self._share.holdings[key], share.holdings.get(key)
            if there is not None and here.batch.period == there.batch.period:
                marks = self._book.spent.get(key, {})
                used = here.batch.units + sum(marks.values()) - (known if mark in marks else 0)
                there.charge(used, there.batch.period)


def scaled(limits: Limits, part: float) -> Limits:
    """Limits of which only a part may be used, rounded down."""
    bounds = {
        name: None if (bound := getattr(limits, name)) is None else int(bound * part) for name in BOUNDS
    }
    by_model = {model: scaled(each, part) for model, each in limits.by_model.items()}
    return replace(limits, **bounds, by_model=MappingProxyType(by_model))
