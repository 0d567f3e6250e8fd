"""
`appliance bundle`: carry everything an installation needs into a building without internet.

`build`, `diff`, `split` and `emit` run where there is internet; `verify`, `plan`, `join` and `load` in the
enclave, and use no network but the registry that `load` is told.
"""

import shutil
import subprocess
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from appliance.audit.keys import create_signing_key, load_keys, mldsa_path
from appliance.cli.bundle_load import COMMANDS as LOAD_COMMANDS
from appliance.cli.bundle_load import BaseOption, SourceArgument, TrustedOption, trusted_keys
from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.errors import ConfigurationError
from appliance.sovereignty.bundle.build import Stamp, build_bundle
from appliance.sovereignty.bundle.carry import make_difference, make_whole
from appliance.sovereignty.bundle.emit import Form, emit
from appliance.sovereignty.bundle.manifest import Manifest
from appliance.sovereignty.bundle.parts import FAT32_BYTES, split
from appliance.sovereignty.bundle.recipe import load_recipe
from appliance.sovereignty.bundle.trust import end_of
from appliance.sovereignty.bundle.verify import Bundle, open_bundle, verify_bundle

KUBERNETES = "1.34.0"
"""What charts are rendered for; Helm's own answer is as old as it is, and charts refuse what is too old."""

commands = typer.Typer(help="Bundles for buildings without internet.", no_args_is_help=True)
for _name, _command in LOAD_COMMANDS.items():
    commands.command(name=_name)(_command)

DirectoryArgument = Annotated[Path, typer.Argument(help="Directory to make; must not exist.")]
KeyOption = Annotated[Path, typer.Option("--key", help="Private key that signs, in its file.")]
KeyNameOption = Annotated[str, typer.Option("--key-name", help="Name it signs under: example.com/releases.")]


@commands.command(name="new-key")
def new_key(
    path: Annotated[Path, typer.Argument(help="File to make, mode 0600; never replaced.")],
    key_name: KeyNameOption,
) -> None:
    """Make a key that signs bundles, and print the line that sites put among their trusted keys."""
    create_signing_key(path)
    typer.echo(load_keys(path, mldsa_path(path), key_name).vkey)


@commands.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) of what goes in.")],
    directory: DirectoryArgument,
    key: KeyOption,
    key_name: KeyNameOption,
    key_not_after: Annotated[
        str, typer.Option("--key-not-after", help="Last day on which sites may take what this key signed.")
    ],
    created: Annotated[
        int,
        typer.Option(envvar="SOURCE_DATE_EPOCH", help="Time of the build in seconds since the epoch.", min=0),
    ],
) -> None:
    """Build and sign a bundle; the same recipe, files, time and key give the same bytes."""
    try:
        last_day = date.fromisoformat(key_not_after)
    except ValueError as error:
        raise ConfigurationError("--key-not-after takes a date such as 2027-12-31") from error
    stamp = Stamp(
        created=created,
        key_not_after=end_of(last_day),
        signer=load_keys(key, mldsa_path(key), key_name),
    )
    helm = shutil.which("helm")
    manifest = build_bundle(
        load_recipe(recipe),
        recipe.absolute().parent,
        directory,
        stamp,
        None if helm is None else partial(_render, helm),
    )
    typer.echo(f"{_title(manifest)} in {directory}: {len(manifest.files)} files, {manifest.size} bytes")
    typer.echo(manifest.digest)


@commands.command()
def diff(
    older: Annotated[Path, typer.Argument(help="Bundle that the other side has.")],
    newer: Annotated[Path, typer.Argument(help="Bundle it is to get.")],
    directory: DirectoryArgument,
) -> None:
    """Make a bundle without what an older one holds already; needs no key."""
    difference = make_difference(_unsigned(older), _unsigned(newer), directory)
    typer.echo(
        f"{directory}: {len(difference.manifest.files)} files less {len(difference.omitted())} that "
        f"{older} has, {sum(file.size for file in difference.omitted())} bytes saved"
    )


@commands.command(name="split")
def split_bundle(
    source: SourceArgument,
    directory: DirectoryArgument,
    part_bytes: Annotated[
        int, typer.Option("--part-bytes", help="Largest part, in bytes; the default suits FAT32.", min=1)
    ] = FAT32_BYTES,
) -> None:
    """Cut a bundle into parts for a carrier medium; `cat bundle.tar.*` makes one tar file of them."""
    bundle = _unsigned(source)
    index = split(bundle.head, bundle.contents, directory, part_bytes)
    typer.echo(f"{directory}: {len(index.parts)} parts, {sum(part.size for part in index.parts)} bytes")


@commands.command()
def join(
    source: SourceArgument,
    directory: DirectoryArgument,
    base: BaseOption = None,
    trusted: TrustedOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Make one whole directory of parts, or of a difference and its base, verified on the way."""
    keys = trusted_keys(settings_from(config, data), trusted)
    bundle = open_bundle(source, trusted=keys, now=_now(), base=base)
    verify_bundle(bundle)
    make_whole(bundle, directory)
    typer.echo(f"{_title(bundle.manifest)}, whole, in {directory}")


@commands.command(name="emit")
def emit_form(
    source: SourceArgument,
    form: Annotated[Form, typer.Option("--as", help="What for.")] = Form.IMAGES,
) -> None:
    """Describe a bundle for other tools: a list of images, Helm values, oc-mirror, Zarf."""
    typer.echo(emit(_unsigned(source).manifest, form), nl=False)


def _unsigned(path: Path) -> Bundle:
    """A bundle whose signature is not asked for: on the machine that builds nobody needs to trust it yet."""
    return open_bundle(path, trusted=None, now=0)


def _render(helm: str, chart: Path, values: Sequence[Path], more: str) -> str:
    options = ["--kube-version", KUBERNETES, *(word for path in values for word in ("--values", str(path)))]
    done = subprocess.run(  # noqa: S603 - helm, as found on the path
        [helm, "template", "bundle", str(chart), *options, "--values", "-"],
        input=more,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigurationError(f"helm cannot render {chart}: {' '.join(done.stderr.split())[:500]}")
    return done.stdout


def _title(manifest: Manifest) -> str:
    return f"{manifest.name} {manifest.version}"


def _now() -> float:
    return time.time()  # noqa: TID251 - a command is a composition root
