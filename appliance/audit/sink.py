"""
The interface of the audit log for the rest of the appliance: submit an entry, wait until it is durable.

`AuditLog` and `DurableLog` implement it.  Callers fail closed: what is not confirmed did not happen.
"""

import asyncio
from typing import Any, Protocol

from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Receipt
from appliance.errors import AuditError
from appliance.infra.logs import Logger


class AuditSink(Protocol):
    def submit(self, entry_type: EntryType, /, **fields: Any) -> asyncio.Future[Receipt]:  # noqa: ANN401
        """Queue an entry; the future is done once it is durable.  May refuse at once."""

    async def confirm(self, pending: asyncio.Future[Receipt]) -> Receipt:
        """Wait for a queued entry, within the log's time limit; the caller may be cancelled."""


def submit_best_effort(audit: AuditSink, logger: Logger, entry_type: EntryType, /, **fields: Any) -> None:  # noqa: ANN401
    """Queue an entry that no caller waits for; a refusal is logged, and what it records happens anyway."""
    try:
        audit.submit(entry_type, **fields)
    except AuditError as error:
        logger.warning("audit_entry_refused", reason=str(entry_type), error=str(error))
