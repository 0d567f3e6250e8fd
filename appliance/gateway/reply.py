"""
The client's end of a call: where its answer goes, whoever waits there.

`appliance.api.streaming` has one on a connection, `appliance.gateway.batch.reply` one in memory.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What goes out before the first byte of the answer."""

    status: int
    content_type: str
    headers: dict[str, str]
    length: int | None = None
    """Bytes of the body, where they are known."""


class Reply(Protocol):
    """The client's end of the connection."""

    client_left: bool

    async def start(self, head: Head) -> None:
        """Send the head."""

    async def write(self, data: bytes) -> None:
        """Send part of the body."""

    async def end(self, data: bytes) -> None:
        """Send the last part of the body; whatever the gateway still does, the client need not wait for."""
