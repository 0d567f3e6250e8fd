"""The recipe of a bundle: YAML with its contents, their origin and licence; paths are relative to it."""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import ConfigurationError
from appliance.infra.plain_words import what_is_expected
from appliance.sovereignty.bundle.manifest import Name, Reference, Text, Version


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecipeEntry(_Part):
    licence: Text
    """SPDX expression."""
    origin: Text
    """Where it was obtained: a URL, or text."""
    sbom: Path | None = None
    """Software bill of materials (CycloneDX or SPDX JSON)."""


class RecipeImage(RecipeEntry):
    archive: Path
    """Output of `docker save`, an OCI archive, or an OCI directory."""
    reference: Reference


class RecipeChart(RecipeEntry):
    file: Path
    """Output of `helm package`."""
    values: tuple[Path, ...] = ()
    """Values to render it with, if helm is available, to find the images it names."""
    unused: tuple[str, ...] = ()
    """Images that the chart lists and the site never uses; used only if it is not rendered."""


class RecipeModel(RecipeEntry):
    name: Name
    version: Text
    """Revision of the weights."""
    directory: Path


class RecipeFiles(RecipeEntry):
    name: Name
    version: Text
    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files, and directories, which are taken whole."""


class BundleRecipe(_Part):
    name: Name
    version: Version
    upgrade_from: Version
    """Oldest version that this one can follow."""
    images: tuple[RecipeImage, ...] = ()
    charts: tuple[RecipeChart, ...] = ()
    models: tuple[RecipeModel, ...] = ()
    wheels: tuple[RecipeFiles, ...] = ()
    files: tuple[RecipeFiles, ...] = ()
    rendered: tuple[Path, ...] = ()
    """YAML whose images must all be in the bundle by digest: a rendered chart, a compose file."""


def load_recipe(path: Path) -> BundleRecipe:
    """Read a recipe; raises ConfigurationError if it cannot be read or is invalid."""
    try:
        return BundleRecipe.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read the recipe {path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"]) or "top level"
        raise ConfigurationError(f"the recipe {path}, {place}: {what_is_expected(first)}") from error
