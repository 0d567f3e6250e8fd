"""
Records the steps of draft commands in the audit log.

The command writes its entry itself, like `audit.read` entries.  Fails closed: a step that cannot be recorded
is not taken.
"""

import os
from collections.abc import Callable
from contextlib import closing

from appliance.audit.append import append_entry
from appliance.audit.entry import JSON
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.cli.common.options import wall_clock
from appliance.infra.data_directory import locate
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings

Journal = Callable[[EntryType, dict[str, JSON | None]], int]
"""Writes one durable entry and returns its index; raises AuditError."""


def open_journal(settings: Settings) -> Journal:
    """Record entries in the name of the account that runs the command."""

    def record(entry_type: EntryType, fields: dict[str, JSON | None]) -> int:
        with closing(SqlAuditStore(locate(settings).database_url)) as store:
            return append_entry(
                store,
                entry_type,
                {**fields, "actor": f"cli:{account_name()}"},
                origin=settings.audit.origin,
                clock=wall_clock,
                random_bytes=os.urandom,
            )

    return record
