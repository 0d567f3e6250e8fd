"""`appliance audit timestamp`: have this log time-stamped by file, and print how far it is."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from appliance.audit.timestamps.authority import Authority, load_authority, make_query
from appliance.audit.timestamps.store import Timestamps
from appliance.audit.timestamps.timestamping import CLOCK_DIFFERENCE_SECONDS, import_response, latest_text
from appliance.audit.verify import MAX_TIMESTAMP_BYTES
from appliance.cli.common.audit_log import open_store
from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.errors import ConfigurationError
from appliance.infra.settings import Settings

commands = typer.Typer(help="Have this log time-stamped by an authority (RFC 3161).", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="File that is exchanged with the authority.")]


@commands.command()
def request(file: FileArgument, config: ConfigOption = None, data: DataOption = None) -> None:
    """Write a request for a time stamp over the newest checkpoint (a TimeStampReq)."""
    settings = settings_from(config, data)
    # Without a nonce: the answer names the checkpoint, so nothing has to be remembered until it comes.
    with open_store(settings) as store:
        text, size = latest_text(store)
    try:
        file.write_bytes(make_query(text, policy=_authority(settings).policy))
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error.strerror}") from error
    typer.echo(f"wrote a request for the first {size} entries to {file}")


@commands.command(name="import")
def import_(file: FileArgument, config: ConfigOption = None, data: DataOption = None) -> None:
    """Import the authority's answer (a TimeStampResp)."""
    settings = settings_from(config, data)
    try:
        with file.open("rb") as opened:
            response = opened.read(MAX_TIMESTAMP_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    with open_store(settings) as store:
        timestamp = import_response(store, _authority(settings), response)
    typer.echo(f"the first {timestamp.size} entries were stamped at {_time(timestamp.time)}")
    if timestamp.time > wall_clock() + CLOCK_DIFFERENCE_SECONDS:
        typer.echo(
            "WARNING: that is in the future: this machine's clock or the authority's is wrong", err=True
        )


@commands.command()
def status(config: ConfigOption = None, data: DataOption = None) -> None:
    """Print how far the log is time-stamped."""
    settings = settings_from(config, data)
    with open_store(settings) as store:
        newest, size = Timestamps(store.database).newest(), store.head().size
    where = settings.audit.timestamp_url or "by file"
    if newest is None:
        typer.echo(f"UNTIMED ({where}): {size} entries")
    else:
        typer.echo(f"TIMED ({where}, {_time(newest.time)}): {newest.size} of {size} entries")


def _authority(settings: Settings) -> Authority:
    authority = load_authority(settings.audit)
    if authority is None:
        raise ConfigurationError(
            "no time-stamp authority is trusted: set audit.timestamp_certificate_file to its certificate"
        )
    return authority


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
