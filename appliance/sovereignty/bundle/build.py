"""
Build a bundle from a recipe.

What it writes depends on the recipe, the files it names, the time given and the key, and on nothing
else: two builds of the same are the same to the byte.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appliance.audit.checkpoint import NoteSigner
from appliance.errors import ConfigurationError
from appliance.sovereignty.bundle.artefacts import add_chart, add_files, files_below
from appliance.sovereignty.bundle.copying import making, write_durably
from appliance.sovereignty.bundle.depot import Depot
from appliance.sovereignty.bundle.emit import Form, compose_environment, emit
from appliance.sovereignty.bundle.images import import_image, open_archive
from appliance.sovereignty.bundle.manifest import (
    INDEX,
    LAYOUT,
    LAYOUT_CONTENT,
    MANIFEST,
    SIGNATURE,
    Item,
    Kind,
    Manifest,
)
from appliance.sovereignty.bundle.oci import IMAGE_INDEX, REF_NAME, Descriptor, encode_index
from appliance.sovereignty.bundle.recipe import Chart, Files, Image, Model, Recipe, Thing
from appliance.sovereignty.bundle.references import annotated_images, check_complete, check_listed, images_in
from appliance.sovereignty.bundle.signature import sign_manifest

ONE_VERSION = frozenset({Kind.MODEL, Kind.WHEELS, Kind.FILES})
"""Kinds whose place in an installation has the name of the thing and not its version."""
Render = Callable[[Path, tuple[Path, ...], str], str]
"""Renders a packaged chart with files of values, and with values as text on top; returns YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a build takes from outside the recipe."""

    created: int
    """Seconds since the epoch: SOURCE_DATE_EPOCH."""
    key_not_after: int
    """When the key ends, in seconds since the epoch."""
    signer: NoteSigner


def build_bundle(
    recipe: Recipe, root: Path, directory: Path, stamp: Stamp, render: Render | None
) -> Manifest:
    """
    Build a bundle in a new directory.

    Args:
        recipe: what goes in.
        root: directory that the recipe's paths start from.
        directory: the bundle; must not exist.
        stamp: time and key.
        render: renders charts; None where there is no helm, and charts' own lists count.

    Raises:
        ConfigurationError: something cannot be read, or is not what the recipe says.
        BundleIncompleteError: an image that is named is not among the recipe's.
        BundleStorageError: the bundle cannot be written.
    """
    with making(directory) as place:
        manifest = _Builder(recipe, root, Depot(place), render).build(stamp)
        content = manifest.encode()
        write_durably(place / MANIFEST, content)
        write_durably(place / SIGNATURE, sign_manifest(content, stamp.signer))
    return manifest


class _Builder:
    def __init__(self, recipe: Recipe, root: Path, depot: Depot, render: Render | None) -> None:
        self._recipe = recipe
        self._root = root
        self._depot = depot
        self._render = render
        self._items: dict[str, tuple[Item, Descriptor]] = {}
        self._charts: list[tuple[Chart, dict[str, Any]]] = []

    def build(self, stamp: Stamp) -> Manifest:
        recipe = self._recipe
        for image in recipe.images:
            self._add_image(image)
        for chart in recipe.charts:
            self._add_chart(chart)
        for model in recipe.models:
            self._add_files(Kind.MODEL, model, files_below(self._root / model.directory))
        for kind, sets in ((Kind.WHEELS, recipe.wheels), (Kind.FILES, recipe.files)):
            for each in sets:
                self._add_files(kind, each, self._expand(each.files))
        chosen = sorted(self._items.items())
        entries = [
            entry.model_copy(update={"annotations": {REF_NAME: label}}) for label, (_, entry) in chosen
        ]
        self._depot.place(LAYOUT, LAYOUT_CONTENT, "application/vnd.oci.layout.header.v1+json")
        self._depot.place(INDEX, encode_index(entries), IMAGE_INDEX)
        manifest = Manifest(
            name=recipe.name,
            version=recipe.version,
            upgrade_from=recipe.upgrade_from,
            created=stamp.created,
            key_not_after=stamp.key_not_after,
            items=tuple(item for _, (item, _) in chosen),
            files=tuple(sorted(self._depot.files, key=lambda file: file.path)),
        )
        self._check_complete(manifest)
        return manifest

    def _check_complete(self, manifest: Manifest) -> None:
        variables = compose_environment(manifest)
        for path in self._recipe.rendered:
            check_complete(manifest, images_in(_text(self._root / path), str(path), variables))
        for chart, about in self._charts:
            if self._render is not None and chart.values:
                values = tuple(self._root / each for each in chart.values)
                text = self._render(self._root / chart.file, values, emit(manifest, Form.HELM))
                check_complete(manifest, images_in(text, f"{chart.file}, rendered,"))
            else:
                check_listed(manifest, annotated_images(about, str(chart.file)), chart.unused)

    def _add_image(self, image: Image) -> None:
        with open_archive(self._root / image.archive) as archive:
            entry, image_id = import_image(archive, image.reference, self._depot)
        name, _, tag = image.reference.rpartition(":")
        self._add(Kind.IMAGE, name, tag, image, entry, reference=image.reference, image_id=image_id)

    def _add_chart(self, chart: Chart) -> None:
        entry, about = add_chart(self._root / chart.file, self._depot)
        self._charts.append((chart, about))
        self._add(Kind.CHART, str(about["name"]), str(about["version"]), chart, entry)

    def _add_files(self, kind: Kind, thing: Model | Files, files: Iterable[tuple[str, Path]]) -> None:
        self._add(kind, thing.name, thing.version, thing, add_files(kind, files, self._depot))

    def _add(
        self,
        kind: Kind,
        name: str,
        version: str,
        thing: Thing,
        entry: Descriptor,
        **more: Any,  # noqa: ANN401 - fields of Item
    ) -> None:
        sbom = None if thing.sbom is None else self._add_sbom(f"{kind}/{name}", version, thing, thing.sbom)
        self._note(kind, name, version, thing, entry, sbom=sbom, **more)

    def _add_sbom(self, name: str, version: str, thing: Thing, path: Path) -> str:
        file = self._root / path
        entry = add_files(Kind.SBOM, [(path.name, file)], self._depot)
        self._note(Kind.SBOM, name, version, thing, entry)
        return self._depot.add_file(file, "application/json").digest

    def _note(
        self,
        kind: Kind,
        name: str,
        version: str,
        thing: Thing,
        entry: Descriptor,
        **more: Any,  # noqa: ANN401 - fields of Item
    ) -> None:
        try:
            item = Item(
                kind=kind,
                # A registry's port is no part of a path.
                name=name.replace(":", "/"),
                version=version,
                digest=entry.digest,
                licence=thing.licence,
                origin=thing.origin,
                **more,
            )
        except ValidationError as error:
            raise ConfigurationError(f"{kind} {name} cannot be listed: {error.errors()[0]['msg']}") from error
        if item.label in self._items:
            raise ConfigurationError(f"the recipe names {item.label} twice")
        self._check_only_version(item)
        self._items[item.label] = (item, entry)

    def _check_only_version(self, item: Item) -> None:
        """Refuse a second version of what is loaded to a place that has the name and not the version."""
        if item.kind not in ONE_VERSION:
            return
        for other, _ in self._items.values():
            if (other.kind, other.name) == (item.kind, item.name):
                raise ConfigurationError(
                    f"the recipe has two versions of {item.kind}/{item.name}, {other.version} and "
                    f"{item.version}, and a site can use one of them: leave one out, or name them differently"
                )

    def _expand(self, paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
        for path in paths:
            if (self._root / path).is_dir():
                yield from files_below(self._root / path)
            else:
                yield path.name, self._root / path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
