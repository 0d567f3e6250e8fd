"""
Cut OpenAI's public API description down to what answers are checked against:
`python -m tests.clients.cut openai-openapi.json`.

Kept are the schemas of the answers and what they refer to, without prose; nothing else is changed.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS_AT = Path(__file__).parents[1] / "data" / "openai-schemas.json"
REFERENCE = "#/components/schemas/"
PROSE = {"description", "title", "example", "examples", "deprecated"}
ANSWERS = (
    "Batch",
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "DeleteFileResponse",
    "ErrorResponse",
    "ListBatchesResponse",
    "ListFilesResponse",
    "ListModelsResponse",
    "Model",
    "OpenAIFile",
    "Response",
    "ResponseStreamEvent",
)


def cut(document: dict[str, Any]) -> dict[str, Any]:
    """The part of the description that is kept."""
    schemas = document["components"]["schemas"]
    kept: dict[str, Any] = {}
    wanted = list(ANSWERS)
    while wanted:
        name = wanted.pop()
        if name not in kept:
            kept[name] = _without_prose(schemas[name])
            wanted += _references(kept[name])
    return {
        "source": "the public OpenAI API description, cut by tests/clients/cut.py",
        "version": document["info"]["version"],
        "licence": document["info"]["license"]["name"],
        "components": {"schemas": dict(sorted(kept.items()))},
    }


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(target := schema.get("$ref"), str):
            yield target.removeprefix(REFERENCE)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _without_prose(schema: Any) -> Any:
    """A member that is a schema is never prose, also if its name suggests it."""
    if isinstance(schema, dict):
        return {
            name: _without_prose(value)
            for name, value in schema.items()
            if not name.startswith("x-") and (name not in PROSE or isinstance(value, dict))
        }
    return [_without_prose(value) for value in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    made = cut(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    SCHEMAS_AT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
