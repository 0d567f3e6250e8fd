"""
`training.json`: what a draft's trainer recorded about it.

Some of what decides acceptance has no weights (`norm_output`, the aux layers): vLLM cannot detect a wrong
config, only the trainer knows.  Every field is optional; other fields belong to the trainer.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from appliance.speculation.values import Expectation, parse_expectation

__all__ = ["DIGESTS", "FLAGS", "Expectation", "TrainingRecord", "encode_record", "is_count", "parse_record"]

FLAGS = ("fc_norm", "norm_output", "norm_before_fc")
DIGESTS = ("target", "parent", "dataset")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """How a draft was trained; None where the record is silent."""

    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    aux_layers: tuple[int, ...] | None = None
    """Layers of the target, in the order `fc` takes them."""
    trained_context: int | None = None
    """Longest training text, in tokens."""
    target: str | None = None
    parent: str | None = None
    """Digest of the draft that training started from."""
    dataset: str | None = None
    """Digest of the data set's manifest."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Tool, version, steps and rates, as the trainer wrote them."""
    expected: Mapping[str, Expectation] = field(default_factory=dict)
    """Acceptance at evaluation, by kind of traffic; `all` for everything together."""


def parse_record(content: Mapping[str, Any]) -> tuple[TrainingRecord, tuple[str, ...]]:
    """Parse a record; the second value names the malformed fields."""
    fields = dict(content)
    wrong = [name for name in FLAGS if not isinstance(fields.get(name), bool | None)]
    layers, context = fields.get("aux_layers"), fields.get("trained_context")
    if layers is not None and not (isinstance(layers, list) and all(is_count(layer) for layer in layers)):
        wrong.append("aux_layers")
    if context is not None and not (is_count(context) and context > 0):
        wrong.append("trained_context")
    wrong += [name for name in DIGESTS if not isinstance(fields.get(name), str | None)]
    recipe, expected = fields.get("recipe") or {}, _expectations(fields.get("expected") or {})
    if not isinstance(recipe, dict):
        wrong.append("recipe")
    if expected is None:
        wrong.append("expected")
    simple = (*FLAGS, "trained_context", *DIGESTS)
    known = {name: None if name in wrong else fields.get(name) for name in simple}
    named = None if layers is None or "aux_layers" in wrong else tuple(layers)
    record = TrainingRecord(
        aux_layers=named, recipe={} if "recipe" in wrong else recipe, expected=expected or {}, **known
    )
    return record, tuple(wrong)


def encode_record(record: TrainingRecord) -> dict[str, Any]:
    """Encode a record as JSON without its empty fields; the inverse of `parse_record`."""
    content: dict[str, Any] = {
        name: getattr(record, name) for name in (*FLAGS, "aux_layers", "trained_context", *DIGESTS)
    }
    content["aux_layers"] = None if record.aux_layers is None else list(record.aux_layers)
    content["recipe"] = dict(record.recipe) or None
    content["expected"] = {kind: asdict(expectation) for kind, expectation in record.expected.items()} or None
    return {name: value for name, value in content.items() if value is not None}


def _expectations(content: object) -> Mapping[str, Expectation] | None:
    if not isinstance(content, dict):
        return None
    found: dict[str, Expectation] = {}
    for kind, value in content.items():
        expectation = parse_expectation(value)
        if expectation is None:
            return None
        found[kind] = expectation
    return found


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a non-negative integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
