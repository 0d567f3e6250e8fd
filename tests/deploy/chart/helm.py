"""
Helm 3, run on a chart: what it renders, as objects.
"""

import pickle
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm"
HELM = ROOT / ".deploy" / "helm" / "helm"
"""Helm 3.6, the oldest that the chart promises to render with."""
LATER_HELM = HELM.with_name("helm-3.10")
RELEASE = "appliance"
NAMESPACE = "clinic"
SECONDS = 60

Values = dict[str, Any]


class RefusedError(Exception):
    """Helm refused to render; the text is its error."""


class _Loader(yaml.CSafeLoader):
    """YAML without duplicate keys: most parsers silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Rendered:
    """Result of one `helm template`."""

    objects: list[dict[str, Any]]
    source: dict[tuple[str, str], str]
    """The template below `templates/` that made an object, by kind and name."""

    def kind(self, kind: str) -> dict[str, dict[str, Any]]:
        """All objects of `kind` by name."""
        return {o["metadata"]["name"]: o for o in self.objects if o["kind"] == kind}

    def one(self, kind: str, part: str = "") -> dict[str, Any]:
        """The only object of `kind` whose name has `part` in it."""
        found = [o for name, o in self.kind(kind).items() if part in name]
        assert len(found) == 1, (
            f"{kind} with {part!r}: {[o['metadata']['name'] for o in found]} of {self.names()}"
        )
        return found[0]

    def names(self) -> list[str]:
        """Kind and name of everything."""
        return sorted(f"{o['kind']}/{o['metadata']['name']}" for o in self.objects)


def render(
    values: Values | None = None,
    *,
    files: Iterable[Path] = (),
    kube_version: str = "1.35",
    api_versions: Iterable[str] = (),
    chart: Path = CHART,
    binary: Path = HELM,
    again: bool = False,
) -> Rendered:
    """
    Render `chart` with `values` over `files` over its own.

    Helm runs once for the same input, unless `again` is set; each caller gets its own objects.

    Raises:
        RefusedError: Helm refuses.
    """
    arguments = ["template", RELEASE, str(chart), "--namespace", NAMESPACE, "--kube-version", kube_version]
    for version in api_versions:
        arguments += ["--api-versions", version]
    run = _rendered.__wrapped__ if again or chart != CHART else _rendered
    outcome = pickle.loads(run(*_input(arguments, files, values), binary))
    if isinstance(outcome, RefusedError):
        raise outcome
    return outcome


def lint(values: Values | None = None, *, files: Iterable[Path] = (), chart: Path = CHART) -> str:
    """`helm lint --strict`; raises `RefusedError` with its findings."""
    return _helm(*_input(["lint", str(chart), "--strict", "--namespace", NAMESPACE], files, values), HELM)


def _input(arguments: list[str], files: Iterable[Path], values: Values | None) -> tuple[tuple[str, ...], str]:
    """All arguments, and what Helm reads from stdin."""
    for path in files:
        arguments += ["--values", str(path)]
    return (*arguments, "--values", "-"), yaml.safe_dump(values or {})


@cache
def _rendered(arguments: tuple[str, ...], values: str, binary: Path) -> bytes:
    """A `Rendered` or a `RefusedError`, pickled."""
    objects, source = [], {}
    try:
        for path, document in _documents(_helm(arguments, values, binary)):
            loaded = yaml.load(document, _Loader)
            if loaded is not None:
                objects.append(loaded)
                source[loaded["kind"], loaded["metadata"]["name"]] = path.partition("/templates/")[2]
    except RefusedError as refused:
        return pickle.dumps(refused)
    return pickle.dumps(Rendered(objects, source))


def _helm(arguments: tuple[str, ...], values: str, binary: Path) -> str:
    run = subprocess.run(
        [binary, *arguments],
        input=values,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if run.returncode:
        raise RefusedError(run.stderr + run.stdout)
    return run.stdout


def _documents(text: str) -> Iterator[tuple[str, str]]:
    """Each document with the path that Helm says it came from."""
    for document in text.split("\n---\n"):
        first, _, rest = document.removeprefix("---\n").partition("\n")
        assert first.startswith("# Source: "), first
        yield first.removeprefix("# Source: "), rest
