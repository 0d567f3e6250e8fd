"""
The interface between the gateway and tracing.  If tracing is off, no `Trace` exists.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class Trace(Protocol):
    """The trace of one request; times are readings of the gateway's monotonic clock, in seconds."""

    @property
    def sampled_id(self) -> str | None:
        """The trace's id in 32 hexadecimal digits; None if it is not sampled."""

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The exemplar labels that name this trace in a histogram; None if it is not sampled."""

    def waited(self, began: float, ended: float) -> None:
        """Add a wait for a worker with room, however it ended."""

    def forward(self, url: str, now: float) -> dict[str, str]:
        """Start the span of a worker; returns the headers that make the worker's spans part of this trace."""

    def leave(self, now: float, *, is_retried: bool) -> None:
        """Note the end of the worker's answer; `is_retried` if it failed and another worker follows."""

    def finish(self, fields: Mapping[str, Any], now: float) -> None:
        """End the trace with the fields of the `request.outcome` entry that `attributes` lists."""


class Tracing(Protocol):
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
        """Begin the trace of an admitted request; `traceparent` is the client's header, unchecked."""
