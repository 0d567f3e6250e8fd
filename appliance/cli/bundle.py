"""
`appliance bundle`: everything an installation needs, for sites without internet.

`build`, `diff`, `split` and `emit` run on a connected machine; `verify`, `plan`, `join`, `load` and `copy`
at the site, and use no network except the registry of `load`.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from appliance.audit.signing_keys import create_signing_key, load_keys
from appliance.cli.bundle_load import COMMANDS as LOAD_COMMANDS
from appliance.cli.bundle_load import BaseOption, SourceArgument, TrustedOption, trusted_keys
from appliance.cli.common.options import ConfigOption, DataOption, key_location, settings_from, wall_clock
from appliance.cli.common.progress import progress_bar
from appliance.errors import ConfigurationError
from appliance.infra.key_location import mldsa_path
from appliance.sovereignty.bundle.build import Stamp, build_bundle, join_difference, make_difference
from appliance.sovereignty.bundle.bundle_verifier import Bundle, open_bundle, verify_bundle
from appliance.sovereignty.bundle.emit import Form, emit
from appliance.sovereignty.bundle.manifest import BundleManifest
from appliance.sovereignty.bundle.parts import FAT32_BYTES, split
from appliance.sovereignty.bundle.recipe import load_recipe
from appliance.sovereignty.bundle.signature import end_of

KUBERNETES = "1.34.0"
"""Kubernetes version for rendering; Helm's own default may be too old for a chart."""

commands = typer.Typer(help="Bundles for sites without internet.", no_args_is_help=True)
CARRIED_UMASK = 0o022


@commands.callback()
def let_others_read(context: typer.Context) -> None:
    if context.invoked_subcommand not in {"load", "copy"}:
        # A medium is read on another machine, under another account; a bundle has no secrets.
        os.umask(CARRIED_UMASK)


for _name, _command in LOAD_COMMANDS.items():
    commands.command(name=_name)(_command)

DirectoryArgument = Annotated[Path, typer.Argument(help="Directory to create; must not exist.")]
KeyNameOption = Annotated[str, typer.Option(help="Name of the key, such as example.com/releases.")]


@commands.command(name="new-key")
def new_key(
    path: Annotated[
        str, typer.Argument(help="File to create, mode 0600, never replaced; or `pkcs11:` URI of a key.")
    ],
    key_name: KeyNameOption,
) -> None:
    """
    Create a key that signs bundles, and print the line for the trusted keys of sites.

    A key in a token is there already: it is generated with the token's own tool.
    """
    location = key_location(path)
    if isinstance(location, Path):
        create_signing_key(location)
    typer.echo(load_keys(location, mldsa_path(location), key_name).vkey)


@commands.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) of the bundle.")],
    directory: DirectoryArgument,
    key: Annotated[
        str, typer.Option(help="File with the private key that signs, or `pkcs11:` URI of a key in a token.")
    ],
    key_name: KeyNameOption,
    key_not_after: Annotated[
        str, typer.Option(help="Last day on which sites accept signatures of this key.")
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
        raise ConfigurationError("--key-not-after must be a date such as 2027-12-31") from error
    location = key_location(key)
    stamp = Stamp(
        created=created,
        key_not_after=end_of(last_day),
        signer=load_keys(location, mldsa_path(location), key_name),
    )
    helm = shutil.which("helm")
    with progress_bar("reading", in_bytes=True) as count:
        manifest = build_bundle(
            load_recipe(recipe),
            recipe.absolute().parent,
            directory,
            stamp,
            None if helm is None else partial(_render, helm),
            count,
        )
    typer.echo(f"{_title(manifest)} in {directory}: {len(manifest.files)} files, {manifest.size} bytes")
    typer.echo(manifest.digest)


@commands.command()
def diff(
    older: Annotated[Path, typer.Argument(help="Bundle that the site has.")],
    newer: Annotated[Path, typer.Argument(help="Bundle that it will receive.")],
    directory: DirectoryArgument,
) -> None:
    """Create a difference: a bundle without the blobs of an older one; needs no key."""
    with progress_bar("writing", in_bytes=True) as count:
        difference = make_difference(_unsigned(older), _unsigned(newer), directory, count)
    typer.echo(
        f"{directory}: {len(difference.manifest.files)} files without {len(difference.omitted())} that "
        f"{older} has, {sum(file.size for file in difference.omitted())} bytes saved"
    )


@commands.command(name="split")
def split_bundle(
    source: SourceArgument,
    directory: DirectoryArgument,
    part_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum bytes of a part; the default suits FAT32.")
    ] = FAT32_BYTES,
) -> None:
    """Split a bundle into parts for a transport medium; `cat bundle.tar.*` joins them to one tar file."""
    bundle = _unsigned(source)
    with progress_bar("writing", in_bytes=True) as count:
        index = split(bundle.head, bundle.contents, directory, part_bytes, count)
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
    """Join parts, or a difference and its base, to one directory; everything is verified."""
    keys = trusted_keys(settings_from(config, data), trusted)
    bundle = open_bundle(source, trusted=keys, now=wall_clock(), base=base)
    with progress_bar("verifying, then writing", in_bytes=True) as count:
        verify_bundle(bundle, count=count)
        join_difference(bundle, directory, count)
    typer.echo(f"{_title(bundle.manifest)}, complete, in {directory}")


@commands.command(name="emit")
def emit_form(
    source: SourceArgument,
    form: Annotated[Form, typer.Option("--as", help="Format.")] = Form.IMAGES,
) -> None:
    """Describe a bundle for other tools: a list of images, Helm values, oc-mirror, Zarf."""
    typer.echo(emit(_unsigned(source).manifest, form), nl=False)


def _unsigned(path: Path) -> Bundle:
    """A bundle whose signature is not checked: the machine that builds has no trusted keys."""
    return open_bundle(path, trusted=None, now=0)


def _render(helm: str, chart: Path, values: Sequence[Path], more: str) -> str:
    known = ("--kube-version", KUBERNETES, "--api-versions", "cert-manager.io/v1")
    options = [*known, *(word for path in values for word in ("--values", str(path)))]
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


def _title(manifest: BundleManifest) -> str:
    return f"{manifest.name} {manifest.version}"
