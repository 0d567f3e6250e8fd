"""
Build a bundle from a recipe, a difference from two bundles, and a whole bundle from a difference.

The output depends only on the recipe, the files it names, the given time and the key: two builds of the
same input are identical to the byte.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appliance.audit.checkpoint import NoteSigner
from appliance.errors import BundleRefusedError, ConfigurationError
from appliance.infra.plain_words import what_is_expected
from appliance.sovereignty.bundle.artefacts import BlobStore, add_chart, add_files, files_below
from appliance.sovereignty.bundle.bundle_verifier import Bundle, open_bundle
from appliance.sovereignty.bundle.copying import copy_verified, making, write_durably
from appliance.sovereignty.bundle.emit import Form, compose_environment, emit
from appliance.sovereignty.bundle.images import import_image, open_archive
from appliance.sovereignty.bundle.manifest import (
    BASE,
    BLOBS,
    INDEX,
    LAYOUT,
    LAYOUT_CONTENT,
    MANIFEST,
    SIGNATURE,
    BundleFile,
    BundleManifest,
    Item,
    ItemKind,
    make_base,
)
from appliance.sovereignty.bundle.oci import IMAGE_INDEX, REF_NAME, Descriptor, encode_index
from appliance.sovereignty.bundle.recipe import (
    BundleRecipe,
    RecipeChart,
    RecipeEntry,
    RecipeFiles,
    RecipeImage,
    RecipeModel,
)
from appliance.sovereignty.bundle.references import annotated_images, check_complete, check_listed, images_in
from appliance.sovereignty.bundle.signature import BUNDLE
from appliance.sovereignty.bundle.source import ByteCount, byte_counter, ignore_bytes

ONE_VERSION = frozenset({ItemKind.MODEL, ItemKind.WHEELS, ItemKind.FILES})
"""Kinds whose directory in an installation has the item's name and not its version."""
Render = Callable[[Path, tuple[Path, ...], str], str]
"""Renders a packaged chart with values files, and with values as text on top; returns YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Inputs of a build besides the recipe."""

    created: int
    """Seconds since the epoch: SOURCE_DATE_EPOCH."""
    key_not_after: int
    """End of the key, in seconds since the epoch."""
    signer: NoteSigner


def build_bundle(
    recipe: BundleRecipe,
    root: Path,
    directory: Path,
    stamp: Stamp,
    render: Render | None,
    count: ByteCount = ignore_bytes,
) -> BundleManifest:
    """
    Build a bundle in a new directory; the recipe's paths start at `root`.

    `render` is None without helm: the charts' own lists of images count then.  Raises ConfigurationError for
    an unusable input, BundleIncompleteError for an image that is named and absent, and BundleStorageError.
    """
    with making(directory) as place:
        store = BlobStore(place, byte_counter(count, _input_bytes(recipe, root)))
        manifest = _Builder(recipe, root, store, render).build(stamp)
        content = manifest.encode()
        write_durably(place / MANIFEST, content)
        write_durably(place / SIGNATURE, BUNDLE.sign(content, stamp.signer))
    return manifest


def _input_bytes(recipe: BundleRecipe, root: Path) -> int:
    """Size of all that a recipe names; what is missing is reported when it is read."""
    entries = (*recipe.images, *recipe.charts, *recipe.models, *recipe.wheels, *recipe.files)
    paths = [
        *(image.archive for image in recipe.images),
        *(chart.file for chart in recipe.charts),
        *(model.directory for model in recipe.models),
        *(path for files in (*recipe.wheels, *recipe.files) for path in files.files),
        *(entry.sbom for entry in entries if entry.sbom is not None),
    ]
    found = (root / path for path in paths)
    files = (each for path in found for each in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.stat().st_size for file in files if file.is_file())


class _Builder:
    def __init__(self, recipe: BundleRecipe, root: Path, store: BlobStore, render: Render | None) -> None:
        self._recipe = recipe
        self._root = root
        self._store = store
        self._render = render
        self._items: dict[str, tuple[Item, Descriptor]] = {}
        self._charts: list[tuple[RecipeChart, dict[str, Any]]] = []

    def build(self, stamp: Stamp) -> BundleManifest:
        recipe = self._recipe
        for image in recipe.images:
            self._add_image(image)
        for chart in recipe.charts:
            self._add_chart(chart)
        for model in recipe.models:
            self._add_files(ItemKind.MODEL, model, files_below(self._root / model.directory))
        for kind, sets in ((ItemKind.WHEELS, recipe.wheels), (ItemKind.FILES, recipe.files)):
            for each in sets:
                self._add_files(kind, each, self._expand(each.files))
        chosen = sorted(self._items.items())
        entries = [
            entry.model_copy(update={"annotations": {REF_NAME: label}}) for label, (_, entry) in chosen
        ]
        self._store.place(LAYOUT, LAYOUT_CONTENT, "application/vnd.oci.layout.header.v1+json")
        self._store.place(INDEX, encode_index(entries), IMAGE_INDEX)
        manifest = BundleManifest(
            name=recipe.name,
            version=recipe.version,
            upgrade_from=recipe.upgrade_from,
            created=stamp.created,
            key_not_after=stamp.key_not_after,
            items=tuple(item for _, (item, _) in chosen),
            files=tuple(sorted(self._store.files, key=lambda file: file.path)),
        )
        self._check_complete(manifest)
        return manifest

    def _check_complete(self, manifest: BundleManifest) -> None:
        variables = compose_environment(manifest)
        for path in self._recipe.rendered:
            try:
                text = (self._root / path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"cannot read {self._root / path}: {error}") from error
            check_complete(manifest, images_in(text, str(path), variables))
        for chart, about in self._charts:
            if self._render is not None and chart.values:
                values = tuple(self._root / each for each in chart.values)
                text = self._render(self._root / chart.file, values, emit(manifest, Form.HELM))
                check_complete(manifest, images_in(text, f"{chart.file}, rendered,"))
            else:
                check_listed(manifest, annotated_images(about, str(chart.file)), chart.unused)

    def _add_image(self, image: RecipeImage) -> None:
        with open_archive(self._root / image.archive) as archive:
            entry, image_id = import_image(archive, image.reference, self._store)
        name, _, tag = image.reference.rpartition(":")
        self._add(ItemKind.IMAGE, name, tag, image, entry, reference=image.reference, image_id=image_id)

    def _add_chart(self, chart: RecipeChart) -> None:
        entry, about = add_chart(self._root / chart.file, self._store)
        self._charts.append((chart, about))
        self._add(ItemKind.CHART, str(about["name"]), str(about["version"]), chart, entry)

    def _add_files(
        self, kind: ItemKind, thing: RecipeModel | RecipeFiles, files: Iterable[tuple[str, Path]]
    ) -> None:
        self._add(kind, thing.name, thing.version, thing, add_files(kind, files, self._store))

    def _add(
        self,
        kind: ItemKind,
        name: str,
        version: str,
        thing: RecipeEntry,
        entry: Descriptor,
        **more: Any,  # noqa: ANN401 - fields of Item
    ) -> None:
        if thing.sbom is not None and kind is not ItemKind.SBOM:
            file = self._root / thing.sbom
            described = add_files(ItemKind.SBOM, [(file.name, file)], self._store)
            self._add(ItemKind.SBOM, f"{kind}/{name}", version, thing, described)
            more["sbom"] = self._store.add_file(file, "application/json").digest
        try:
            item = Item(
                kind=kind,
                # A registry's port cannot be part of a path.
                name=name.replace(":", "/"),
                version=version,
                digest=entry.digest,
                licence=thing.licence,
                origin=thing.origin,
                **more,
            )
        except ValidationError as error:
            raise ConfigurationError(
                f"{kind} {name} is invalid: {what_is_expected(error.errors()[0])}"
            ) from error
        if item.label in self._items:
            raise ConfigurationError(f"the recipe names {item.label} twice")
        for other, _ in self._items.values():
            if item.kind in ONE_VERSION and (other.kind, other.name) == (item.kind, item.name):
                raise ConfigurationError(
                    f"the recipe has two versions of {item.kind}/{item.name}, {other.version} and "
                    f"{item.version}, and a site can use only one: remove one, or rename it"
                )
        self._items[item.label] = (item, entry)

    def _expand(self, paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
        for path in paths:
            if (self._root / path).is_dir():
                yield from files_below(self._root / path)
            else:
                yield path.name, self._root / path


def make_difference(older: Bundle, newer: Bundle, directory: Path, count: ByteCount = ignore_bytes) -> Bundle:
    """Write the newer bundle without the blobs of the older; raises BundleRefusedError if unrelated."""
    for bundle in (older, newer):
        if bundle.base is not None:
            raise BundleRefusedError(
                f"{bundle.manifest.name} {bundle.manifest.version} is a difference: join it first"
            )
    base = make_base(older.manifest, newer.manifest)
    omitted = set(base.omitted)
    present = [file for file in newer.manifest.files if f"sha256:{file.sha256}" not in omitted]
    _write(newer, present, directory, {BASE: base.encode()}, count)
    return open_bundle(directory, trusted=None, now=0)


def join_difference(bundle: Bundle, directory: Path, count: ByteCount = ignore_bytes) -> None:
    """Write a whole bundle from a difference and its base; raises as `make_difference` does."""
    _write(bundle, bundle.manifest.files, directory, {}, count)


def _write(
    bundle: Bundle, files: Sequence[BundleFile], directory: Path, more: dict[str, bytes], count: ByteCount
) -> None:
    counted = byte_counter(count, sum(file.size for file in files))
    with making(directory) as place:
        (place / BLOBS).mkdir(parents=True)
        for file in files:
            copy_verified(counted(bundle.chunks(file)), file, place / file.path)
        head = {MANIFEST: bundle.head.manifest, SIGNATURE: bundle.head.signature, **more}
        for name, content in head.items():
            write_durably(place / name, content)
