"""
What the admin API asks of the control loop; the loop is given in `Services` and knows nothing of HTTP.
"""

from collections.abc import Mapping
from typing import Protocol

from appliance.control.changes import SpeculationChange
from appliance.serving.worker import WorkerId
from appliance.speculation.values import Reason


class BucketView(Protocol):
    """What is known and chosen for one batch bucket of a worker."""

    @property
    def bucket(self) -> int:
        """Largest batch size of the bucket."""

    @property
    def draft_tokens(self) -> int:
        """Draft tokens chosen for it."""

    @property
    def reason(self) -> Reason:
        """Why."""

    @property
    def break_even(self) -> float | None:
        """Acceptance length above which drafting pays here; None where it was not measured."""

    @property
    def break_evens(self) -> Mapping[int, float]:
        """The same by number of draft tokens, as far as measured."""

    @property
    def payoff(self) -> float | None:
        """Logarithm of the gain in tokens per second over none, of the best choice above 0."""

    @property
    def tokens_per_second(self) -> Mapping[int, float]:
        """Tokens per engine second, by number of draft tokens, as last measured."""


class ControlView(Protocol):
    """What the control loop thinks of one worker."""

    @property
    def since(self) -> float:
        """When its mode last changed, Unix time."""

    @property
    def buckets(self) -> tuple[BucketView, ...]:
        """By batch bucket, smallest first."""

    @property
    def probes_failed(self) -> int:
        """Probes in a row that failed."""

    @property
    def next_probe_in_seconds(self) -> float | None:
        """Time until the next probe; None while none is due."""

    @property
    def controllable(self) -> bool:
        """Whether its draft-token table can be changed."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Why not."""


class Control(Protocol):
    """The control loop, as far as operators may look at it and ask of it."""

    def view(self, worker_id: WorkerId) -> ControlView | None:
        """What it thinks of a worker; None where it has not looked at it yet."""

    def events(self, after: int) -> tuple[SpeculationChange, ...]:
        """The changes with a larger sequence number that are still kept, oldest first."""

    def request_probe(self, worker_id: WorkerId) -> None:
        """
        Probe at the next tick, whenever one would be due.

        Raises:
            ControlRefusedError: why that cannot be.
        """

    def request_recycle(self, worker_id: WorkerId, *, with_draft: bool, note: str, actor: str) -> None:
        """
        Begin to drain and restart a worker, in the background.

        Raises:
            ControlRefusedError: why that cannot be.
        """
