"""
The shape of a draft head, read from its config.json, and the config of one that is trained from nothing.

Pure.  A config is read as vLLM reads it (`appliance.drafts.lint.shape`), so that what is trained here is
what will be served.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.drafts.lint.architectures import Family
from appliance.drafts.lint.shape import AUX_IDS, DraftShape, read_shape
from appliance.errors import DraftRefusedError

OTHER_BACKEND = "train it with --backend speculators, or say --from-scratch"
ROPE_THETA = 10000.0
FEWEST_LAYERS = 3
DENSE_RATIO = 3
"""Width of the inner layer over that of the head, where a target of experts has none to copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes and switches of one Llama layer that drafts."""

    width: int
    target_width: int
    """Width of the target's hidden states."""
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    """Tokens of the target."""
    drafted: int
    """Tokens the head can propose."""
    epsilon: float
    positions: int
    """Longest context it claims to serve."""
    aux_layers: tuple[int, ...]
    """Layers of the target whose inputs it takes, ascending, as vLLM hands them over."""
    fc_norm: bool
    """A norm on each hidden state before they are fused: the first half of EAGLE 3.1."""
    norm_output: bool
    """Its normed output goes into its next step: the other half."""
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    logit_scale: float = 1.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Rotary embedding, as `rope_parameters` of transformers 5."""
    sliding_window: int | None = None
    """Most tokens back it may look; None for all."""

    @property
    def is_eagle31(self) -> bool:
        """Whether it is EAGLE 3.1 and not the plain 3."""
        return self.fc_norm and self.norm_output


def head_shape(config: Mapping[str, Any], target: Mapping[str, Any]) -> HeadShape:
    """
    Read the shape of a draft that our own loop can train.

    Args:
        config: the draft's config.json; a pair that `lint_pair` finds no error in.
        target: the target's config.json.

    Raises:
        DraftRefusedError: it is none of ours; the message says why and what can train it.
    """
    shape = read_shape(config)
    fields = shape.fields
    _refuse(shape)
    width, heads = _size(shape, "hidden_size"), _size(shape, "num_attention_heads")
    depth = text_config(target).get("num_hidden_layers")
    layers = _aux_layers(shape, depth if isinstance(depth, int) else 0)
    if not layers or layers[-1] >= (depth or 0):
        raise DraftRefusedError(
            f"the draft takes layers {', '.join(map(str, layers)) or 'none'} of a target with {depth}, and "
            f"the last one's output is not captured here: {OTHER_BACKEND}"
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
    """
    Make the config.json of an EAGLE 3.1 head for a target, in the plain layout vLLM reads.

    Raises:
        DraftRefusedError: the target's config does not say enough.
    """
    text = text_config(target)
    try:
        width, depth = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads, vocabulary = int(text["num_attention_heads"]), int(text["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise DraftRefusedError(f"the target's config.json does not say its {error}") from error
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


def default_layers(depth: int) -> tuple[int, ...]:
    """The layers whose inputs vLLM captures where no config names any: low, middle, high."""
    return 2, depth // 2, depth - 3


def _spread_layers(depth: int) -> tuple[int, ...]:
    """Three layers to capture: those vLLM would take, but for targets too shallow for that."""
    usual = default_layers(depth)
    if len(set(usual)) == len(usual) and usual[-1] < depth and usual[0] < usual[1] < usual[2]:
        return usual
    if depth < FEWEST_LAYERS:
        raise DraftRefusedError(f"the target has {depth} layers, and a draft reads {FEWEST_LAYERS} of them")
    return tuple(sorted({depth // 3, depth // 2, depth - 1})) if depth > FEWEST_LAYERS else (0, 1, 2)


def head_layers(config: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers a draft takes the inputs of, ascending, as vLLM hands them over."""
    depth = text_config(target).get("num_hidden_layers")
    return _aux_layers(read_shape(config), depth if isinstance(depth, int) else 0)


def text_config(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a target's config that is about text, which one that also sees pictures keeps apart."""
    nested = target.get("text_config")
    return nested if isinstance(nested, dict) else target


def _refuse(shape: DraftShape) -> None:
    """Raise DraftRefusedError for what the loop of ours has no code for."""
    fields = shape.fields
    unlike = {
        f"its layer is {shape.family or 'of no known kind'}, not llama": shape.family is not Family.LLAMA,
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


def _aux_layers(shape: DraftShape, depth: int) -> tuple[int, ...]:
    named = shape.aux_layers(AUX_IDS) or shape.aux_layers("layer_ids") or default_layers(depth)
    return tuple(sorted({layer for layer in named if isinstance(layer, int)}))


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding a config asks for, in whichever of the ways of writing it."""
    named = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    found = dict(named) if isinstance(named, dict) else {}
    found["rope_theta"] = found.get("rope_theta") or fields.get("rope_theta") or ROPE_THETA
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    return found


def _size(shape: DraftShape, name: str) -> int:
    size = shape.size(name)
    if not size:
        raise DraftRefusedError(f"the draft's config.json does not say its {name}")
    return size
