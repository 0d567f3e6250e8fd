"""
What can be trained, and what cannot and why.
"""

import json

import pytest

from appliance.drafts.lint.shape import AUX_IDS
from appliance.drafts.training.backend import LARGE_BYTES, choose_backend
from appliance.drafts.training.head_shape import head_shape, new_config
from appliance.drafts.training.training_recipe import Backend, TrainingRecipe, default_rate
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.devices import Hardware
from appliance.serving.weights import TensorInfo, Weights

TARGET = json.loads((DEMO_TARGET / "config.json").read_text())
DRAFT = json.loads((DEMO_DRAFT / "config.json").read_text())
CPU_ONLY = Hardware(gpus=0, bfloat16=False, openmp=None)
GPUS = Hardware(gpus=2, bfloat16=True, openmp=None)


def test_config_of_a_new_head_is_that_of_the_committed_one():
    assert new_config(TARGET) == DRAFT


def test_committed_head_is_read_as_what_it_is():
    shape = head_shape(DRAFT, TARGET)
    assert shape.fc_norm
    assert shape.norm_output
    assert shape.aux_layers == (2, 4, 5)
    assert (shape.width, shape.heads, shape.kv_heads, shape.head_dim) == (256, 8, 4, 32)
    assert shape.rope == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize("depth", range(3, 40))
def test_new_head_reads_three_different_layers(depth):
    layers = new_config({**TARGET, "num_hidden_layers": depth})[AUX_IDS]
    assert len(set(layers)) == 3
    assert layers == sorted(layers)
    assert layers[0] >= 0
    assert layers[-1] < depth
    if depth >= 7:
        assert layers == [2, depth // 2, depth - 3]


def test_target_of_two_layers_is_refused():
    with pytest.raises(DraftRefusedError, match="2 layers"):
        new_config({**TARGET, "num_hidden_layers": 2})


def test_plain_head_keeps_its_kind():
    """A plain head cannot take EAGLE 3.1's weights."""
    plain = {**DRAFT, "fc_norm": False, "norm_output": False, "norm_before_residual": True}
    shape = head_shape(plain, TARGET)
    assert not (shape.fc_norm and shape.norm_output)
    assert shape.norm_before_residual


def test_multimodal_target_has_a_text_config():
    assert new_config({"text_config": TARGET, "vision_config": {}}) == DRAFT


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "qwen3"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "mla"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "auxiliary"),
        ({AUX_IDS: [2, 4, 8]}, "not captured"),
    ],
)
def test_unsupported_head_is_refused(change, why):
    """One line with the alternative."""
    with pytest.raises(DraftRefusedError, match=why) as refused:
        head_shape({**DRAFT, **change}, TARGET)
    assert "--from-scratch" in str(refused.value)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0}},
            {"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0},
        ),
    ],
)
def test_rotary_embedding_is_read_in_every_notation(rope, expected):
    config = {name: value for name, value in DRAFT.items() if name != "rope_theta"}
    assert head_shape({**config, **rope}, TARGET).rope == expected


@pytest.mark.parametrize(
    "numbers",
    [
        {"steps": 5, "minutes": 1.0},
        {"steps": None},
        {"steps": 0},
        {"steps": None, "minutes": 0.0},
        {"batch": 0},
        {"unroll": 0},
        {"window": 10},
        {"decay": 0.0},
        {"rate": 0.0},
        {"corpus_share": 1.0},
    ],
)
def test_impossible_recipe_is_refused(numbers):
    with pytest.raises(ConfigurationError):
        TrainingRecipe(**numbers)


def test_recipe_round_trips():
    recipe = TrainingRecipe(steps=None, minutes=2.5, window=64, rate=1e-4)
    assert TrainingRecipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_default_rate_falls_with_the_width():
    """From the demo's rate to that of published recipes; a refresh gets half."""
    assert default_rate(256, is_refresh=False) == 2e-3
    assert default_rate(4096, is_refresh=False) == pytest.approx(1.25e-4)
    assert default_rate(64, is_refresh=False) == 2e-3
    assert default_rate(256, is_refresh=True) == 1e-3


def large(size: int) -> Weights:
    tensors = {"w": TensorInfo(shape=(size // 2,), dtype="BF16")}
    return Weights(path=DEMO_TARGET, config={}, tensors=tensors)


def test_backend_follows_target_and_machine():
    assert choose_backend("auto", "auto", large(LARGE_BYTES), CPU_ONLY) is Backend.SMALL
    assert choose_backend("auto", "auto", large(LARGE_BYTES), GPUS) is Backend.SPECULATORS
    assert choose_backend("auto", "cpu", large(LARGE_BYTES), GPUS) is Backend.SMALL
    assert choose_backend("auto", "auto", large(LARGE_BYTES - 2), GPUS) is Backend.SMALL
    assert choose_backend("small", "auto", large(LARGE_BYTES), GPUS) is Backend.SMALL


@pytest.mark.parametrize(
    ("asked", "device", "machine", "why"),
    [
        ("speculators", "auto", CPU_ONLY, "GPUs"),
        ("speculators", "cpu", GPUS, "GPUs"),
        ("large", "auto", GPUS, "auto, small or speculators"),
    ],
)
def test_backend_that_cannot_run_is_refused(asked, device, machine, why):
    with pytest.raises(ConfigurationError, match=why):
        choose_backend(asked, device, large(2), machine)
