"""Where the gateway sends an answer: to a connection (`api.streaming`) or to memory (`gateway.batch`)."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """Sent before the first byte of the body."""

    status: int
    content_type: str
    headers: dict[str, str]
    length: int | None = None  # bytes of the body; None if unknown


class ReplySink(Protocol):
    client_left: bool  # whether the request was cancelled because its client left

    async def start(self, head: ReplyHead) -> None: ...

    async def write(self, data: bytes) -> None: ...

    def write_now(self, data: bytes) -> bool:
        """Write without waiting; False if that is not possible, and nothing was written."""

    async def end(self, data: bytes) -> None:
        """Send the last part of the body; the client waits for nothing after it."""
