"""
The client's end of a request that has no client: what would be sent is collected.
"""

from appliance.gateway.reply import Head


class CollectedReply:
    """`appliance.gateway.reply.Reply` in memory."""

    def __init__(self) -> None:
        self.client_left = False
        """Set when the batch is stopped by its tenant or its time, which the log records like a client's."""
        self.status = 0
        self.may_pass = True
        """Whether an error may come to an end by itself."""
        self._pieces: list[bytes] = []

    async def start(self, head: Head) -> None:
        """Note what the head says."""
        self.status = head.status
        self.may_pass = head.headers.get("x-should-retry") != "false"

    async def write(self, data: bytes) -> None:
        """Keep part of the body."""
        self._pieces.append(data)

    async def end(self, data: bytes) -> None:
        """Keep the last part of the body."""
        self._pieces.append(data)

    @property
    def text(self) -> str:
        """The body."""
        return b"".join(self._pieces).decode("utf-8", "replace")
