"""
Access to the audit log for commands; commands that show entries record that first: who reads what, and why.

The command appends the entry itself, next to the gateways' entries.  With `--url` a gateway does it, and
the admin key authenticates the reader; no other option sends the key.  Fails closed, whatever
`audit.durability` is: what cannot be recorded is not shown, unless the reader passes `--unrecorded`.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from appliance.audit.append import append_entry
from appliance.audit.entry_types import EntryType
from appliance.audit.reading import MAX_PURPOSE_CHARACTERS, Reading
from appliance.audit.store import SqlAuditStore
from appliance.cli.common.options import ask_gateway, wall_clock
from appliance.errors import AuditError, AuditUnavailableError, ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings

PAGE = 1000
"""Entries read from the store at a time."""
RecorderOption = Annotated[
    str | None, typer.Option(help="Gateway that records the reading; default: this command.")
]
PurposeOption = Annotated[str, typer.Option("--purpose", help="Reason; recorded in the audit log.")]
UnrecordedOption = Annotated[
    bool, typer.Option("--unrecorded", help="Continue even if the reading cannot be recorded.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    settings: Settings
    store: SqlAuditStore
    url: str | None
    """Base URL of the gateway that records it; None for this command."""
    purpose: str
    insists: bool
    """Whether to continue if the reading cannot be recorded."""

    def record(self, operation: str, start: int, end: int) -> None:
        """
        Record the reading of entries `start` to before `end`; an empty range is not recorded.

        Raises AuditUnavailableError if it cannot be recorded and the reader does not insist.
        """
        if len(self.purpose) > MAX_PURPOSE_CHARACTERS or not self.purpose.isprintable():
            message = f"--purpose must be one line of at most {MAX_PURPOSE_CHARACTERS} characters"
            raise ConfigurationError(message)
        if start == end:
            return
        reading = Reading(
            account=account_name(), operation=operation, start=start, end=end, purpose=self.purpose
        )
        if self.url is not None and self._record_through_gateway(reading):
            return
        try:
            fields, origin = reading.fields(), self.settings.audit.origin
            append_entry(self.store, EntryType.AUDIT_READ, fields, origin=origin, clock=wall_clock)
        except AuditError as error:
            if not self.insists:
                reason = f"nothing is shown, because the reading cannot be recorded ({error})"
                message = f"{reason}: pass a gateway with --url, or --unrecorded"
                raise AuditUnavailableError(message) from error
            typer.echo(f"appliance: the reading is not recorded: {error}", err=True)

    def _record_through_gateway(self, reading: Reading) -> bool:
        try:
            ask_gateway(self.settings, self.url, "POST", "audit/reads", asdict(reading))
        except ConfigurationError as error:
            typer.echo(f"appliance: {error}; this command records the reading instead", err=True)
            return False
        return True


@contextmanager
def open_reader(settings: Settings, url: str | None, purpose: str, *, unrecorded: bool) -> Iterator[Reader]:
    """The log's database, for a command whose reading is recorded; raises as `open_store` does."""
    with open_store(settings) as store:
        yield Reader(settings=settings, store=store, url=url, purpose=purpose, insists=unrecorded)


@contextmanager
def open_store(settings: Settings) -> Iterator[SqlAuditStore]:
    """The audit log's database, for reading; raises ConfigurationError if there is none."""
    if not has_log(settings):
        message = f"there is no audit log in {locate(settings).directory}: pass its directory with --data"
        raise ConfigurationError(message)
    with closing(SqlAuditStore(locate(settings).database_url)) as store:
        yield store


def has_log(settings: Settings) -> bool:
    """Whether the settings name a database or the data directory has one."""
    return settings.audit.database_url is not None or (locate(settings).directory / "audit.db").exists()
