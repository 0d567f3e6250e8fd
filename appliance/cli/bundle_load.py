"""`appliance bundle verify | plan | load | copy`: the commands for the site."""

import platform
import shlex
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from appliance.audit.append import append_entry
from appliance.audit.entry_types import EntryType
from appliance.cli.common.audit_log import has_log, open_store
from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.common.progress import progress_bar
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.os_account import account_name
from appliance.infra.settings import Settings
from appliance.sovereignty.bundle.bundle_verifier import Bundle, open_bundle, verify_bundle
from appliance.sovereignty.bundle.engine import Engine
from appliance.sovereignty.bundle.installed import check_order, make_plan, read_installed
from appliance.sovereignty.bundle.load import Home, Targets, copy_model, load_bundle
from appliance.sovereignty.bundle.manifest import BundleManifest
from appliance.sovereignty.bundle.oci_push import Registry
from appliance.sovereignty.bundle.placing import room
from appliance.sovereignty.bundle.signature import TrustedKey, load_trusted_keys

_say = partial(typer.echo, err=True)

SourceArgument = Annotated[Path, typer.Argument(help="A directory, a directory of parts, or a tar file.")]
BaseOption = Annotated[Path | None, typer.Option("--base", help="Bundle that a difference was made against.")]
TrustedOption = Annotated[
    Path | None, typer.Option(help="Trusted keys; default: bundle-keys.txt in the data directory.")
]
ModelsOption = Annotated[Path | None, typer.Option("--models", help="Directory of models.")]
FilesOption = Annotated[
    Path | None, typer.Option(help="Directory for charts, compose files, wheels and SBOMs.")
]


def verify(
    source: SourceArgument,
    base: BaseOption = None,
    trusted: TrustedOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Verify every byte of a bundle against the signature of a trusted key; writes nothing."""
    bundle = _open(settings_from(config, data), source, trusted, base)
    with progress_bar("verifying", in_bytes=True) as count:
        verify_bundle(bundle, _say, count)
    typer.echo(
        f"{bundle.manifest.name} {bundle.manifest.version} is complete and signed by {bundle.signer}: "
        f"{len(bundle.manifest.items)} items, {bundle.manifest.size} bytes"
    )
    typer.echo(bundle.manifest.digest)


def plan(
    source: SourceArgument,
    base: BaseOption = None,
    models: ModelsOption = None,
    files: FilesOption = None,
    trusted: TrustedOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show what loading a bundle would change, and the disk space it needs; checks the signature only."""
    settings = settings_from(config, data)
    bundle = _open(settings, source, trusted, base)
    loaded = read_installed(_home(settings).installed).find(bundle.manifest.name)
    typer.echo(f"{bundle.manifest.name} {loaded.version if loaded else 'none'} -> {bundle.manifest.version}")
    for step in make_plan(bundle.manifest, loaded):
        before = f"{step.before} -> " if step.before not in {None, step.item.version} else ""
        typer.echo(f"{step.change:<8}{step.item.kind:<7} {step.item.name} {before}{step.item.version}")
    placements = Targets(models=models, files=files).placements(bundle.manifest, bundle.trees())
    for place, needed, free in room(placements):
        typer.echo(f"{place}: {needed} bytes needed, {free} free")
    check_order(loaded, bundle.manifest)


def load(
    source: SourceArgument,
    base: BaseOption = None,
    models: ModelsOption = None,
    files: FilesOption = None,
    engine: Annotated[str | None, typer.Option(help="Container engine to load images into: docker.")] = None,
    registry: Annotated[
        str | None, typer.Option(help="Registry for images and charts: https://host/prefix.")
    ] = None,
    registry_credentials: Annotated[
        Path | None, typer.Option(help="File with `name:password` of the registry.")
    ] = None,
    registry_ca: Annotated[
        Path | None, typer.Option(help="CA certificates (PEM) that verify the registry's.")
    ] = None,
    trusted: TrustedOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Load a bundle; after a failure run it again, and it resumes."""
    if models is None and files is None and engine is None and registry is None:
        raise ConfigurationError("pass a destination: --models, --files, --engine or --registry")
    settings = settings_from(config, data)
    bundle = _open(settings, source, trusted, base)
    targets = Targets(
        models=models,
        files=files,
        engine=None if engine is None else Engine(command=shlex.split(engine), machine=platform.machine()),
        registry=None if registry is None else _registry(registry, registry_credentials, registry_ca),
    )
    with progress_bar("verifying, then writing", in_bytes=True) as count:
        changed = load_bundle(bundle, targets, _home(settings), partial(_record, settings), _say, count)
    title = f"{bundle.manifest.name} {bundle.manifest.version}"
    typer.echo(f"{title} is loaded" if changed else f"{title} is already loaded; nothing changed")


def copy(
    directory: Annotated[Path, typer.Argument(help="Directory of weights.")],
    name: Annotated[str, typer.Option(help="Name below the directory of models.")],
    models: Annotated[Path, typer.Option(help="Directory of models.")],
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Place weights that are in no bundle as `load` does, without a signature; run it again to resume."""
    home = _home(settings_from(config, data))
    with progress_bar("reading, then writing", in_bytes=True) as count:
        changed = copy_model(directory, name, models, home, _say, count)
    typer.echo(f"{name} is copied" if changed else f"{name} is already copied; nothing changed")


COMMANDS: dict[str, Callable[..., None]] = {"verify": verify, "plan": plan, "load": load, "copy": copy}
"""By name below `appliance bundle`."""


def trusted_keys(settings: Settings, path: Path | None) -> Sequence[TrustedKey]:
    return load_trusted_keys(path or _home(settings).trusted)


def _open(settings: Settings, source: Path, trusted: Path | None, base: Path | None) -> Bundle:
    return open_bundle(source, trusted=trusted_keys(settings, trusted), now=wall_clock(), base=base)


def _home(settings: Settings) -> Home:
    return Home(directory=locate(settings).directory)


def _registry(url: str, credentials: Path | None, authority: Path | None) -> Registry:
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError("--registry must be a URL such as https://registry.example/prefix")
    pair: tuple[str, str] | None = None
    try:
        if credentials is not None:
            name, colon, password = credentials.read_text(encoding="utf-8").strip().partition(":")
            if not colon:
                raise ConfigurationError(f"{credentials} must contain `name:password`")
            pair = (name, password)
        tls = ssl.create_default_context(cafile=authority) if url.startswith("https://") else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {authority or credentials}: {error}") from error
    return Registry(url=url, credentials=pair, tls=tls)


def _record(settings: Settings, manifest: BundleManifest, signer: str) -> None:
    """Append `bundle.installed`; an installation that was never started has no log yet."""
    if not has_log(settings):
        message = "appliance: there is no audit log yet: this load is recorded in bundle.json only"
        typer.echo(message, err=True)
        return
    fields = {
        "bundle": manifest.name,
        "version": manifest.version,
        "digest": manifest.digest,
        "actor": f"cli:{account_name()}",
        "signer": signer,
    }
    with open_store(settings) as store:
        origin = settings.audit.origin
        append_entry(store, EntryType.BUNDLE_INSTALLED, fields, origin=origin, clock=wall_clock)
