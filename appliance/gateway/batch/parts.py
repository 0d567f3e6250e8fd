"""
What every batch of a gateway is run with.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from appliance.audit.sink import AuditSink
from appliance.gateway.batch.answerer import Answerer
from appliance.gateway.batch.batch import Batch
from appliance.gateway.batch.files import Files
from appliance.gateway.batch.gate import Gate
from appliance.gateway.batch.lines import LineCutter
from appliance.gateway.batch.store import SqlBatchStore
from appliance.gateway.batch.vault import Vault
from appliance.tenancy import Caller

SLICE_BYTES = 16_384
"""Input that is judged in one go; whatever else the process does waits that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """What a batch is run with."""

    store: SqlBatchStore
    vault: Vault
    files: Files
    audit: AuditSink
    gate: Gate
    answerer: Answerer
    find_owner: Callable[[str, str], Caller | None]
    """Whom a key of a tenant stands for now; None once it opens nothing any more."""
    count: Callable[[str, str], None]
    """Told tenant and result of each line that is done: `completed` or `failed`."""
    clock: Callable[[], float]
    """Unix time."""
    new_id: Callable[[], str]
    max_line_bytes: int
    max_requests: int

    async def cut_input(self, batch: Batch, cutter: LineCutter) -> AsyncIterator[tuple[int, bytes]]:
        """
        Yield number and bytes of each line of a batch's input; everything else gets its turn in between.

        Raises:
            StoredFileNotFoundError: the input is gone.
            StorageUnavailableError: it cannot be read.
            InvalidRequestError: a line is too long.
        """
        stored = await self.files.get(batch.tenant, batch.input_file_id)
        seen = 0
        async for piece in self.files.read(stored):
            for number, line in cutter.feed(piece):
                yield number, line
                seen += len(line)
                if seen >= SLICE_BYTES:
                    seen = 0
                    await asyncio.sleep(0)
        for number, line in cutter.end():
            yield number, line
