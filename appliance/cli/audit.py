"""
`appliance audit`: read, export and verify the audit log of this machine.

Verification exports the log and runs the auditor's own verifier on the export, so that an operator sees
what an auditor will see.  It shows no entry; the commands that do are recorded in the log
(`appliance.cli.common.audit_log`).
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.audit import verify as verifier
from appliance.audit.content.payloads import SqlPayloadStore, export_payloads
from appliance.audit.export import export_log, export_receipt
from appliance.audit.lookup import entries_of, index_of
from appliance.audit.signing_keys import (
    encode_keys,
    keep_public_keys,
    load_kept,
    load_public_keys,
    load_signing_key,
)
from appliance.cli.audit_maintenance import COMMANDS as MAINTENANCE_COMMANDS
from appliance.cli.common.audit_log import (
    PAGE,
    PurposeOption,
    RecorderOption,
    UnrecordedOption,
    open_reader,
    open_store,
)
from appliance.cli.common.options import ConfigOption, DataOption, JsonOption, settings_from
from appliance.cli.common.progress import progress_bar
from appliance.cli.dispose import dispose
from appliance.cli.erase import COMMANDS as CONTENT_COMMANDS
from appliance.cli.timestamp import commands as timestamp_commands
from appliance.cli.witness import commands as witness_commands
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.key_location import TokenKey
from appliance.infra.settings import Settings

VERIFIER = "verify.py"
"""Beside the log in an export; its published SHA-256 says whether it is ours."""

commands = typer.Typer(help="Read, export and verify the audit log.", no_args_is_help=True)
PayloadsOption = Annotated[bool, typer.Option("--payloads/--no-payloads", help="Include encrypted content.")]


@commands.command()
def verify(
    held: Annotated[Path | None, typer.Option(help="An earlier checkpoint; the log must extend it.")] = None,
    witnesses_needed: Annotated[
        int, typer.Option(min=0, help="How many of `audit.witnesses` must have cosigned.")
    ] = 0,
    state: Annotated[
        Path | None, typer.Option(help="Remember what was verified in this file; verify only what is newer.")
    ] = None,
    timestamps_needed: Annotated[
        int, typer.Option(min=0, help="How many time stamps of the authority in the settings there must be.")
    ] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write the report as a page, to file it.")] = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    payloads: PayloadsOption = True,  # noqa: FBT002
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Verify the whole log; the exit code is the verdict.

    0 valid, 10 valid with erased payloads or disposed entries, 2 invalid, 3 diverged from --held or a
    witness, 4 incomplete, 5 fewer witnesses than needed, 7 fewer time stamps than needed.
    """
    settings = settings_from(config, data)
    with open_store(settings) as store, tempfile.TemporaryDirectory() as scratch:
        export = Path(scratch) / "log"
        vkey = _vkey(settings)
        with progress_bar("entries read") as progress:
            exported = export_log(store, export, vkey=vkey, progress=progress)
        if payloads:
            _add_payloads(settings, export)
        unsigned = store.head().size - exported
        arguments = [str(export), "--key", vkey, *(["--held", str(held)] if held else [])]
        arguments += ["--state", str(state)] if state else []
        arguments += ["--html", str(html)] if html else []
        for witness in settings.audit.witnesses:
            arguments += ["--witness", witness.key]
        if settings.audit.witnesses or witnesses_needed:
            arguments += ["--witnesses-needed", str(witnesses_needed)]
        if settings.audit.timestamp_certificate_file:
            arguments += ["--timestamp-cert", str(settings.audit.timestamp_certificate_file)]
            policy = settings.audit.timestamp_policy
            arguments += ["--timestamp-policy", policy] if policy else []
        if settings.audit.timestamp_certificate_file or timestamps_needed:
            arguments += ["--timestamps-needed", str(timestamps_needed)]
        if not payloads:
            arguments.append("--no-payloads")
        code = verifier.main([*arguments, "--json"] if as_json else arguments)
        still_open = store.open_intents()
    if unsigned and not as_json:
        typer.echo(f"{'not signed yet':<20} {unsigned} newer entries, {len(still_open)} requests open in all")
        for request_id in still_open:
            typer.echo(f"{'':<20} {request_id}")
    if code == verifier.ExitCode.VALID and unsigned and still_open:
        typer.echo(f"{'verdict':<20} incomplete: a request has no outcome yet (exit code 4)")
        code = verifier.ExitCode.INCOMPLETE
    sys.exit(code)


@commands.command()
def tail(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of newest entries.")] = 20,
    as_json: JsonOption = False,  # noqa: FBT002
    purpose: PurposeOption = "",
    unrecorded: UnrecordedOption = False,  # noqa: FBT002
    url: RecorderOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print the newest entries, oldest first."""
    with open_reader(settings_from(config, data), url, purpose, unrecorded=unrecorded) as reader:
        store = reader.store
        size = store.head().size
        first = max(0, size - count)
        reader.record("tail", first, size)
        for start in range(first, size, PAGE):
            for leaf in store.leaves(start, min(size, start + PAGE)):
                text = leaf.leaf.decode()
                typer.echo(text if as_json else _line(leaf.index, json.loads(text)))


@commands.command()
def receipt(
    entry: Annotated[str, typer.Argument(help="Index of the entry, or id of the request that it begins.")],
    leaf: Annotated[Path | None, typer.Option(help="Also write the entry to this file.")] = None,
    purpose: PurposeOption = "",
    unrecorded: UnrecordedOption = False,  # noqa: FBT002
    url: RecorderOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print the receipt of one entry (a .tlog-proof), which can be verified offline with the entry."""
    with open_reader(settings_from(config, data), url, purpose, unrecorded=unrecorded) as reader:
        index = index_of(reader.store, entry)
        content, proof = export_receipt(reader.store, index)
        reader.record("receipt", index, index + 1)
    if leaf is not None:
        leaf.write_bytes(content)
    typer.echo(proof, nl=False)


@commands.command()
def show(
    index: Annotated[int, typer.Argument(min=0, help="Index of the entry.")],
    purpose: PurposeOption = "",
    unrecorded: UnrecordedOption = False,  # noqa: FBT002
    url: RecorderOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print one entry."""
    with open_reader(settings_from(config, data), url, purpose, unrecorded=unrecorded) as reader:
        found = entries_of(reader.store, str(index))
        reader.record("show", index, index + 1)
    typer.echo(json.dumps(json.loads(found[0].leaf), indent=2, ensure_ascii=False))


@commands.command()
def export(
    directory: Annotated[Path, typer.Argument(help="Directory to create.")],
    purpose: PurposeOption = "",
    unrecorded: UnrecordedOption = False,  # noqa: FBT002
    payloads: PayloadsOption = True,  # noqa: FBT002
    url: RecorderOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Export the log up to its newest checkpoint, for an auditor."""
    settings = settings_from(config, data)
    if directory.exists():
        raise ConfigurationError(f"{directory} exists already; export into a new directory")
    with open_reader(settings, url, purpose, unrecorded=unrecorded) as reader, _beside(directory) as hidden:
        with progress_bar("entries") as progress:
            size = export_log(reader.store, hidden, vkey=_vkey(settings), progress=progress)
        if payloads:
            _add_payloads(settings, hidden)
        shutil.copyfile(verifier.__file__, hidden / VERIFIER)
        # The export gets its name only after the reading is recorded.
        reader.record("export", 0, size)
        hidden.rename(directory)
    typer.echo(f"wrote {size} entries to {directory}, and the verifier to {directory / VERIFIER}")


@commands.command()
def key(config: ConfigOption = None, data: DataOption = None) -> None:
    """Print the public key that verifies this log."""
    settings = settings_from(config, data)
    installation = locate(settings)
    location, kept = installation.signing_key, installation.public_key
    if isinstance(location, TokenKey) and not load_kept(location, kept):
        keep_public_keys(location, load_signing_key(location, settings.audit.origin), kept)
    typer.echo(_vkey(settings))


def _add_payloads(settings: Settings, export: Path) -> None:
    """Add stored content, still encrypted, to an export."""
    with (
        closing(SqlPayloadStore(locate(settings).database_url)) as payloads,
        progress_bar("payloads") as progress,
    ):
        export_payloads(payloads, export, progress)


@contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """A temporary path on the same disk as `directory`; anything left there is removed."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
            yield Path(scratch) / "log"
    except OSError as error:
        raise ConfigurationError(f"cannot write the export {directory}: {error.strerror}") from error


def _vkey(settings: Settings) -> str:
    installation = locate(settings)
    return encode_keys(
        load_public_keys(installation.signing_key, settings.audit.origin, installation.public_key)
    )


def _line(index: int, entry: dict[str, Any]) -> str:
    head = ("v", "log", "id", "type", "time")
    rest = " ".join(f"{name}={value}" for name, value in entry.items() if name not in head)
    return f"{index:>6}  {entry['time']}  {entry['type']:<18}  {rest}"


for _name, _command in {**CONTENT_COMMANDS, "dispose": dispose, **MAINTENANCE_COMMANDS}.items():
    commands.command(name=_name)(_command)
commands.add_typer(witness_commands, name="witness")
commands.add_typer(timestamp_commands, name="timestamp")
