"""The values that every rule reads from a target and its draft."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.drafts.lint.architectures import Family
from appliance.drafts.lint.shape import DraftShape, Size, read_shape
from appliance.drafts.training_record import TrainingRecord, is_count, parse_record
from appliance.serving.weights import TensorInfo, Weights

PREFIX = "model."
FIRST_LAYER = "midlayer."
"""Trainers' name of the only layer; vLLM replaces it by `layers.0.`."""
NESTED_TARGETS = (("text_config",), ("thinker_config", "text_config"), ("llm_config",), ("language_config",))
"""Where a multimodal target keeps the config of its language model."""
DROPPED = ("t2d", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Parts of tensor names that vLLM always drops."""
FLOATS = frozenset({"BF16", "F16", "F32", "F64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    target: Weights
    draft: Weights
    fields: Mapping[str, Any]
    """Fields of the target's language model."""
    shape: DraftShape
    tensors: Mapping[str, TensorInfo]
    """The draft's tensors that vLLM loads, by its names without `model.`."""
    record: TrainingRecord
    malformed: tuple[str, ...]
    """Fields of the training record that cannot be parsed."""
    context: Size
    """Longest context that the worker serves, in tokens."""

    def target_size(self, name: str) -> Size:
        value = self.fields.get(name)
        return value if is_count(value) else None

    @property
    def undeclared(self) -> tuple[str, ...]:
        if self.shape.quantized:
            return ()
        weights = (name for name in self.tensors if "d2t" not in name)
        return tuple(sorted(name for name in weights if self.tensors[name].dtype not in FLOATS))

    @property
    def packed(self) -> bool:
        """Whether weights are quantized, so that their shapes and names cannot be checked."""
        return self.shape.quantized or bool(self.undeclared)


def make_pair(target: Weights, draft: Weights, context: int | None) -> Pair:
    shape, fields = read_shape(draft.config), language_model(target.config)
    tensors = {}
    for name, info in draft.tensors.items():
        placed = _placed(name.removeprefix(PREFIX), shape)
        if placed is not None:
            tensors[placed] = info
    longest = fields.get("max_position_embeddings")
    record, malformed = parse_record(draft.training)
    return Pair(
        target=target,
        draft=draft,
        fields=fields,
        shape=shape,
        tensors=tensors,
        record=record,
        malformed=malformed,
        context=context if context is not None else longest if is_count(longest) else None,
    )


def _placed(name: str, shape: DraftShape) -> str | None:
    """The name vLLM loads a tensor by; None if vLLM drops it."""
    if any(part in name for part in DROPPED):
        return None
    if "mask_hidden" in name and shape.family is not Family.MLA:
        return None
    if "fc." in name and not shape.fuses:
        return None
    return name.replace(FIRST_LAYER, "layers.0.")


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for path in NESTED_TARGETS:
        found: object = config
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
    return config
