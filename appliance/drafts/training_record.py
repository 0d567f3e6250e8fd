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
    layers, context = content.get("aux_layers"), content.get("trained_context")
    recipe, expected = content.get("recipe") or {}, _expectations(content.get("expected") or {})
    fits = {
        **{name: isinstance(content.get(name), bool | None) for name in FLAGS},
        "aux_layers": layers is None or (isinstance(layers, list) and all(map(is_count, layers))),
        "trained_context": context is None or (is_count(context) and context > 0),
        **{name: isinstance(content.get(name), str | None) for name in DIGESTS},
        "recipe": isinstance(recipe, dict),
        "expected": expected is not None,
    }
    record = TrainingRecord(
        aux_layers=tuple(layers) if layers is not None and fits["aux_layers"] else None,
        recipe=recipe if fits["recipe"] else {},
        expected=expected or {},
        **{name: content.get(name) for name in (*FLAGS, "trained_context", *DIGESTS) if fits[name]},
    )
    return record, tuple(name for name in fits if not fits[name])


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
    parsed = {kind: parse_expectation(value) for kind, value in content.items()}
    found = {kind: expectation for kind, expectation in parsed.items() if expectation is not None}
    return found if len(found) == len(parsed) else None


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a non-negative integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
