"""
Descriptions of a bundle for other tools: Helm values, a compose environment, oc-mirror, Zarf.

Pure, and derived from the manifest alone, so it names exactly what the bundle contains.  Sources: oc-mirror
v2's ImageSetConfiguration (`mirror.openshift.io/v2alpha1`), Zarf's package schema (docs.zarf.dev).
"""

from collections.abc import Callable
from enum import StrEnum

import yaml

from appliance.sovereignty.bundle.manifest import BundleManifest, Item, ItemKind
from appliance.sovereignty.bundle.references import chart_path, repository_of


class Form(StrEnum):
    IMAGES = "images"
    OC_MIRROR = "oc-mirror"
    ZARF = "zarf"
    HELM = "helm"
    COMPOSE = "compose"


CHART_IMAGES = {
    "gateway": "gateway",
    "worker-gpu": "workerGpu",
    "worker-cpu": "workerCpu",
    "postgres": "postgres",
}
"""The chart's images: last part of the repository, and key below `images` in the values."""


def emit(manifest: BundleManifest, form: Form) -> str:
    return _FORMS[form](manifest)


def _image_list(manifest: BundleManifest) -> str:
    return "".join(f"{_pinned(item)}\n" for item in manifest.of_kind(ItemKind.IMAGE))


def _oc_mirror(manifest: BundleManifest) -> str:
    mirror: dict[str, object] = {
        "additionalImages": [{"name": _pinned(item)} for item in manifest.of_kind(ItemKind.IMAGE)]
    }
    charts = [{"name": item.name, "path": chart_path(item)} for item in manifest.of_kind(ItemKind.CHART)]
    if charts:
        mirror["helm"] = {"local": charts}
    return _yaml(
        {"apiVersion": "mirror.openshift.io/v2alpha1", "kind": "ImageSetConfiguration", "mirror": mirror}
    )


def _zarf(manifest: BundleManifest) -> str:
    component: dict[str, object] = {
        "name": manifest.name.replace("/", "-").lower(),
        "required": True,
        "images": [_pinned(item) for item in manifest.of_kind(ItemKind.IMAGE)],
    }
    charts = [
        {
            "name": item.name,
            "version": item.version,
            "namespace": "sovereign-appliance",
            "localPath": chart_path(item),
        }
        for item in manifest.of_kind(ItemKind.CHART)
    ]
    if charts:
        component["charts"] = charts
    metadata = {"name": component["name"], "version": manifest.version}
    return _yaml({"kind": "ZarfPackageConfig", "metadata": metadata, "components": [component]})


def _helm(manifest: BundleManifest) -> str:
    images = {
        CHART_IMAGES[_short(item)]: {"repository": repository_of(item)[0], "digest": item.digest}
        for item in manifest.of_kind(ItemKind.IMAGE)
        if _short(item) in CHART_IMAGES
    }
    return _yaml({"images": images})


def _compose(manifest: BundleManifest) -> str:
    return "".join(f"{name}={value}\n" for name, value in compose_environment(manifest).items())


def compose_environment(manifest: BundleManifest) -> dict[str, str]:
    """The variables with the images of compose.yaml, by their ids in an engine."""
    return {
        f"{_short(item).upper().replace('-', '_')}_IMAGE": item.image_id
        for item in manifest.of_kind(ItemKind.IMAGE)
        if item.image_id is not None
    }


_FORMS: dict[Form, Callable[[BundleManifest], str]] = {
    Form.IMAGES: _image_list,
    Form.OC_MIRROR: _oc_mirror,
    Form.ZARF: _zarf,
    Form.HELM: _helm,
    Form.COMPOSE: _compose,
}


def _pinned(item: Item) -> str:
    """An image by its digest alone: other tools refuse a tag next to it."""
    repository = (item.reference or item.name).rpartition(":")[0]
    return f"{repository}@{item.digest}"


def _short(item: Item) -> str:
    return item.name.rpartition("/")[2]


def _yaml(document: dict[str, object]) -> str:
    return yaml.safe_dump(document, sort_keys=False)
