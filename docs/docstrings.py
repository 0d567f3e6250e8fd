"""
The text below each field of a pydantic model.

pydantic would read it with `use_attribute_docstrings`, at each start of each command, which needs none of it.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel


def field_docstrings(kind: type[BaseModel]) -> dict[str, str]:
    """By field, also of its bases."""
    bases = [base for base in reversed(kind.__mro__) if issubclass(base, BaseModel) and base is not BaseModel]
    return dict(pair for base in bases for pair in _written_in(base))


def described_schema(kind: type[BaseModel], *, is_read: bool) -> dict[str, Any]:
    """The JSON Schema of what a model reads or writes, with the docstrings of its fields and its parts'."""
    schema = kind.model_json_schema(mode="validation" if is_read else "serialization")
    models = vars(inspect.getmodule(kind))
    described = {kind: schema} | {models[name]: part for name, part in schema.get("$defs", {}).items()}
    for model, part in described.items():
        if "properties" in part:
            for name, text in field_docstrings(model).items():
                part["properties"][name]["description"] = text
    return schema


def _written_in(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(parsed, ast.ClassDef)  # noqa: S101
    for statement, below in pairwise(parsed.body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
            case _:
                pass
