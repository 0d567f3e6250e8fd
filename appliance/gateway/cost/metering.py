"""
What the gateway and the control loop tell whoever counts cost, and what they tell where nobody does.
"""

# ruff: noqa: ARG002 - who counts nothing looks at nothing

from typing import Protocol

from appliance.gateway.cost.presence import Line, Presence
from appliance.serving.usage import Usage
from appliance.serving.worker import WorkerId, WorkerSnapshot


class Metering(Protocol):
    """Counts what serving costs; `appliance.gateway.cost.meter` does."""

    def begin(self, worker_id: WorkerId, tenant: str, model: str) -> Line:
        """Note that a request goes to a worker."""

    def end(self, line: Line) -> None:
        """Note that a request is with its worker no longer, whatever became of it."""

    def count(self, worker_id: WorkerId, tenant: str, model: str, usage: Usage) -> None:
        """Count a request that has ended, under the worker that was asked last."""

    def looking(self, worker_id: WorkerId) -> None:
        """Note that a look at a worker begins."""

    def saw(self, snapshot: WorkerSnapshot, *, acting: bool) -> None:
        """
        Take in what a look showed.

        Args:
            snapshot: of a worker that has just answered.
            acting: whether this gateway steers the workers, and so measures what drafting costs.
        """


class NoMetering:
    """Counts nothing."""

    def __init__(self) -> None:
        self._line = Line(Presence())

    def begin(self, worker_id: WorkerId, tenant: str, model: str) -> Line:
        """Count nothing."""
        return self._line

    def end(self, line: Line) -> None:
        """Count nothing."""

    def count(self, worker_id: WorkerId, tenant: str, model: str, usage: Usage) -> None:
        """Count nothing."""

    def looking(self, worker_id: WorkerId) -> None:
        """Count nothing."""

    def saw(self, snapshot: WorkerSnapshot, *, acting: bool) -> None:
        """Count nothing."""


NO_METERING = NoMetering()
