"""
What the rest of the appliance needs of the audit log: hand an entry over, wait until it is durable.

`AuditLog` is one, `DurableLog` another.  Callers fail closed: what is not confirmed did not happen.
"""

import asyncio
from typing import Any, Protocol

from appliance.audit.pending import Receipt
from appliance.audit.registry import EntryType


class AuditSink(Protocol):
    """Where entries go."""

    def submit(self, entry_type: EntryType, /, **fields: Any) -> asyncio.Future[Receipt]:  # noqa: ANN401
        """Queue an entry; the future is done once it is durable.  May refuse at once."""

    async def confirm(self, pending: asyncio.Future[Receipt]) -> Receipt:
        """Wait for a queued entry, within the log's own limit; whoever waits may be cancelled."""
