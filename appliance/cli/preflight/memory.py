"""
How much memory a model takes: an estimate from `config.json` and the headers of the weights.

Weights: the bytes of all tensors, floating-point ones counted in the arithmetic type, shared evenly by
tensor x pipeline parallel GPUs.  KV cache of one token, on one GPU:

    plain attention   2 x layers x key-value heads x head size x bytes of the type
    latent (MLA)      layers x (kv_lora_rank + qk_rope_head_dim) x bytes of the type

with the layers shared by pipeline stages and, in plain attention, the heads by tensor parallel GPUs (at
least one on each).  It is too high for models with sliding windows or linear attention, and leaves
out activations and CUDA graphs.

On a CPU a step that does not draft puts by what the draft would have read, the target's hidden states, at
the place of its token in the KV cache (`appliance.serving.vllm.deferred_prefill`), and a mark there that they
are owed.  Of one token, at most:

    aux layers x hidden size of the target x bytes of the arithmetic type + 1
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from appliance.drafts.lint.pair import language_model
from appliance.drafts.lint.shape import read_shape
from appliance.drafts.record import is_count
from appliance.serving.weights import Weights

BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""Bytes of one number by its name in a safetensors header; 1 for what is not named."""
CAST = frozenset({"F32", "BF16", "F16"})
"""What vLLM loads in the arithmetic type, whatever it is stored in."""
TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one model takes, in bytes, on each GPU (or on the CPU)."""

    weights: int
    token: int | None
    """KV cache of one token; None where the config does not say enough."""
    context: int | None
    """Tokens in the longest context."""
    owed: int = 0
    """On a CPU, what one token's place in the KV cache takes beside it while the draft is not run; 0 where
    there is no draft, where none of it is put by, and where the config does not say enough."""

    @property
    def one_context(self) -> int:
        """KV cache of one longest context; 0 where it is not known."""
        return (self.token or 0) * (self.context or 0)

    def owed_beside(self, cache: int) -> int:
        """Bytes that a CPU worker's draft is owed at most, beside a KV cache of so many bytes."""
        return cache // self.token * self.owed if self.token else 0


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

    Args:
        target: the target's weights.
        draft: the draft's, if it has one; its layers have a KV cache as well.
        dtype: arithmetic type as in the settings; `auto` is the model's own.
        context: longest context to be served; default: the target's longest.
        tensor: GPUs that share each layer.
        pipeline: groups of GPUs that share the layers.
        cache_bytes: bytes of a number in the KV cache; default: as the arithmetic type.
    """
    fields = language_model(target.config)
    named = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    number = TYPE_BYTES.get(str(named) if dtype == "auto" else dtype, 2)
    weights = tensor_bytes(target, number) // (tensor * pipeline)
    token = token_bytes(fields, cache_bytes or number, tensor=tensor, pipeline=pipeline)
    owed = 0
    if draft is not None:
        # Of a model that takes pictures nothing is put by: its draft is run at every step.
        owed = owed_bytes(fields, draft, number) if fields is target.config else 0
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
        owed=owed,
    )


def tensor_bytes(weights: Weights, number: int) -> int:
    """Bytes of all tensors, with `number` bytes for each floating-point number that is not quantized."""
    return sum(
        prod(tensor.shape) * (number if tensor.dtype in CAST else BYTES.get(tensor.dtype, 1))
        for tensor in weights.tensors.values()
    )


def token_bytes(fields: Mapping[str, Any], number: int, *, tensor: int = 1, pipeline: int = 1) -> int | None:
    """Bytes of one token's KV cache on each GPU; None where the config does not say enough."""
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


def owed_bytes(fields: Mapping[str, Any], draft: Weights, number: int) -> int:
    """Bytes put by of a token that the draft is not run over; 0 where it reads no hidden states of layers."""
    shape, hidden = read_shape(draft.config), fields.get("hidden_size")
    if not (shape.fuses and is_count(hidden)):
        return 0
    return shape.aux_count * hidden * number + 1
