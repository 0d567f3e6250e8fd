"""
Memory of a model: an estimate from `config.json` and the headers of the weights.

Weights: the bytes of all tensors, floating-point ones counted in the arithmetic type, shared evenly by
tensor x pipeline parallel GPUs.  KV cache of one token, on one GPU:

    plain attention   2 x layers x key-value heads x head size x bytes of the type
    latent (MLA)      layers x (kv_lora_rank + qk_rope_head_dim) x bytes of the type

with the layers shared by pipeline stages and, in plain attention, the heads by tensor parallel GPUs (at
least one on each).  It is too high for models with sliding windows or linear attention, and excludes
activations and CUDA graphs.

On a CPU a step without draft tokens stores the target's hidden states for the deferred prefill of the draft
(`appliance.serving.vllm.deferred_prefill`), with a mark per slot.  Per token, at most:

    aux layers x hidden size of the target x bytes of the arithmetic type + 1
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from appliance.drafts.lint.pair import language_model
from appliance.drafts.lint.shape import read_shape
from appliance.drafts.training_record import is_count
from appliance.serving.weights import Weights

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""Bytes of one number by its name in a safetensors header; 1 for other names."""
CAST = frozenset({"F32", "BF16", "F16"})
"""Types that vLLM loads in the arithmetic type."""
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that one model needs on each GPU (or on the CPU)."""

    weights: int
    token: int | None
    """KV cache of one token; None if the config is insufficient."""
    context: int | None
    """Tokens in the longest context."""
    deferred: int = 0
    """
    On a CPU, bytes per KV cache slot for deferred draft prefill; 0 without a draft, if it is not deferred,
    or if the config is insufficient.
    """

    @property
    def one_context(self) -> int:
        """KV cache of one context of maximum length; 0 if unknown."""
        return (self.token or 0) * (self.context or 0)

    def deferred_bytes(self, cache: int) -> int:
        """Maximum bytes of deferred prefill on a CPU worker with a KV cache of `cache` bytes."""
        return cache // self.token * self.deferred if self.token else 0


def estimate(
    target: Weights,
    draft: Weights | None,
    *,
    dtype: str,
    context: int | None,
    tensor: int = 1,
    pipeline: int = 1,
    cache_bytes: int | None = None,
) -> Need:
    """
    Estimate what a worker needs on each GPU.

    The draft's layers have a KV cache as well.  `dtype` and `context` are as in the settings: `auto` and
    None mean the target's own.  `tensor` GPUs share each layer, `pipeline` groups share the layers.
    `cache_bytes` are the bytes of a number in the KV cache; default: as the arithmetic type.
    """
    fields = language_model(target.config)
    named = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    number = TYPE_BYTES.get(str(named) if dtype == "auto" else dtype, 2)
    weights = tensor_bytes(target, number) // (tensor * pipeline)
    token = token_bytes(fields, cache_bytes or number, tensor=tensor, pipeline=pipeline)
    deferred = 0
    if draft is not None:
        # The draft of a model that takes images is not deferred: it runs at every step.
        deferred = deferred_token_bytes(fields, draft, number) if fields is target.config else 0
        weights += tensor_bytes(draft, number) // tensor
        layer = draft.config.get("transformer_layer_config")
        shape = {**draft.config, **layer} if isinstance(layer, dict) else draft.config
        more = token_bytes(shape, cache_bytes or number, tensor=tensor)
        token = None if token is None or more is None else token + more
    longest = fields.get("max_position_embeddings")
    return Need(
        weights=weights,
        token=token,
        context=context if context is not None else longest if is_count(longest) else None,
        deferred=deferred,
    )


def tensor_bytes(weights: Weights, number: int) -> int:
    """Bytes of all tensors, with `number` bytes for each floating-point number that is not quantized."""
    return sum(
        prod(tensor.shape) * (number if tensor.dtype in CAST else BYTES.get(tensor.dtype, 1))
        for tensor in weights.tensors.values()
    )


def token_bytes(fields: Mapping[str, Any], number: int, *, tensor: int = 1, pipeline: int = 1) -> int | None:
    """Bytes of one token's KV cache on each GPU; None if the config is insufficient."""
    layers, heads = fields.get("num_hidden_layers"), fields.get("num_attention_heads")
    if not (is_count(layers) and is_count(heads) and heads):
        return None
    staged = ceil(layers / pipeline)
    latent, rotary = fields.get("kv_lora_rank"), fields.get("qk_rope_head_dim")
    if is_count(latent) and is_count(rotary):
        return staged * (latent + rotary) * number
    size, hidden = fields.get("head_dim"), fields.get("hidden_size")
    if not is_count(size):
        if not is_count(hidden):
            return None
        size = hidden // heads
    kept = fields.get("num_key_value_heads")
    kept = kept if is_count(kept) and kept else heads
    return 2 * staged * ceil(kept / tensor) * size * number


def deferred_token_bytes(fields: Mapping[str, Any], draft: Weights, number: int) -> int:
    """Bytes of deferred prefill per token; 0 if the draft reads no hidden states of layers."""
    shape, hidden = read_shape(draft.config), fields.get("hidden_size")
    if not (shape.fuses and is_count(hidden)):
        return 0
    return shape.aux_count * hidden * number + 1
