"""
Write the reference pages from the code they describe: `python -m docs.generate`.

tests/test_docs.py fails when a page on disk differs from what this makes.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sqlalchemy import create_engine
from typer.main import get_command

from appliance import errors
from appliance.app.http_app import ADMIN_ROUTERS, API_ROUTERS
from appliance.app.worker_process import PLUGIN
from appliance.audit import verify
from appliance.cli import cli
from appliance.cli.preflight.summary_screen import PreflightReport
from appliance.drafts.lint.rules import Rule
from appliance.gateway.cost.report import CostReport
from appliance.infra import schema
from appliance.infra.metrics import Metrics
from appliance.infra.metrics.picker import PickerMetrics
from appliance.infra.settings import CONFIG_VARIABLE, DEFAULT_CONFIG, PREFIX, Settings
from docs.audit_format import audit_format_page, json_schema_page
from docs.chart import chart_readme, packaged_files, values_page, values_schema
from docs.docstrings import described_schema
from docs.offline_env import grafana_file, worker_file
from docs.openapi import openapi_document
from docs.promises import promises_page
from tests.attacks.page import page as attacks_page
from tests.clients.page import page as clients_page
from tests.matrix.page import page as versions_page

PAGES_AT = Path(__file__).parent / "reference"
LINT_FACTS = Path(__file__).parent / "draft_lint.yaml"
TYPES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "`true` \\| `false`",
    "null": "null",
}
BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minLength": "of length ≥",
    "maxLength": "of length ≤",
}
NOTE = "<!-- Written by `python -m docs.generate`; edit the code it describes instead. -->\n"


def settings_page() -> str:
    """Every setting with type, default and meaning."""
    lines = [
        "# Settings",
        "",
        NOTE,
        f"One YAML file, overruled by `{PREFIX}<SECTION>__<FIELD>` variables, overruled by the command line.",
        f"The file is that of `--config`, else of `{CONFIG_VARIABLE}`, else `{DEFAULT_CONFIG}` if it exists.",
        "An unknown section, field or variable is an error. `appliance config` reports every problem at",
        "once, or prints the values in force.",
    ]
    for section, field in Settings.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)  # noqa: S101
        assert issubclass(model, BaseModel)  # noqa: S101
        lines += ["", f"## `{section}`", "", inspect.cleandoc(model.__doc__ or ""), ""]
        lines += ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
        schemas = described_schema(model, is_read=True)["properties"]
        for name, entry in model.model_fields.items():
            default = "demo pair" if name in {"model", "draft"} else _shown(entry.default)
            meaning = " ".join(schemas[name]["description"].split())
            lines.append(f"| `{name}` | {_type_name(schemas[name])} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric with type, labels and meaning."""
    lines = [
        "# Metrics",
        "",
        NOTE,
        "`GET /metrics` of the admin listener, in Prometheus text format. Labels come from closed sets.",
        "",
        *_metric_rows(Metrics(CollectorRegistry())),
        "",
        "## Endpoint picker",
        "",
        "`GET /metrics` of `picker.metrics_port`.",
        "",
        *_metric_rows(PickerMetrics(CollectorRegistry())),
    ]
    return "\n".join(lines) + "\n"


def _metric_rows(metrics: Metrics | PickerMetrics) -> Iterator[str]:
    yield "| Metric | Type | Labels | Meaning |"
    yield "|---|---|---|---|"
    for family in vars(metrics).values():
        if hasattr(family, "describe"):
            described = family.describe()[0]
            name = described.name + ("_total" if described.type == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in family._labelnames) or "none"  # noqa: SLF001
            yield f"| `{name}` | {described.type} | {labels} | {described.documentation} |"


def errors_page() -> str:
    """Every error a client can get."""
    lines = [
        "# Errors",
        "",
        NOTE,
        'Always `{"error": {"message", "type", "param", "code"}}`, all four keys; on Anthropic\'s routes',
        "in Anthropic's shape. `x-should-retry` says whether a retry of the same request can succeed, and",
        "`Retry-After` when. A stream that fails after it began ends with an error frame instead of its",
        "usual end: [each route's](openai-api.md#errors).",
        "",
        "| Code | Status | Type | Retry | Meaning |",
        "|---|---|---|---|---|",
    ]
    for kind, spec in errors.ERROR_TABLE.items():
        meaning = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        retry = "yes" if spec.retryable else "no"
        lines.append(f"| `{spec.code}` | {int(spec.status)} | `{spec.kind}` | {retry} | {meaning} |")
    assert errors.ApplianceError not in errors.ERROR_TABLE  # noqa: S101 - the base has no meaning of its own
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Every command with its help."""
    lines = ["# Command line", "", NOTE]
    lines += ["`appliance --install-completion` lets your shell complete commands and options.", ""]
    lines += _command_lines("appliance", get_command(cli))
    return "\n".join(lines) + "\n"


def lint_page() -> str:
    """Every rule of `appliance draft lint`."""
    lines = [
        "# Rules of `appliance draft lint`",
        "",
        NOTE,
        "Checks before a draft is loaded, and what vLLM 0.32 does without them; paths are below `vllm/`. An",
        "error prevents the use of the draft; a warning is printed and recorded.",
    ]
    facts = yaml.safe_load(LINT_FACTS.read_text(encoding="utf-8"))
    for rule in Rule:
        lines += ["", f"## `{rule}`", "", f"**{rule.severity.capitalize()}.** {facts[rule]['finds']}"]
        lines += ["", facts[rule]["why"], "", f"To do: {rule.advice[0].upper()}{rule.advice[1:]}."]
    return "\n".join(lines) + "\n"


def openapi_page() -> str:
    """The HTTP surface as an OpenAPI document."""
    app = FastAPI(openapi_url=None)
    for router in (*API_ROUTERS, *ADMIN_ROUTERS):
        app.include_router(router)
    return json.dumps(openapi_document(app.routes, installed_version("sovereign-appliance")), indent=1) + "\n"


def preflight_schema() -> str:
    """What `appliance preflight --json` prints, as a JSON Schema."""
    return json.dumps(described_schema(PreflightReport, is_read=False), indent=2) + "\n"


def cost_report_schema() -> str:
    """What `appliance cost report --json` prints, as a JSON Schema."""
    return json.dumps(described_schema(CostReport, is_read=False), indent=2) + "\n"


def newest_on_sqlite() -> str:
    """The tables of a new SQLite file, and the rows they begin with."""
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        schema.migrate(connection)
        made = connection.connection.driver_connection
        assert made is not None  # noqa: S101
        lines = [line for line in made.iterdump() if line not in {"BEGIN TRANSACTION;", "COMMIT;"}]
    return "\n".join([*lines, ""])


def verifier_digest() -> str:
    """In the form of `sha256sum`."""
    return f"{sha256(Path(verify.__file__).read_bytes()).hexdigest()}  verify.py\n"


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "cli.md": cli_page,
    "clients.md": clients_page,
    "vllm-versions.md": versions_page,
    "openapi.json": openapi_page,
    "draft-lint.md": lint_page,
    "audit-format.md": audit_format_page,
    "../explanation/promises.md": partial(promises_page, NOTE),
    "../explanation/audit-attacks.md": attacks_page,
    "audit-format.schema.json": json_schema_page,
    "verify.py.sha256": verifier_digest,
    "../../appliance/infra/migrations/newest_on_sqlite.sql": newest_on_sqlite,
    "preflight.schema.json": preflight_schema,
    "cost-report.schema.json": cost_report_schema,
    "../../deploy/offline.env": lambda: worker_file([PLUGIN]),
    "../../deploy/offline-grafana.env": grafana_file,
    "chart-values.md": values_page,
    "../../deploy/helm/values.schema.json": values_schema,
    "../../deploy/helm/README.md": chart_readme,
    **{
        f"../../deploy/helm/{at}": partial(source.read_text, encoding="utf-8")
        for at, source in packaged_files().items()
    },
}


def _command_lines(path: str, command: object) -> list[str]:
    lines = []
    for name, child in sorted(getattr(command, "commands", {}).items()):
        lines += _command_lines(f"{path} {name}", child)
    if lines:
        return lines
    options = [
        f"- `{', '.join(parameter.opts) if parameter.param_type_name == 'option' else parameter.name}` "
        f"{getattr(parameter, 'help', '') or ''}".rstrip()
        for parameter in getattr(command, "params", [])
    ]
    text = inspect.cleandoc(getattr(command, "help", "") or "")
    examples = getattr(command, "epilog", "").split("\n\n")[1:]
    lines = [f"## `{path}`", "", text, "", "```bash", *examples, "```", ""]
    return [*lines, *options, *([""] if options else [])]


def _type_name(schema: dict[str, Any]) -> str:
    """A JSON schema in words, with its bounds; `|` is escaped for tables."""
    match schema:
        case {"$ref": reference}:
            text = f"`{reference.rpartition('/')[2]}`"
        case {"enum": values}:
            text = " \\| ".join(f"`{value}`" for value in values)
        case {"anyOf": choices}:
            text = ", or ".join(map(_type_name, choices))
        case {"prefixItems": parts}:
            text = f"({', '.join(map(_type_name, parts))})"
        case {"type": "array", "items": items}:
            text = f"list of: {_type_name(items)}"
        case {"type": "object", "additionalProperties": values}:
            text = f"text to: {_type_name(values)}"
        case _:
            kind = schema.get("format") or TYPES[schema["type"]]
            text = " ".join([kind, ", ".join(_bounds(schema))]).rstrip()
    return text


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    if {"minimum", "maximum"} <= schema.keys():
        yield f"{schema['minimum']} to {schema['maximum']}"
        return
    for name, sign in BOUNDS.items():
        if name in schema:
            yield f"{sign} {schema[name]}"


def _shown(default: object) -> str:
    return "none" if default in (None, "") else f"`{default}`"


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (PAGES_AT / name).write_text(page(), encoding="utf-8")
        print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
