"""
The recipe of a bundle: a YAML file that says what goes in, where it came from and under which licence.

Paths are relative to the recipe.
"""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import ConfigurationError
from appliance.sovereignty.bundle.manifest import Name, Reference, Text, Version


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Thing(_Part):
    """What is said of everything that goes in."""

    licence: Text
    """SPDX expression."""
    origin: Text
    """Where it was taken from: an address, or words."""
    sbom: Path | None = None
    """Software bill of materials (CycloneDX or SPDX JSON)."""


class Image(Thing):
    """A container image."""

    archive: Path
    """What `docker save` wrote, an OCI archive, or an OCI directory."""
    reference: Reference
    """Name and tag."""


class Chart(Thing):
    """A packaged Helm chart."""

    file: Path
    """What `helm package` wrote."""
    values: tuple[Path, ...] = ()
    """Values to render it with, where there is helm, to see which images it names."""
    unused: tuple[str, ...] = ()
    """Images it can ask for and the site never will; left out where it is not rendered."""


class Model(Thing):
    """A directory of weights."""

    name: Name
    version: Text
    """Revision of the weights."""
    directory: Path


class Files(Thing):
    """Wheels, or any other files."""

    name: Name
    version: Text
    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files, and directories whose files are all taken."""


class Recipe(_Part):
    """A bundle to be built."""

    name: Name
    version: Version
    upgrade_from: Version
    """Oldest version that this one can follow."""
    images: tuple[Image, ...] = ()
    charts: tuple[Chart, ...] = ()
    models: tuple[Model, ...] = ()
    wheels: tuple[Files, ...] = ()
    files: tuple[Files, ...] = ()
    rendered: tuple[Path, ...] = ()
    """YAML whose images must all be in the bundle by digest: a rendered chart, a compose file."""


def load_recipe(path: Path) -> Recipe:
    """
    Read a recipe.

    Raises:
        ConfigurationError: it cannot be read, or does not fit.
    """
    try:
        return Recipe.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read the recipe {path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"]) or "the whole"
        raise ConfigurationError(f"the recipe {path}, {place}: {first['msg']}") from error
