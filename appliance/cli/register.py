"""
Commands change tenants and keys directly in the database, whether or not a gateway runs.

A command writes the audit entry and the change; running gateways apply it at their next poll, within about a
second.  It fails closed: a change that cannot be recorded is not made.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from appliance.audit.append import append_entry
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.cli.common.audit_log import open_store
from appliance.cli.common.duration import SECONDS_IN, parse_duration
from appliance.cli.common.options import wall_clock
from appliance.control.tenants.registrar import Edit, Registrar
from appliance.control.tenants.sealing import SealingPlan, read_plan
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings
from appliance.tenancy.moments import parse_moment
from appliance.tenancy.roster import Roster
from appliance.tenancy.roster_mac import RosterMac
from appliance.tenancy.store import SqlTenantStore

NO_LIMIT = "none"


def read_roster(settings: Settings) -> Roster:
    """All tenants and keys."""
    with _open_register(settings) as registrar:
        return asyncio.run(registrar.roster())


def change_roster(settings: Settings, edit: Edit, *, reason: str | None = None) -> Roster:
    """Apply one change; returns the new state.  Raises ApplianceError if the change was not made."""
    with _open_register(settings) as registrar:
        return asyncio.run(registrar.apply(edit, actor=f"cli:{account_name()}", reason=reason))


@contextmanager
def open_sealing(settings: Settings) -> Iterator[tuple[SealingPlan, Callable[[], Roster]]]:
    """What the log says of the tenants and keys as they are, and a function that seals them so."""
    with open_store(settings) as log:
        store = SqlTenantStore(log.database, RosterMac.of(locate(settings)))
        plan = read_plan(store, log, wall_clock())

        def seal() -> Roster:
            actor = f"cli:{account_name()}"
            return asyncio.run(_registrar(settings, log, store).seal(plan, actor=actor))

        yield plan, seal


def parse_expiry(text: str | None, now: float) -> int | None:
    """Unix time of an expiry: a duration such as `90d`, a date, or a date and time in UTC."""
    if text is None:
        return None
    if text[-1:] in SECONDS_IN and text.isascii() and text[:-1].isdigit():
        return int(now) + parse_duration(text)
    return parse_moment("--expires", text)


def parse_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_limit_words(words: list[str]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for word in words:
        left, _, value = word.rpartition("=")
        model, _, name = left.rpartition(":")
        if not name or (value != NO_LIMIT and not (value.isascii() and value.isdigit())):
            message = f"--limit {word}: write requests_per_minute=60, or MODEL:requests_per_minute=none"
            raise ConfigurationError(message)
        bounds = limits.setdefault("by_model", {}).setdefault(model, {}) if model else limits
        bounds[name] = None if value == NO_LIMIT else int(value)
    return limits


@contextmanager
def _open_register(settings: Settings) -> Iterator[Registrar]:
    with open_store(settings) as log:
        store = SqlTenantStore(log.database, RosterMac.of(locate(settings)))
        yield _registrar(settings, log, store)


def _registrar(settings: Settings, log: SqlAuditStore, store: SqlTenantStore) -> Registrar:
    async def record(entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401 - as the registry has it
        append_entry(log, entry_type, fields, origin=settings.audit.origin, clock=wall_clock)

    return Registrar(store=store, record=record)
