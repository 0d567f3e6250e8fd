"""
Saying in the audit log what was done with drafts: one entry, written by the command itself.

It is added beside whatever gateways write, as `audit.read` entries are.  Fails closed: a step that
cannot be recorded is not taken.
"""

import os
import time
from collections.abc import Callable
from contextlib import closing

from appliance.audit.append import append_entry
from appliance.audit.entry import JSON
from appliance.audit.registry import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.infra.data_directory import locate
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings

Journal = Callable[[EntryType, dict[str, JSON | None]], int]
"""Writes one entry, and returns its index once it is durable; raises AuditError."""


def open_journal(settings: Settings) -> Journal:
    """Return what records the steps of one command, as the account it runs under."""

    def record(entry_type: EntryType, fields: dict[str, JSON | None]) -> int:
        with closing(SqlAuditStore(locate(settings).database_url)) as store:
            return append_entry(
                store,
                entry_type,
                {**fields, "actor": f"cli:{account_name()}"},
                origin=settings.audit.origin,
                clock=time.time,  # noqa: TID251 - a command is a composition root
                random_bytes=os.urandom,
            )

    return record
