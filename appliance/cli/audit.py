"""
`appliance audit`: read, export and verify the audit log of this machine.

Verification exports the log and runs the auditor's own verifier on the export, so that an operator
sees what an auditor will see.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.audit import verify as verifier
from appliance.audit.export import export_log, export_receipt
from appliance.audit.keys import load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.cli.options import ConfigOption, DataOption, settings_from
from appliance.errors import ConfigurationError
from appliance.installation import locate
from appliance.settings import Settings

commands = typer.Typer(help="Read, export and verify the audit log.", no_args_is_help=True)
PAGE = 1000
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CountOption = Annotated[int, typer.Option("--count", "-n", min=1, help="How many of the newest entries.")]
HeldOption = Annotated[
    Path | None, typer.Option("--held", help="A checkpoint kept from before; the log must agree with it.")
]


@commands.command()
def verify(
    held: HeldOption = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Verify the whole log; the exit code is the verdict.

    0 valid, 10 valid with erased payloads, 2 invalid, 3 diverged from --held, 4 incomplete.
    """
    settings = settings_from(config, data)
    with open_store(settings) as store, tempfile.TemporaryDirectory() as scratch:
        export = Path(scratch) / "log"
        vkey = _vkey(settings)
        exported = export_log(store, export, vkey=vkey)
        unsigned = store.head().size - exported
        arguments = [str(export), "--key", vkey, *(["--held", str(held)] if held else [])]
        code = verifier.main([*arguments, "--json"] if as_json else arguments)
        still_open = store.open_intents()
    if unsigned and not as_json:
        typer.echo(f"{'not signed yet':<20} {unsigned} newer entries, {len(still_open)} requests open in all")
        for request_id in still_open:
            typer.echo(f"{'':<20} {request_id}")
    if code == verifier.ExitCode.VALID and unsigned and still_open:
        typer.echo(f"{'verdict':<20} incomplete: a request began and has not ended (exit code 4)")
        code = verifier.ExitCode.INCOMPLETE
    sys.exit(code)


@commands.command()
def tail(
    count: CountOption = 20,
    as_json: JsonOption = False,  # noqa: FBT002
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print the newest entries, oldest first."""
    with open_store(settings_from(config, data)) as store:
        size = store.head().size
        for start in range(max(0, size - count), size, PAGE):
            for leaf in store.leaves(start, min(size, start + PAGE)):
                text = leaf.leaf.decode()
                typer.echo(text if as_json else _line(leaf.index, json.loads(text)))


@commands.command()
def receipt(
    index: Annotated[int, typer.Argument(min=0, help="Index of the entry.")],
    leaf: Annotated[
        Path | None, typer.Option("--leaf", help="Also write the entry itself to this file.")
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print the receipt of one entry (a .tlog-proof), to be verified offline with the entry."""
    with open_store(settings_from(config, data)) as store:
        content, proof = export_receipt(store, index)
    if leaf is not None:
        leaf.write_bytes(content)
    typer.echo(proof, nl=False)


@commands.command()
def show(
    index: Annotated[int, typer.Argument(min=0, help="Index of the entry.")],
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print one entry."""
    with open_store(settings_from(config, data)) as store:
        found = store.leaves(index, index + 1)
    if not found:
        message = f"the log has no entry {index}"
        raise ConfigurationError(message)
    typer.echo(json.dumps(json.loads(found[0].leaf), indent=2, ensure_ascii=False))


@commands.command()
def export(
    directory: Annotated[Path, typer.Argument(help="Directory to make.")],
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Write the log up to its newest checkpoint, for an auditor."""
    settings = settings_from(config, data)
    with open_store(settings) as store:
        size = export_log(store, directory, vkey=_vkey(settings))
    typer.echo(f"wrote {size} entries to {directory}")


@commands.command()
def key(config: ConfigOption = None, data: DataOption = None) -> None:
    """Print the public key that verifies this log."""
    typer.echo(_vkey(settings_from(config, data)))


@contextmanager
def open_store(settings: Settings) -> Iterator[SqlAuditStore]:
    """
    The audit log's database, to be read for as long as the context lasts.

    Raises:
        ConfigurationError: there is no audit log where the settings say.
    """
    installation = locate(settings)
    if settings.audit.database_url is None and not (installation.directory / "audit.db").exists():
        message = f"there is no audit log in {installation.directory}: name its directory with --data"
        raise ConfigurationError(message)
    store = SqlAuditStore(installation.database_url)
    try:
        yield store
    finally:
        store.close()


def _vkey(settings: Settings) -> str:
    return load_signing_key(locate(settings).signing_key, settings.audit.origin).vkey


def _line(index: int, entry: dict[str, Any]) -> str:
    head = ("v", "log", "id", "type", "time")
    rest = " ".join(f"{name}={value}" for name, value in entry.items() if name not in head)
    return f"{index:>6}  {entry['time']}  {entry['type']:<18}  {rest}"
