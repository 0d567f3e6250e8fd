"""The estimate of a model's memory, compared with figures computed by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.cli.preflight.memory import Need, deferred_token_bytes, estimate, tensor_bytes, token_bytes
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.weights import TensorInfo, Weights, inspect_weights

LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
"""Sizes published in the config.json of Llama 3 70B."""
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
"""Sizes published in the config.json of DeepSeek V3."""


def test_plain_attention_keeps_keys_and_values():
    """2 x 80 layers x 8 heads x 128 x 2 bytes: 320 KiB a token."""
    assert token_bytes(LLAMA_70B, 2) == 320 * 1024
    assert token_bytes(LLAMA_70B, 1) == 160 * 1024


def test_heads_are_shared_but_never_cut():
    """With more GPUs than key-value heads each GPU still has one head."""
    assert token_bytes(LLAMA_70B, 2, tensor=8) == 40 * 1024
    assert token_bytes(LLAMA_70B, 2, tensor=16) == 40 * 1024


def test_stages_share_layers():
    """The largest stage counts."""
    assert token_bytes(LLAMA_70B, 2, pipeline=3) == 2 * 27 * 8 * 128 * 2


def test_latent_attention_keeps_one_vector_on_every_gpu():
    """61 layers x 576 x 2 bytes, with any tensor parallelism."""
    assert token_bytes(DEEPSEEK_V3, 2) == token_bytes(DEEPSEEK_V3, 2, tensor=8) == 61 * 576 * 2


@pytest.mark.parametrize("lost", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_insufficient_config_is_not_guessed(lost):
    """None, rather than a number that is too small."""
    assert token_bytes({name: value for name, value in LLAMA_70B.items() if name != lost}, 2) is None


def test_quantized_tensors_keep_their_size_and_others_are_cast():
    """Four-bit weights packed in 32-bit integers, eight-bit floats, and a norm in bfloat16."""
    tensors = {
        "a": TensorInfo(shape=(10, 4), dtype="I32"),
        "b": TensorInfo(shape=(8,), dtype="F8_E4M3"),
        "c": TensorInfo(shape=(3,), dtype="BF16"),
    }
    weights = Weights(path=Path("x"), config={}, tensors=tensors)
    assert tensor_bytes(weights, 2) == 160 + 8 + 6
    assert tensor_bytes(weights, 4) == 160 + 8 + 12


def test_the_demo_pair_by_its_own_files():
    """The weights are nearly all of the files; float32 takes twice as much."""
    target, draft = inspect_weights(DEMO_TARGET), inspect_weights(DEMO_DRAFT)
    alone = estimate(target, None, dtype="auto", context=None)
    size = (DEMO_TARGET / "model.safetensors").stat().st_size
    assert 0.99 * size < alone.weights < size
    assert alone.token == 2 * 8 * 4 * 32 * 2
    assert alone.context == 2048
    assert alone.one_context == 2048 * alone.token
    wide = estimate(target, None, dtype="float32", context=100)
    assert wide.weights == 2 * alone.weights
    assert wide.one_context == 100 * 2 * alone.token
    both = estimate(target, draft, dtype="auto", context=None)
    assert both.weights > alone.weights
    assert both.token > alone.token


def test_deferred_prefill_stores_the_hidden_states_of_aux_layers():
    """Per slot of the cache: three layers of 8192 numbers of two bytes, and a mark."""
    assert deferred_token_bytes(LLAMA_70B, draft(), 2) == 3 * 8192 * 2 + 1
    assert deferred_token_bytes(LLAMA_70B, draft(num_aux_hidden_states=5), 4) == 5 * 8192 * 4 + 1
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    assert deferred_token_bytes(LLAMA_70B, draft(eagle_config=ids), 2) == 2 * 8192 * 2 + 1


def test_draft_without_aux_layers_defers_nothing():
    """A draft on the last layer or of a multimodal target runs at every step; an unknown width counts 0."""
    assert deferred_token_bytes(LLAMA_70B, draft(eagle_config={"use_aux_hidden_state": False}), 2) == 0
    assert deferred_token_bytes({}, draft(), 2) == 0
    pictures = Weights(path=Path("x"), config={"text_config": LLAMA_70B}, tensors={})
    assert estimate(pictures, draft(), dtype="auto", context=1).deferred == 0
    assert estimate(replace(pictures, config=LLAMA_70B), draft(), dtype="auto", context=1).deferred > 0


def test_deferred_prefill_is_bounded_by_the_kv_cache():
    """A cache for 10.5 tokens has slots for 10; 0 if the bytes of a token are unknown."""
    need = Need(weights=0, token=100, context=1, deferred=30)
    assert need.deferred_bytes(1050) == 300
    assert Need(weights=0, token=None, context=1, deferred=30).deferred_bytes(1050) == 0
    assert Need(weights=0, token=100, context=1).deferred_bytes(1050) == 0


def test_deferred_prefill_of_the_demo_draft():
    """Three layers of 256 numbers: the width of the draft's `fc` tensor."""
    target, draft_weights = inspect_weights(DEMO_TARGET), inspect_weights(DEMO_DRAFT)
    need = estimate(target, draft_weights, dtype="float32", context=None)
    fc = next(tensor for name, tensor in draft_weights.tensors.items() if name.endswith("fc.weight"))
    assert need.deferred == fc.shape[1] * 4 + 1
    assert estimate(target, None, dtype="float32", context=None).deferred == 0


def draft(**config: object) -> Weights:
    architecture = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 4096}
    return Weights(path=Path("x"), config={**architecture, **config}, tensors={})


def test_a_multimodal_target_is_its_language_model():
    """Its fields are in `text_config`."""
    nested = Weights(path=Path("x"), config={"text_config": {**LLAMA_70B, "dtype": "bfloat16"}}, tensors={})
    assert estimate(nested, None, dtype="auto", context=1).token == 320 * 1024
