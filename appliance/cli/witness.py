"""
`appliance audit witness`: run a witness of logs, or have this log witnessed.

`init`, `key`, `serve` and `cosign` run on the witness's machine and take its directory; `export-head`,
`import` and `status` run on the log's.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from appliance.audit.cosigned import CosignedCheckpoints, newest_by_witness
from appliance.audit.signing_keys import load_public_keys
from appliance.audit.store import SqlAuditStore
from appliance.audit.witness.home import WitnessHome, load_verifier_keys
from appliance.audit.witness.witness import (
    CONFLICT,
    MAX_REQUEST_BYTES,
    OK,
    Witness,
    encode_request,
    parse_request,
)
from appliance.audit.witness.witnessing import import_cosigned, level_of, load_witnesses, make_request
from appliance.cli.common.audit_log import open_store
from appliance.cli.common.options import (
    ConfigOption,
    DataOption,
    JsonOption,
    print_json,
    settings_from,
    wall_clock,
)
from appliance.errors import AuditVerificationError, ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings

commands = typer.Typer(help="Run a witness of logs, or have this log witnessed.", no_args_is_help=True)

HomeArgument = Annotated[Path, typer.Argument(help="Directory of the witness.")]
FileArgument = Annotated[Path, typer.Argument(help="File that is exchanged between log and witness.")]


@commands.command()
def init(
    directory: HomeArgument,
    name: Annotated[str, typer.Option(help="Name it signs with, such as auditor.example/witness.")],
    log: Annotated[list[str], typer.Option(help="Key of a log, or a file of keys; repeatable.")],
    post_quantum: Annotated[bool, typer.Option("--post-quantum", help="Also cosign with ML-DSA-44.")] = False,  # noqa: FBT002 - a flag of the command line
) -> None:
    """Create a witness on this machine and print its public keys, for operators and auditors."""
    keys = [key for text in log for key in load_verifier_keys(text)]
    typer.echo(WitnessHome(directory=directory).create(name, keys, post_quantum=post_quantum).vkey)


@commands.command()
def key(directory: HomeArgument) -> None:
    """Print the public keys of a witness."""
    typer.echo(WitnessHome(directory=directory).signer().vkey)


@commands.command()
def serve(
    directory: HomeArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks one.")] = 8090,
) -> None:
    """Cosign over HTTP until stopped."""
    home = WitnessHome(directory=directory)
    name = home.signer().name
    asyncio.run(_serve(home.open(wall_clock), name, host, port))


@commands.command()
def cosign(directory: HomeArgument, file: FileArgument) -> None:
    """Cosign the head in a file from `export-head`; the result replaces the file's content."""
    text = _read(file)
    parse_request(text)  # a file of another kind is an error, not a refusal
    answer = WitnessHome(directory=directory).open(wall_clock).add_checkpoint(text)
    if answer.status == CONFLICT:
        raise AuditVerificationError(
            f"this witness is at {answer.text.strip()} entries: on the log's machine run `appliance "
            f"audit witness export-head FILE --from {answer.text.strip()}`and bring that file here"
        )
    if answer.status != OK:
        raise AuditVerificationError(f"not cosigned: {answer.text.strip()}")
    _write(file, f"{parse_request(text).note}{answer.text}")
    typer.echo(f"cosigned; bring {file} back and run `appliance audit witness import {file.name}`")


@commands.command(name="export-head")
def export_head(
    file: FileArgument,
    witness: Annotated[
        str | None, typer.Option(help="Name of the witness; required if there are several.")
    ] = None,
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="Tree size of the witness, if it reported one.")
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Write the newest checkpoint, and the proof that it extends the last cosigned one."""
    settings = settings_from(config, data)
    name = witness or _only_witness(settings)
    with _open_log(settings) as (store, kept):
        if start is None:
            known = newest_by_witness(kept.all()).get(name or "")
            start = known.size if known else 0
        request = make_request(store, start)
    _write(file, encode_request(request))
    typer.echo(f"wrote the newest head and its proof from size {start} to {file}")


@commands.command(name="import")
def import_(file: FileArgument, config: ConfigOption = None, data: DataOption = None) -> None:
    """Import the cosignatures in a file from a witness."""
    settings = settings_from(config, data)
    installation = locate(settings)
    log_keys = load_public_keys(installation.signing_key, settings.audit.origin, installation.public_key)
    with _open_log(settings) as (store, kept):
        for cosigned in import_cosigned(store, _read(file), load_witnesses(settings.audit), log_keys[:1]):
            kept.save(cosigned)
            typer.echo(f"{cosigned.witness} cosigned {cosigned.size} entries at {_time(cosigned.time)}")


@commands.command()
def status(
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Print how far the log is witnessed, and by which witnesses."""
    settings = settings_from(config, data)
    witnesses = load_witnesses(settings.audit)
    with _open_log(settings) as (store, kept):
        statements, size = newest_by_witness(kept.all()), store.head().size
    level = level_of(witnesses, list(statements.values()))
    if as_json:
        print_json(
            {
                "size": size,
                "witnessed": level.size,
                "known": level.known,
                "cosigned": level.cosigned,
                "witnesses": [
                    {"name": name, "size": seen.size, "time": seen.time} for name, seen in statements.items()
                ],
            }
        )
        return
    if not level.cosigned:
        typer.echo(f"UNWITNESSED (0 of {level.known})")
    else:
        newest = f"{level.cosigned} of {level.known}, {_time(level.time)}"
        typer.echo(f"WITNESSED ({newest}): {level.size} of {size} entries")
    for witness in witnesses:
        known = statements.get(witness.name)
        seen = f"{known.size} entries at {_time(known.time)}" if known else "nothing yet"
        typer.echo(f"{witness.name:<32} {witness.url or 'by file':<32} {seen}")


async def _serve(witness: Witness, name: str, host: str, port: int) -> None:
    from appliance.audit.witness.witness_server import serving  # noqa: PLC0415 - an HTTP server is slow to import

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(witness, host, port) as url:
        typer.echo(f"witness {name} cosigns at {url}")
        await stop.wait()


@contextmanager
def _open_log(settings: Settings) -> Iterator[tuple[SqlAuditStore, CosignedCheckpoints]]:
    with open_store(settings) as store:
        yield store, CosignedCheckpoints(store.database)


def _only_witness(settings: Settings) -> str | None:
    names = [witness.name for witness in settings.audit.witnesses]
    if len(names) > 1:
        raise ConfigurationError(f"pass --witness with one of: {', '.join(names)}")
    return names[0] if names else None


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_REQUEST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from error


def _write(file: Path, text: str) -> None:
    """Replace the file atomically."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error.strerror}") from error


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
