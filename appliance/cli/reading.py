"""
Commands that show the audit log say so in the log first: who reads what, and why.

The command writes the entry itself, beside whatever gateways write.  With `--url` a gateway does it,
and the admin key vouches for the reader; nothing but that option sends the key anywhere.  It fails
closed, whatever `audit.durability` is: what cannot be recorded is not shown, unless the reader
insists with `--unrecorded`.
"""

import asyncio
import os
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from appliance.audit.reading import MAX_PURPOSE_CHARACTERS, Reading, record
from appliance.audit.store import AuditStore
from appliance.errors import AuditError, AuditUnavailableError, ConfigurationError
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings

RecorderOption = Annotated[
    str | None, typer.Option("--url", help="Gateway that records the reading; default: this command does.")
]
PurposeOption = Annotated[str, typer.Option("--purpose", help="Why; goes into the audit log.")]
UnrecordedOption = Annotated[
    bool, typer.Option("--unrecorded", help="Go on even if the reading cannot be recorded.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One run of a command that reads the log."""

    settings: Settings
    store: AuditStore
    url: str | None
    """Base URL of the gateway that is to record it; None for this command."""
    purpose: str
    insists: bool
    """Whether to go on when the reading cannot be recorded."""

    def record(self, operation: str, start: int, end: int) -> None:
        """
        Record the reading of entries `start` to before `end`; nothing is recorded for none.

        Raises:
            ConfigurationError: the purpose is not one line.
            AuditUnavailableError: it cannot be recorded, and the reader does not insist.
        """
        if len(self.purpose) > MAX_PURPOSE_CHARACTERS or not self.purpose.isprintable():
            raise ConfigurationError(
                f"--purpose takes one line of at most {MAX_PURPOSE_CHARACTERS} characters"
            )
        if start == end:
            return
        reading = Reading(
            account=account_name(), operation=operation, start=start, end=end, purpose=self.purpose
        )
        if self.url is not None and self._through_gateway(reading):
            return
        try:
            record(
                self.store,
                reading,
                origin=self.settings.audit.origin,
                clock=time.time,  # noqa: TID251 - a command is a composition root
                random_bytes=os.urandom,
            )
        except AuditError as error:
            if not self.insists:
                reason = f"nothing is shown, because reading it cannot be recorded ({error})"
                message = f"{reason}: name a gateway that can with --url, or insist with --unrecorded"
                raise AuditUnavailableError(message) from error
            typer.echo(f"appliance: this reading is not recorded: {error}", err=True)

    def _through_gateway(self, reading: Reading) -> bool:
        """Whether the gateway has recorded it."""
        from appliance.cli.common.admin import open_admin  # noqa: PLC0415 - an HTTP client is slow to import

        async def ask() -> None:
            async with open_admin(self.settings, self.url) as gateway:
                await gateway.request("POST", "audit/reads", asdict(reading))

        try:
            asyncio.run(ask())
        except ConfigurationError as error:
            typer.echo(f"appliance: {error}; this command records the reading instead", err=True)
            return False
        return True
