"""
What one request took of its tenant's limits, until it is known what it used.
"""

from collections.abc import Sequence
from typing import Protocol

from appliance.tenancy.limits.holding import Batch, Holding


class Reservation(Protocol):
    """Held by a request from before it is sent to a worker until it has ended."""

    def settle(self, tokens: int) -> None:
        """
        Say what the request used, however it ended: the rest is given back.

        Only the first word counts.  A crash before it keeps what was reserved as spent, but for the
        request's place among those under way, which comes back when the gateway's lease runs out.
        """


class Unlimited:
    """The reservation of a tenant without limits: costs nothing, keeps nothing."""

    def settle(self, tokens: int) -> None:
        """Do nothing."""


UNLIMITED = Unlimited()


class HeldReservation:
    """Units of several holdings, taken at once by `Share.take`."""

    __slots__ = ("_taken",)

    def __init__(self, taken: Sequence[tuple[Holding, int, Batch]]) -> None:
        self._taken = taken

    def settle(self, tokens: int) -> None:
        """Give back, or charge, the difference."""
        taken, self._taken = self._taken, ()
        for holding, units, batch in taken:
            holding.settle(batch, units, tokens)
