"""
The shape of a draft head, read from its config.json, and the config of a new head.

Pure.  A config is read as vLLM reads it (`appliance.drafts.lint.shape`), so that the trained head is the
served head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.drafts.lint.architectures import Family
from appliance.drafts.lint.shape import AUX_IDS, DraftShape, default_aux_layers, read_shape
from appliance.errors import DraftRefusedError

OTHER_BACKEND = "train it with --backend speculators, or use --from-scratch"
ROPE_THETA = 10000.0
MIN_LAYERS = 3
DENSE_RATIO = 3
"""Inner width over head width, if a mixture-of-experts target has no inner width to copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """One Llama layer."""

    width: int
    target_width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    drafted: int
    """Tokens the head can propose."""
    epsilon: float
    positions: int
    aux_layers: tuple[int, ...]
    """Layers of the target whose inputs it takes, ascending, as vLLM passes them."""
    fc_norm: bool
    """A norm on each hidden state before they are fused (EAGLE 3.1)."""
    norm_output: bool
    """Its normed output is the input of its next step (EAGLE 3.1)."""
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    logit_scale: float = 1.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    """As `rope_parameters` in transformers 5."""
    sliding_window: int | None = None
    """Maximum attention distance in tokens."""


def head_shape(config: Mapping[str, Any], target: Mapping[str, Any]) -> HeadShape:
    """Read the shape of a draft without lint errors; DraftRefusedError if the small loop cannot train it."""
    shape = read_shape(config)
    fields = shape.fields
    _refuse(shape)
    width, heads = _size(shape, "hidden_size"), _size(shape, "num_attention_heads")
    depth = text_config(target).get("num_hidden_layers")
    layers = shape.captured_layers(depth if isinstance(depth, int) else None)
    if not layers or layers[-1] >= (depth or 0):
        raise DraftRefusedError(
            f"the draft reads layers {', '.join(map(str, layers)) or 'none'} of a target with {depth}, and "
            f"the output of the last layer is not captured: {OTHER_BACKEND}"
        )
    slides = fields.get("layer_types") == ["sliding_attention"]
    return HeadShape(
        width=width,
        target_width=shape.target_hidden_size or width,
        inner=_size(shape, "intermediate_size"),
        heads=heads,
        kv_heads=shape.size("num_key_value_heads") or heads,
        head_dim=shape.size("head_dim") or width // heads,
        vocabulary=_size(shape, "vocab_size"),
        drafted=shape.draft_vocab_size or _size(shape, "vocab_size"),
        epsilon=float(fields.get("rms_norm_eps") or 1e-6),
        positions=shape.size("max_position_embeddings") or 2048,
        aux_layers=layers,
        fc_norm=shape.flag("fc_norm"),
        norm_output=shape.flag("norm_output"),
        norm_before_fc=shape.norm_before_fc,
        norm_before_residual=shape.flag("norm_before_residual"),
        logit_scale=float(fields.get("logit_scale") or 1.0),
        rope=_rope(fields),
        sliding_window=shape.size("sliding_window") if slides else None,
    )


def new_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """Make the config.json of an EAGLE 3.1 head for a target, in the plain layout."""
    text = text_config(target)
    try:
        width, depth = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads, vocabulary = int(text["num_attention_heads"]), int(text["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise DraftRefusedError(f"the target's config.json has no {error}") from error
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": text.get("intermediate_size") or DENSE_RATIO * width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or width // heads,
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "max_position_embeddings": text.get("max_position_embeddings") or 2048,
        "rms_norm_eps": text.get("rms_norm_eps") or 1e-6,
        "rope_theta": _rope(text)["rope_theta"],
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": text.get("bos_token_id"),
        "eos_token_id": text.get("eos_token_id"),
        "torch_dtype": "bfloat16",
        "fc_norm": True,
        "norm_output": True,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "num_aux_hidden_states": 3,
        AUX_IDS: list(_spread_layers(depth)),
    }


def _spread_layers(depth: int) -> tuple[int, ...]:
    """The layers vLLM takes by default, or others if the target is too shallow."""
    usual = default_aux_layers(depth)
    if len(set(usual)) == len(usual) and usual[-1] < depth and usual[0] < usual[1] < usual[2]:
        return usual
    if depth < MIN_LAYERS:
        raise DraftRefusedError(f"the target has {depth} layers, and a draft reads {MIN_LAYERS} of them")
    return tuple(sorted({depth // 3, depth // 2, depth - 1})) if depth > MIN_LAYERS else (0, 1, 2)


def head_layers(config: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers a draft takes the inputs of, ascending, as vLLM passes them."""
    depth = text_config(target).get("num_hidden_layers")
    return read_shape(config).captured_layers(depth if isinstance(depth, int) else None)


def text_config(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a multimodal target's config."""
    nested = target.get("text_config")
    return nested if isinstance(nested, dict) else target


def _refuse(shape: DraftShape) -> None:
    fields = shape.fields
    unlike = {
        f"its layer is {shape.family or 'of unknown kind'}, not llama": shape.family is not Family.LLAMA,
        f"it has {shape.depth} layers": shape.depth != 1,
        "its weights are quantized": shape.quantized,
        "it takes no auxiliary hidden states": not shape.fuses,
        "its attention has biases": shape.flag("attention_bias"),
        "its inner layer has biases": shape.flag("mlp_bias"),
        f"its activation is {fields.get('hidden_act')}": fields.get("hidden_act", "silu") != "silu",
    }
    for what, is_so in unlike.items():
        if is_so:
            raise DraftRefusedError(f"the small backend cannot train this draft, {what}: {OTHER_BACKEND}")


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    found = dict(named) if isinstance(named, dict) else {}
    found["rope_theta"] = found.get("rope_theta") or fields.get("rope_theta") or ROPE_THETA
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    return found


def _size(shape: DraftShape, name: str) -> int:
    size = shape.size(name)
    if not size:
        raise DraftRefusedError(f"the draft's config.json has no {name}")
    return size
