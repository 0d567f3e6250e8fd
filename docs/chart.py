"""
The Helm chart's values as a JSON Schema, a reference page and the chart's README, from the chart's own files.

    values.yaml ─────────► types, defaults, meanings (the comment above each value)
    values.schema.yaml ──► constraints by path
    Settings ────────────► the sections of appliance.yaml that values may hold

Helm checks values against the schema before it renders anything.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from appliance.infra.settings import Settings, WorkerSettings
from docs.docstrings import described_schema

CHART = Path(__file__).parent.parent / "deploy" / "helm"
DECIDED_BY_THE_CHART: Mapping[str, frozenset[str]] = {
    "api": frozenset({"host", "port", "admin_host", "admin_port", "drain_seconds", "stop_delay_seconds"}),
    "tls": frozenset(
        {
            "certificate_file",
            "key_file",
            "key_password_file",
            "client_ca_file",
            "command_certificate_file",
            "command_key_file",
        }
    ),
    "oidc": frozenset({"jwks_file"}),
    "pool": frozenset({"urls", "discover"}),
    "batch": frozenset({"directory"}),
    "drafts": frozenset({"directory", "trusted_keys_file", "signing_key_file"}),
    "audit": frozenset(
        {
            "database_url",
            "signing_key_file",
            "gateway",
            "spool_directory",
            "payload_keys_directory",
            "payload_master_key_file",
        }
    ),
}
"""Fields of a gateway's settings that follow from other values, by section."""
NOT_OF_A_GATEWAY = frozenset({"data", "tenants", "worker", "picker"})
OF_A_WORKER_BY_THE_CHART = frozenset(
    {
        *("model", "draft", "served_name", "task", "method", "draft_tokens", "bad_draft", "device"),
        *("tensor_parallel_size", "pipeline_parallel_size", "host", "port", "control_port"),
        *("max_startup_seconds", "drain_seconds"),
    }
)
NOTE = "Written by `python -m docs.generate`; edit the comments in deploy/helm/values.yaml instead."
NAME = {
    "type": "string",
    "minLength": 1,
    "pattern": r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$",
    "description": "Name that clients use in `model`.",
}
GROUP = object()
KEY = re.compile(r"^( *)([A-Za-z][\w.-]*):")
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}

Schema = dict[str, Any]


def packaged_files() -> dict[str, Path]:
    """Files of the chart that are copies: path in the chart, and the original."""
    deploy = CHART.parent
    files = {"files/offline.env": deploy / "offline.env"}
    for folder, pattern in (("rules", "*.yaml"), ("dashboards", "*.json")):
        for source in sorted((deploy / "monitoring" / folder).glob(pattern)):
            files[f"files/{folder}/{source.name}"] = source
    return files


def values_schema() -> str:
    """`values.schema.json`: JSON Schema (draft 7) of the chart's values."""
    constraints = _load("values.schema.yaml")
    definitions = constraints.pop("definitions")
    values = _load("values.yaml")
    anywhere = constraints.pop("anywhere")
    for path, _ in leaves(values):
        if (name := path.rpartition(".")[2]) in anywhere:
            constraints.setdefault(path, anywhere[name])
    root = _schema_of(values, "", constraints, comments())
    model = json.loads(json.dumps(root["properties"]["modelDefaults"]))
    model["properties"] = {"name": NAME, **model["properties"]}
    model["required"] = ["name"]
    model["description"] = "A model; missing values are taken from `modelDefaults`."
    models = root["properties"]["models"]
    models["type"] = ["array", "object"]
    models["items"] = model
    models["additionalProperties"] = {**model, "required": []}
    root["definitions"] = {
        **definitions,
        "gatewaySettings": _gateway_settings(),
        "workerSettings": _section(WorkerSettings, OF_A_WORKER_BY_THE_CHART),
    }
    root = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart", **root}
    return json.dumps(_closed(root), indent=1) + "\n"


def values_page() -> str:
    """The reference page of the chart's values."""
    lines = ["# Values of the Helm chart", "", f"<!-- {NOTE} -->", ""]
    lines += [
        "Unknown values are refused, and so are contradictions. Examples are in `deploy/helm/examples`;",
        "[how to install](../how-to/install-with-helm.md).",
    ]
    return "\n".join([*lines, *_tables()]) + "\n"


def chart_readme() -> str:
    """`README.md` of the chart, which package indexes show; its links work without the repository."""
    chart = _load("Chart.yaml")
    images = [each["image"] for each in yaml.safe_load(chart["annotations"]["artifacthub.io/images"])]
    examples = sorted(path.name for path in (CHART / "examples").glob("*.yaml"))
    lines = [
        f"# {chart['name']}",
        "",
        f"<!-- {NOTE} -->",
        "",
        chart["description"],
        "",
        f"It needs Kubernetes `{chart['kubeVersion']}`, a network plugin that enforces NetworkPolicies,",
        f"and, in a registry that the nodes reach, the images that it uses of {_code(images)}.",
        "",
        "To try it on a test cluster, with the demo model on a CPU; Helm then prints how to ask it:",
        "",
        "```sh",
        f"helm install appliance {chart['name']}-{chart['version']}.tgz --set profile=evaluation",
        "```",
        "",
        "Otherwise images need digests, you make the Secrets, and the chart refuses contradictions in the",
        f"values with what to do. Examples in `examples/`: {_code(examples)}.",
    ]
    return "\n".join([*lines, *_tables()]) + "\n"


def _code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _tables() -> list[str]:
    """All values, one table for each section."""
    values, meanings = _load("values.yaml"), comments()
    lines = ["", "## General", "", *_table(values, meanings, "")]
    for name, value in values.items():
        if isinstance(value, dict) and value:
            lines += ["", f"## `{name}`", "", meanings[name], "", *_table(value, meanings, f"{name}.")]
    return lines


def comments() -> dict[str, str]:
    """The comment above each value of values.yaml, by its path; lines of a paragraph are joined."""
    found: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    note: list[str] = []
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("#"):
            note.append(line.strip("# "))
            continue
        if key := KEY.match(line):
            depth = len(key[1])
            stack = [(at, name) for at, name in stack if at < depth]
            stack.append((depth, key[2]))
            if note:
                found[".".join(name for _, name in stack)] = " ".join(note)
        note = []
    return found


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its path; `GROUP` for one that is only there to hold others, which then follow."""
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in {"resources", "podLabels"}:
            yield f"{prefix}{name}", GROUP
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _table(values: Mapping[str, Any], meanings: Mapping[str, str], prefix: str) -> list[str]:
    lines = ["| Value | Default | Meaning |", "|---|---|---|"]
    chosen = (
        leaves(values, prefix)
        if prefix
        else ((name, value) for name, value in values.items() if not isinstance(value, dict) or not value)
    )
    for path, value in chosen:
        shown = "" if value is GROUP else f"`{json.dumps(value, ensure_ascii=False)}`"
        meaning = meanings[path].replace("|", "\\|")
        lines.append(f"| `{path}` | {shown} | {meaning} |")
    return lines


def _schema_of(
    value: Any,  # noqa: ANN401 - whatever YAML holds
    path: str,
    constraints: Mapping[str, Schema],
    meanings: Mapping[str, str],
) -> Schema:
    constraint = constraints.get(path, {})
    described: Schema = {"description": meanings[path]} if path in meanings else {}
    if "$ref" in constraint:
        return {**described, "allOf": [constraint]}
    schema: Schema = {**described, "type": TYPES[type(value)], **constraint}
    if isinstance(value, dict):
        children = {
            name: _schema_of(child, f"{path}.{name}" if path else name, constraints, meanings)
            for name, child in value.items()
        }
        schema["properties"] = children
    return schema


def _gateway_settings() -> Schema:
    sections = {
        name: _section(field.annotation, DECIDED_BY_THE_CHART.get(name, frozenset()))
        for name, field in Settings.model_fields.items()
        if name not in NOT_OF_A_GATEWAY
        and isinstance(field.annotation, type)
        and issubclass(field.annotation, BaseModel)
    }
    return {"type": "object", "properties": sections}


def _section(model: type[BaseModel], without: frozenset[str]) -> Schema:
    """A section of appliance.yaml as JSON Schema, with everything it refers to in place."""
    schema = described_schema(model, is_read=True)
    shared = schema.pop("$defs", {})
    schema["properties"] = {
        name: field for name, field in schema["properties"].items() if name not in without
    }
    schema["required"] = [name for name in schema.get("required", ()) if name not in without]
    inlined: Schema = _inlined(schema, shared)
    return inlined


def _inlined(node: Any, shared: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(node, list):
        return [_inlined(each, shared) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(shared[str(node["$ref"]).rpartition("/")[2]], shared)
    # Titles repeat the names, and defaults are the appliance's: a schema that names them says nothing more.
    return {name: _inlined(each, shared) for name, each in node.items() if name not in {"title", "default"}}


def _closed(node: Any) -> Any:  # noqa: ANN401 - JSON
    """The same schema, in which no object takes a key it does not know."""
    if isinstance(node, list):
        return [_closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {name: _closed(each) for name, each in node.items()}
    if isinstance(node.get("properties"), dict) and "type" in node:
        closed.setdefault("additionalProperties", False)
    return closed


def _load(name: str) -> dict[str, Any]:
    content = yaml.safe_load((CHART / name).read_text(encoding="utf-8"))
    assert isinstance(content, dict)  # noqa: S101 - files of ours
    return content
