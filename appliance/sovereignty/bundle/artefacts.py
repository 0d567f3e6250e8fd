"""
What is no image as an OCI artefact: charts as Helm keeps them in registries, everything else as files.

A model's weights are one blob a file, so that the difference to a version with one changed file is
that file.
"""

import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from appliance.errors import ConfigurationError
from appliance.infra.canonical_json import canonical
from appliance.sovereignty.bundle.depot import Depot
from appliance.sovereignty.bundle.manifest import Kind
from appliance.sovereignty.bundle.oci import (
    ARTEFACT,
    EMPTY,
    EMPTY_CONTENT,
    HELM_CHART,
    HELM_CONFIG,
    IMAGE_MANIFEST,
    TITLE,
    Descriptor,
    encode_manifest,
)

MEDIA_TYPES = {
    ".json": "application/json",
    ".safetensors": "application/vnd.safetensors",
    ".whl": "application/zip",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
}
OTHER = "application/octet-stream"
MAX_CHART_YAML_BYTES = 2**20


def add_files(kind: Kind, files: Iterable[tuple[str, Path]], depot: Depot) -> Descriptor:
    """
    Add files as one artefact.

    Args:
        kind: what they are.
        files: the path each is loaded to, and the file.
        depot: where they go.

    Raises:
        ConfigurationError: a file cannot be read, there is none, or two have one path.
    """
    layers: dict[str, Descriptor] = {}
    for title, path in sorted(files):
        if title in layers:
            raise ConfigurationError(f"two files would be loaded to {title}: rename {path}")
        entry = depot.add_file(path, MEDIA_TYPES.get(path.suffix, OTHER))
        layers[title] = entry.model_copy(update={"annotations": {TITLE: title}})
    if not layers:
        raise ConfigurationError(f"a {kind} without a single file: check the recipe")
    config = depot.add(EMPTY_CONTENT, EMPTY)
    manifest = encode_manifest(config, list(layers.values()), artefact=ARTEFACT.format(kind=kind))
    return depot.add(manifest, IMAGE_MANIFEST)


def add_chart(path: Path, depot: Depot) -> tuple[Descriptor, dict[str, Any]]:
    """
    Add a packaged chart as `helm push` would, and return its Chart.yaml, too.

    Raises:
        ConfigurationError: it is no packaged chart.
    """
    about = read_chart_yaml(path)
    layer = depot.add_file(path, HELM_CHART)
    titled = layer.model_copy(update={"annotations": {TITLE: f"{about['name']}-{about['version']}.tgz"}})
    config = depot.add(canonical(json.loads(json.dumps(about, default=str))), HELM_CONFIG)
    return depot.add(encode_manifest(config, [titled]), IMAGE_MANIFEST), about


def read_chart_yaml(path: Path) -> dict[str, Any]:
    """
    Read Chart.yaml of a packaged chart.

    Raises:
        ConfigurationError: there is none, or it has no name and version.
    """
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                if PurePosixPath(member.name).match("*/Chart.yaml") and member.name.count("/") == 1:
                    file = tar.extractfile(member)
                    about = yaml.safe_load(file.read(MAX_CHART_YAML_BYTES)) if file is not None else None
                    if isinstance(about, dict) and {"name", "version"} <= about.keys():
                        return about
    except (OSError, tarfile.TarError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is no packaged chart: {reason}") from error
    raise ConfigurationError(f"{path} is no packaged chart: it has no Chart.yaml with name and version")


def files_below(directory: Path) -> Iterator[tuple[str, Path]]:
    """
    Yield the files of a directory with their paths in it; what begins with a dot is left out.

    Raises:
        ConfigurationError: it is no directory.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is no directory")
    for path in sorted(directory.rglob("*")):
        inner = path.relative_to(directory)
        # Download tools leave caches with times in them, which would make two builds differ.
        if path.is_file() and not any(step.startswith(".") for step in inner.parts):
            yield inner.as_posix(), path
