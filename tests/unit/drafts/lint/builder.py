"""
Tiny directories of weights, written byte by byte: every format and shape of draft, to be broken at will.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.serving.weights import Weights, inspect_weights

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "BOOL": 1}
HIDDEN, INNER, VOCABULARY, DRAFTED, LAYERS, CONTEXT = 8, 12, 32, 16, 8, 1024
THIS_TARGET = "<the target's directory>"


@dataclass
class Draft:
    """What will be written; tests change it first."""

    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    dtypes: dict[str, str] = field(default_factory=dict)
    """Where it is not BF16."""
    training: dict[str, Any] | None = None
    target: dict[str, Any] = field(default_factory=lambda: dict(TARGET))
    context: int | None = None
    files: dict[str, Any] = field(default_factory=dict)
    """Further JSON files next to it."""

    @property
    def layer_config(self) -> dict[str, Any]:
        return self.config["transformer_layer_config"]

    def drop(self, *names: str) -> None:
        for name in names:
            del self.tensors[name]

    def rename(self, change: Callable[[str], str]) -> None:
        self.tensors = {change(name): shape for name, shape in self.tensors.items()}
        self.dtypes = {change(name): dtype for name, dtype in self.dtypes.items()}


TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": CONTEXT,
}
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
AUX = {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}
AROUND = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "norm.weight": (HIDDEN,),
    "lm_head.weight": (DRAFTED, HIDDEN),
    "d2t": (DRAFTED,),
    "t2d": (VOCABULARY,),
}
OTHER_DTYPES = {"d2t": "I64", "t2d": "BOOL"}
FC_NORMS = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
COMMON = {
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
    "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
}
ATTENTION = {
    "midlayer.self_attn.q_proj.weight": (8, 2 * HIDDEN),
    "midlayer.self_attn.k_proj.weight": (4, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (4, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, 8),
}
QK_NORMS = {"midlayer.self_attn.q_norm.weight": (2,), "midlayer.self_attn.k_norm.weight": (2,)}
MLA_SIZES = {
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
MLA_ATTENTION = {
    "midlayer.self_attn.q_a_proj.weight": (6, 2 * HIDDEN),
    "midlayer.self_attn.q_a_layernorm.weight": (6,),
    "midlayer.self_attn.q_b_proj.weight": (4 * 5, 6),
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": (5 + 2, 2 * HIDDEN),
    "midlayer.self_attn.kv_a_layernorm.weight": (5,),
    "midlayer.self_attn.kv_b_proj.weight": (4 * 7, 5),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, 16),
}
EAGLE31 = {"fc_norm": True, "norm_output": True, "num_aux_hidden_states": 3, "target_hidden_size": HIDDEN}
RECORD = {
    "fc_norm": True,
    "norm_output": True,
    "norm_before_fc": False,
    "aux_layers": [1, 4, 7],
    "trained_context": 512,
}


def plain(family: str = "llama") -> Draft:
    """EAGLE 3, in the plain format, with Llama's or Qwen3's attention or MLA."""
    config = {**SIZES, **AUX, "draft_vocab_size": DRAFTED, "model_type": family}
    match family:
        case "llama":
            config["architectures"], attention = ["LlamaForCausalLMEagle3"], ATTENTION
        case "qwen3":
            config["architectures"], attention = ["Qwen3ForCausalLM"], ATTENTION | QK_NORMS
        case _:
            config |= {"model_type": "kimi_k2", **MLA_SIZES}
            config["architectures"], attention = ["Eagle3DeepseekV2ForCausalLM"], MLA_ATTENTION
    return Draft(config=config, tensors={**AROUND, **COMMON, **attention}, dtypes=dict(OTHER_DTYPES))


def eagle31(family: str = "llama") -> Draft:
    """EAGLE 3.1: a norm for each aux layer, and the draft's normed output fed back."""
    draft = plain(family)
    draft.config |= EAGLE31
    draft.tensors |= FC_NORMS
    return draft


def speculators(family: str = "llama") -> Draft:
    """EAGLE 3.1 in the speculators format."""
    draft = eagle31(family)
    draft.rename(lambda name: name.replace("midlayer.", "layers.0."))
    draft.config = {
        **AUX,
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": THIS_TARGET, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**SIZES, "model_type": family},
        "draft_vocab_size": DRAFTED,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_fc": False,
        "target_hidden_size": None,
    }
    return draft


def write(draft: Draft, directory: Path) -> tuple[Weights, Weights]:
    """Write target and draft below a directory and read what the linter sees of them."""
    target_at, draft_at = directory / "target", directory / "draft"
    text = json.dumps(draft.config).replace(json.dumps(THIS_TARGET), json.dumps(str(target_at)))
    write_model(target_at, draft.target, {"model.norm.weight": (HIDDEN,)})
    write_model(draft_at, json.loads(text), draft.tensors, draft.dtypes)
    if draft.training is not None:
        (draft_at / "training.json").write_text(json.dumps(draft.training))
    for name, content in draft.files.items():
        (draft_at / name).write_text(json.dumps(content))
    return inspect_weights(target_at), inspect_weights(draft_at)


def write_model(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, tuple[int, ...]],
    dtypes: dict[str, str] | None = None,
) -> None:
    """A directory with config.json and one safetensors file full of zeros."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        dtype = (dtypes or {}).get(name, "BF16")
        start, end = end, end + BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
