"""
What a draft's trainer wrote down beside the weights, in `training.json`.

Some of what decides acceptance has no weights (`norm_output`, the aux layers), so a wrong config
loads without a word; only the trainer knows.  Every field may be absent, and other fields are the
trainer's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

FLAGS = ("fc_norm", "norm_output", "norm_before_fc")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """How a draft was trained; None where the record does not say."""

    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    aux_layers: tuple[int, ...] | None = None
    """Layers of the target, in the order `fc` takes them."""
    trained_context: int | None = None
    """Longest text it was trained on, in tokens."""


def parse_record(content: Mapping[str, Any]) -> tuple[TrainingRecord, tuple[str, ...]]:
    """Read a record; the second value names the fields that are not what they have to be."""
    fields = dict(content)
    wrong = [name for name in FLAGS if not isinstance(fields.get(name), bool | None)]
    layers, context = fields.get("aux_layers"), fields.get("trained_context")
    if layers is not None and not (isinstance(layers, list) and all(is_count(layer) for layer in layers)):
        wrong.append("aux_layers")
    if context is not None and not (is_count(context) and context > 0):
        wrong.append("trained_context")
    known = {name: None if name in wrong else fields.get(name) for name in (*FLAGS, "trained_context")}
    named = None if layers is None or "aux_layers" in wrong else tuple(layers)
    return TrainingRecord(aux_layers=named, **known), tuple(wrong)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value of JSON is a whole number that is not negative; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
