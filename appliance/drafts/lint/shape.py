"""
A draft's config as vLLM reads it.

A plain config, one in the speculators format and one wrapped in a `model` of its own come out alike.
Pure; an absent field or one of the wrong type reads as None, and the rules report it.

Sources, below `vllm/`: `transformers_utils/config.py`, `transformers_utils/configs/eagle.py`,
`transformers_utils/configs/speculators/`, `model_executor/models/llama_eagle3.py`, `qwen3_eagle3.py`,
`deepseek_eagle3.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.drafts.lint.architectures import DRAFT_FAMILIES, Family
from appliance.drafts.training_record import is_count

EAGLE3 = "Eagle3"
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_AUX_LAYERS = 3
SPECULATORS_LAYERS = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
SPECULATORS_FLAGS = {
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
Size = int | None
"""One length of a tensor; None if the config does not state it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    speculators: bool
    model_type: str | None
    architectures: tuple[str, ...]
    """Names that vLLM looks up in its model registry."""
    fields: Mapping[str, Any]
    quantized: bool

    @property
    def family(self) -> Family | None:
        """The class vLLM loads it with; None if vLLM has none."""
        return next((DRAFT_FAMILIES[name] for name in self.architectures if name in DRAFT_FAMILIES), None)

    def size(self, name: str) -> Size:
        value = self.fields.get(name)
        return value if is_count(value) else None

    def flag(self, name: str) -> bool:
        return bool(self.fields.get(name))

    @property
    def eagle_config(self) -> Mapping[str, Any]:
        """The nested section in which older drafts keep their fields."""
        nested = self.fields.get("eagle_config")
        return nested if isinstance(nested, dict) else {}

    @property
    def target_hidden_size(self) -> Size:
        """Width of the hidden states it takes; null counts as given, as in vLLM."""
        return self.size("target_hidden_size" if "target_hidden_size" in self.fields else "hidden_size")

    @property
    def draft_vocab_size(self) -> Size:
        given = self.fields.get("draft_vocab_size")
        return self.size("vocab_size" if given is None else "draft_vocab_size")

    @property
    def fuses(self) -> bool:
        """Whether `fc` fuses aux hidden states; an MLA draft always does."""
        return self.family is Family.MLA or self.eagle_config.get("use_aux_hidden_state") is not False

    @property
    def norm_before_fc(self) -> bool:
        """Whether a norm precedes `fc`; the nested field takes precedence."""
        return bool(self.eagle_config.get("norm_before_fc", self.fields.get("norm_before_fc")))

    @property
    def aux_count(self) -> int:
        """Number of hidden states `fc` is built for, counted as the draft's class counts."""
        named = ("num_aux_layers",) if self.family is Family.QWEN3 else ()
        for name in (*named, "num_aux_hidden_states"):
            count = self.size(name)
            if count is not None:
                return count
        top = self.fields.get(AUX_IDS) if self.family is Family.QWEN3 else None
        layers = top or self.eagle_config.get(AUX_IDS)
        return len(layers) if isinstance(layers, list) and layers else DEFAULT_AUX_LAYERS

    def aux_layers(self, nested_name: str) -> tuple[object, ...]:
        """The layers that one of vLLM's runners reads; the two read different names in `eagle_config`."""
        for layers in (self.fields.get(AUX_IDS), self.eagle_config.get(nested_name)):
            if layers:
                return tuple(layers) if isinstance(layers, list) else (layers,)
        return ()

    def captured_layers(self, target_depth: Size) -> tuple[int, ...]:
        """The layers that reach `fc`, in vLLM's order: ascending, each once."""
        named = self.aux_layers(AUX_IDS) or self.aux_layers("layer_ids") or default_aux_layers(target_depth)
        return tuple(sorted({layer for layer in named if isinstance(layer, int)}))

    @property
    def depth(self) -> int:
        depth = self.size("num_hidden_layers")
        return 1 if depth is None else depth


def default_aux_layers(target_depth: Size) -> tuple[int, ...]:
    """The layers vLLM captures if no config names any; empty if the target's depth is unknown."""
    return () if target_depth is None else (2, target_depth // 2, target_depth - 3)


def read_shape(config: Mapping[str, Any]) -> DraftShape:
    model_type, named = config.get("model_type"), _names(config.get("architectures"))
    if model_type is None and config.get("speculators_config") is not None:
        model_type = "speculators"
    quantized = any(config.get(name) is not None for name in ("quantization_config", "compression_config"))
    if model_type == "speculators":
        return _speculators_shape(config, quantized=quantized)
    nested = config.get("model")
    if model_type == "eagle" and isinstance(nested, dict):
        prefix = EAGLE3 if config.get("method") == "eagle3" else "Eagle"
        inner = _names(nested.get("architectures"))
        return DraftShape(
            speculators=False,
            model_type=_text(nested.get("model_type")),
            architectures=tuple(_with_prefix(prefix, name) for name in inner),
            fields={**nested, **config},
            quantized=quantized,
        )
    return DraftShape(
        speculators=False,
        model_type=_text(model_type),
        architectures=tuple(_with_prefix(EAGLE3, name) for name in named),
        fields=config,
        quantized=quantized,
    )


def _speculators_shape(config: Mapping[str, Any], *, quantized: bool) -> DraftShape:
    layer = config.get("transformer_layer_config")
    fields: dict[str, Any] = dict(layer) if isinstance(layer, dict) else {}
    model_type = _text(fields.get("model_type", "llama"))
    fields["draft_vocab_size"] = config.get("draft_vocab_size")
    if config.get("target_hidden_size") is not None:
        fields["target_hidden_size"] = config["target_hidden_size"]
    fields |= {name: config.get(name, default) for name, default in SPECULATORS_FLAGS.items()}
    if config.get(AUX_IDS):
        fields[AUX_IDS] = config[AUX_IDS]
    known = SPECULATORS_LAYERS.get(model_type or "")
    return DraftShape(
        speculators=True,
        model_type=model_type,
        architectures=(known,) if known else (),
        fields=fields,
        quantized=quantized,
    )


def _with_prefix(prefix: str, name: str) -> str:
    is_named = name.startswith(prefix) or (prefix == EAGLE3 and name.endswith(EAGLE3))
    return name if is_named else f"{prefix}{name}"


def _names(value: object) -> tuple[str, ...]:
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
