"""
Validation of objects by the schemas of Kubernetes, in the strict form without unknown fields.

Custom resources have no schema here but `custom_resources.yaml`, which we wrote: minimal, of the fields that
this chart uses, after the projects' documentation.  Pods inside them are held against Kubernetes' own schema.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate import utils
from kubernetes_validate.utils import SchemaNotFoundError, ValidationError, all_versions, major_minor

CUSTOM_AT = Path(__file__).with_name("custom_resources.yaml")
VERSIONS = tuple(dict.fromkeys(major_minor(version) for version in all_versions()))[-3:]
"""The three newest minor versions of Kubernetes whose schemas are at hand."""
BOUNDS = (VERSIONS[0], VERSIONS[-1])
"""The oldest and the newest of them."""
# It reads megabytes of definitions for each object.
utils.schema_contents = cache(utils.schema_contents)


def faults(thing: dict[str, Any], version: str) -> list[str]:
    """Schema errors of an object in Kubernetes `version`, such as `1.37`."""
    return list(_faults(json.dumps(thing), version))


@cache
def _faults(text: str, version: str) -> tuple[str, ...]:
    """The same of an object as JSON: many charts have the same objects."""
    thing = json.loads(text)
    custom = _custom().get(f"{thing['apiVersion']}/{thing['kind']}")
    named = f"{thing['kind']}/{thing['metadata']['name']}"
    try:
        if custom is None:
            utils.validate(thing, version, strict=True)
            return ()
        jsonschema.validate(thing, custom)
    except SchemaNotFoundError:
        return (f"{named}: Kubernetes {version} has no {thing['kind']} in {thing['apiVersion']}",)
    except (ValidationError, jsonschema.ValidationError) as error:
        return (f"{named}: {'.'.join(map(str, error.absolute_path))}: {error.message[:300]}",)
    return tuple(fault for template in _pod_templates(thing) for fault in faults(template, version))


@cache
def _custom() -> dict[str, Any]:
    return yaml.safe_load(CUSTOM_AT.read_text(encoding="utf-8"))


def _pod_templates(thing: dict[str, Any]) -> list[dict[str, Any]]:
    parts = thing["spec"].get("leaderWorkerTemplate", {})
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": f"{thing['metadata']['name']}.{name}"},
            "template": part,
        }
        for name, part in parts.items()
        if name in {"leaderTemplate", "workerTemplate"}
    ]
