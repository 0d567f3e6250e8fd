"""
A file on its way in: a piece of it in memory, the rest on disk, and never more than it may be.
"""

import asyncio

from appliance.errors import BodyTooLargeError
from appliance.gateway.batch.vault import FileWriter, Place
from appliance.tenancy import Caller

GATHERED_BYTES = 262_144
"""Bytes that are handed to the disk together."""


class Receiving:
    """One upload; `Files.keep` or `Files.discard` ends it."""

    def __init__(
        self, caller: Caller, place: Place, writer: FileWriter, *, sealed: bool, max_bytes: int
    ) -> None:
        self.caller = caller
        self.place = place
        self.sealed = sealed
        self.writer = writer
        self._max_bytes = max_bytes
        self._gathered = bytearray()

    async def write(self, data: bytes) -> None:
        """
        Add bytes.

        Raises:
            BodyTooLargeError: the file is larger than one may be.
            StorageUnavailableError: the disk does not take them.
        """
        if self.writer.size + len(self._gathered) + len(data) > self._max_bytes:
            raise BodyTooLargeError(f"A file may have at most {self._max_bytes} bytes. Send it in parts.")
        self._gathered += data
        if len(self._gathered) >= GATHERED_BYTES:
            await self._flush()

    async def finish(self) -> int:
        """Make the file durable; return its size in bytes.  Raises StorageUnavailableError."""
        await self._flush()
        await asyncio.to_thread(self.writer.finish)
        return self.writer.size

    async def _flush(self) -> None:
        data = bytes(self._gathered)
        self._gathered.clear()
        await asyncio.to_thread(self.writer.write, data)
