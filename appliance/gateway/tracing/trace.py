"""
What the gateway tells whoever traces requests.

Where tracing is off there is no `Trace` at all, and nothing of this is called.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class Trace(Protocol):
    """One request being traced; times are readings of the gateway's monotonic clock, in seconds."""

    @property
    def sampled_id(self) -> str | None:
        """The trace's id in 32 hexadecimal digits; None if it is not sampled, so that nobody will find it."""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels by which a histogram's bucket names this trace; None if it is not sampled."""

    def waited(self, began: float, ended: float) -> None:
        """Note a wait for a worker with room, however it ended."""

    def ask(self, url: str, now: float) -> dict[str, str]:
        """
        Note that a worker is asked; the headers by which what it traces becomes part of this trace.

        Args:
            url: the worker's base URL.
            now: when.
        """

    def leave(self, now: float, *, goes_on: bool) -> None:
        """
        Note that the worker is done with, whatever became of it.

        Args:
            now: when.
            goes_on: whether it failed and another is asked.
        """

    def finish(self, fields: Mapping[str, Any], now: float) -> None:
        """
        End the trace.

        Args:
            fields: those of the `request.outcome` entry; of them, only what `attributes` names is kept.
            now: when.
        """


class Tracing(Protocol):
    """Begins traces; `appliance.gateway.tracing.tracer` does."""

    def begin(
        self,
        *,
        request_id: str,
        tenant: str,
        route: str,
        model: str,
        traceparent: str | None,
        started: float,
    ) -> Trace:
        """
        Begin the trace of a request that was admitted.

        Args:
            request_id: our id of it.
            tenant: whose it is.
            route: the path that was called.
            model: the served model it names.
            traceparent: the header of this name, as the client sent it.
            started: when it came.
        """
