"""
The layer tensors that vLLM's three draft classes load, with their shapes.

Pure.  Sources, below `vllm/model_executor/models/`: `llama_eagle3.py` on `llama.py`, `qwen3_eagle3.py`
on `qwen3.py`, `deepseek_eagle3.py` on `deepseek_v2.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.drafts.lint.architectures import Family
from appliance.drafts.lint.rules import Rule
from appliance.drafts.lint.shape import DraftShape, Size

QWEN3_HEAD_DIM = 128
"""If a Qwen3 config names none (`transformers.Qwen3Config`)."""
MLA_QUERY_RANK = 1536
"""`q_lora_rank` if a DeepSeek config names none; null means no rank at all."""
MOST_LAYERS = 256
"""Real drafts have one to three."""
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.fused_qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
}
"""Projections that vLLM fuses, and loads from a file in either form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    shape: tuple[Size, ...]
    rule: Rule
    """The rule that another shape breaks."""
    optional: bool = False
    """Whether vLLM ignores its absence."""

    def __str__(self) -> str:
        lengths = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"({lengths}{',' if len(self.shape) == 1 else ''})"

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and all(
            mine is None or mine == other for mine, other in zip(self.shape, shape, strict=True)
        )


def expected_tensors(shape: DraftShape) -> dict[str, Expected]:
    """By vLLM's names without `model.`; `fc`, its norms, embedding, head and `d2t` have their own rules."""
    hidden = shape.size("hidden_size")
    found = {"norm.weight": Expected(shape=(hidden,), rule=Rule.NORM_SHAPE)}
    for layer in range(min(shape.depth, MOST_LAYERS)):
        first = layer == 0
        attention = _mla(shape, first=first) if shape.family is Family.MLA else _attention(shape, first=first)
        norms = ("input_layernorm", "post_attention_layernorm")
        parts = {
            **attention,
            **_mlp(shape),
            **{f"{name}.weight": Expected(shape=(hidden,), rule=Rule.NORM_SHAPE) for name in norms},
            # Every layer has one, the first alone uses it.
            "hidden_norm.weight": Expected(shape=(hidden,), rule=Rule.NORM_SHAPE, optional=not first),
        }
        found |= {f"layers.{layer}.{name}": expected for name, expected in parts.items()}
    return found


def fused_tensors(expected: Mapping[str, Expected], present: Iterable[str]) -> dict[str, Expected]:
    """Replace the parts of a projection by the fused one where the file has the fused one."""
    found = dict(expected)
    for name in present:
        stem, _, kind = name.rpartition(".")
        for fused, parts in FUSED.items():
            pieces = [f"{stem.removesuffix(fused)}{part}.{kind}" for part in parts]
            if stem.endswith(fused) and all(piece in expected for piece in pieces):
                whole = [expected[piece] for piece in pieces]
                rows = [piece.shape[0] for piece in whole]
                known = [row for row in rows if row is not None]
                height = sum(known) if len(known) == len(rows) else None
                for piece in pieces:
                    found.pop(piece, None)
                found[name] = Expected(shape=(height, *whole[0].shape[1:]), rule=whole[0].rule)
    return found


def _attention(shape: DraftShape, *, first: bool) -> dict[str, Expected]:
    hidden, heads = shape.size("hidden_size"), shape.size("num_attention_heads")
    kv_heads = shape.size("num_key_value_heads") or heads
    width = shape.size("head_dim") or (
        QWEN3_HEAD_DIM if shape.model_type == "qwen3" else _quotient(hidden, heads)
    )
    taken = _times(hidden, 2) if first else hidden
    queries, keys = _times(heads, width), _times(kv_heads, width)
    llama = shape.family is not Family.QWEN3
    biased = shape.flag("attention_bias")
    projections = {
        "q_proj": ((queries, taken), biased),
        "k_proj": ((keys, taken), biased),
        "v_proj": ((keys, taken), biased),
        "o_proj": ((hidden, queries), llama and (biased or shape.flag("bias"))),
    }
    found = _projections("self_attn", projections, Rule.ATTENTION_SHAPE)
    if not llama:
        for name in ("q_norm", "k_norm"):
            found[f"self_attn.{name}.weight"] = Expected(shape=(width,), rule=Rule.NORM_SHAPE)
    return found


def _mla(shape: DraftShape, *, first: bool) -> dict[str, Expected]:
    hidden, heads = shape.size("hidden_size"), shape.size("num_attention_heads")
    rope, latent = shape.size("qk_rope_head_dim"), shape.size("kv_lora_rank")
    flat, values = shape.size("qk_nope_head_dim"), shape.size("v_head_dim")
    taken, query = _times(hidden, 2) if first else hidden, _plus(flat, rope)
    projections: dict[str, tuple[tuple[Size, ...], bool]] = {
        "kv_a_proj_with_mqa": ((_plus(latent, rope), taken), False),
        "kv_b_proj": ((_times(heads, _plus(flat, values)), latent), False),
        "o_proj": ((hidden, _times(heads, values)), False),
    }
    norms = {"kv_a_layernorm": latent}
    if "q_lora_rank" in shape.fields and shape.fields["q_lora_rank"] is None:
        projections["q_proj"] = ((_times(heads, query), taken), False)
    else:
        rank = shape.size("q_lora_rank") if "q_lora_rank" in shape.fields else MLA_QUERY_RANK
        projections["q_a_proj"] = ((rank, taken), False)
        projections["q_b_proj"] = ((_times(heads, query), rank), False)
        norms["q_a_layernorm"] = rank
    found = _projections("self_attn", projections, Rule.MLA_SHAPE)
    for name, width in norms.items():
        found[f"self_attn.{name}.weight"] = Expected(shape=(width,), rule=Rule.NORM_SHAPE)
    return found


def _mlp(shape: DraftShape) -> dict[str, Expected]:
    hidden, inner = shape.size("hidden_size"), shape.size("intermediate_size")
    biased = shape.family is Family.LLAMA and shape.flag("mlp_bias")
    projections = {
        "gate_proj": ((inner, hidden), biased),
        "up_proj": ((inner, hidden), biased),
        "down_proj": ((hidden, inner), biased),
    }
    return _projections("mlp", projections, Rule.MLP_SHAPE)


def _projections(
    module: str, projections: Mapping[str, tuple[tuple[Size, ...], bool]], rule: Rule
) -> dict[str, Expected]:
    found = {}
    for name, (shape, biased) in projections.items():
        found[f"{module}.{name}.weight"] = Expected(shape=shape, rule=rule)
        if biased:
            found[f"{module}.{name}.bias"] = Expected(shape=shape[:1], rule=rule)
    return found


def _times(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one * other


def _plus(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one + other


def _quotient(one: Size, other: Size) -> Size:
    return None if one is None or not other else one // other
