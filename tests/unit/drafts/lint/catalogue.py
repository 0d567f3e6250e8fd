"""
Drafts of every kind that fit, and for each rule at least one that is broken in just that way.
"""

from appliance.drafts.lint.rules import Rule
from tests.unit.drafts.lint.builder import (
    AUX,
    CONTEXT,
    DRAFTED,
    HIDDEN,
    LAYERS,
    RECORD,
    TARGET,
    VOCABULARY,
    Draft,
    eagle31,
    plain,
    speculators,
)

IDS = "eagle_aux_hidden_state_layer_ids"
Q_PROJ = "midlayer.self_attn.q_proj.weight"


def widened() -> Draft:
    """A draft that is wider than its target, with all it needs of its own."""
    draft = eagle31()
    draft.config |= {"hidden_size": 2 * HIDDEN, "target_hidden_size": HIDDEN, "head_dim": 4}
    own = {"embed_tokens.weight": (VOCABULARY, HIDDEN)}
    kept = {name: shape for name, shape in draft.tensors.items() if name.startswith(("fc", "d2t", "t2d"))}
    grown = {
        name: tuple(2 * size if size in {HIDDEN, 2 * HIDDEN} else size for size in shape)
        for name, shape in (draft.tensors | own).items()
    }
    grown["midlayer.self_attn.k_proj.weight"] = grown["midlayer.self_attn.v_proj.weight"] = (8, 4 * HIDDEN)
    draft.tensors = {**grown, **kept, "fc.weight": (2 * HIDDEN, 3 * HIDDEN)}
    draft.tensors["lm_head.weight"] = (DRAFTED, 2 * HIDDEN)
    return draft


def without_aux_states(family: str = "llama") -> Draft:
    """A head that takes the last hidden state alone, as some for gpt-oss do."""
    draft = plain(family)
    draft.config["eagle_config"] = {"use_aux_hidden_state": False}
    draft.drop("fc.weight")
    del draft.config[IDS]
    return draft


def normed_before_fc() -> Draft:
    draft = plain()
    draft.config["norm_before_fc"] = True
    draft.tensors["input_norm.weight"] = (3 * HIDDEN,)
    return draft


def two_layers(family: str = "llama") -> Draft:
    """The second layer takes hidden states only."""
    draft = eagle31(family)
    draft.config["num_hidden_layers"] = 2
    for name, shape in list(draft.tensors.items()):
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            narrow = tuple(HIDDEN if size == 2 * HIDDEN else size for size in shape)
            second = name.replace("midlayer.", "layers.1.")
            draft.tensors[second] = narrow if len(shape) == 2 and "o_proj" not in name else shape
    return draft


def biased() -> Draft:
    draft = eagle31()
    draft.config |= {"attention_bias": True, "mlp_bias": True}
    biases = {name: shape for name, shape in draft.tensors.items() if "_proj.weight" in name}
    draft.tensors |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in biases.items()}
    return draft


def fused() -> Draft:
    draft = eagle31()
    draft.drop(*(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"))
    draft.tensors["midlayer.self_attn.qkv_proj.weight"] = (16, 2 * HIDDEN)
    return draft


def wrapped() -> Draft:
    """A config that vLLM's own EAGLEConfig wrote."""
    draft = eagle31()
    inner = draft.config
    draft.config = {"model_type": "eagle", "method": "eagle3", "model": inner, "architectures": ["X"]}
    return draft


def quantized() -> Draft:
    draft = eagle31()
    draft.config["quantization_config"] = {"quant_method": "fp8"}
    draft.tensors[Q_PROJ] = (3, 3)
    draft.dtypes[Q_PROJ] = "F8_E4M3"
    draft.tensors["midlayer.self_attn.q_proj.weight_scale"] = (1,)
    return draft


def quantized_in_another_file() -> Draft:
    draft = quantized()
    draft.files["hf_quant_config.json"] = draft.config.pop("quantization_config")
    return draft


def full_vocabulary() -> Draft:
    draft = eagle31()
    draft.config["draft_vocab_size"] = None
    draft.drop("d2t", "t2d", "lm_head.weight")
    return draft


def without_query_rank() -> Draft:
    draft = eagle31("mla")
    draft.config["q_lora_rank"] = None
    draft.drop(*(f"midlayer.self_attn.{part}.weight" for part in ("q_a_proj", "q_a_layernorm", "q_b_proj")))
    draft.tensors[Q_PROJ] = (20, 2 * HIDDEN)
    return draft


def multimodal() -> Draft:
    draft = eagle31()
    draft.target = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": dict(TARGET)}
    return draft


def recorded(**differs: object) -> Draft:
    draft = eagle31()
    draft.training = {**RECORD, **differs}
    return draft


def recorded_with_default_layers() -> Draft:
    draft = recorded(aux_layers=[2, LAYERS // 2, LAYERS - 3])
    del draft.config[IDS]
    return draft


def four_layers(family: str) -> Draft:
    """Only Qwen3's class counts the ids at the top level."""
    draft = eagle31(family)
    draft.config[IDS] = [1, 3, 5, 7]
    draft.tensors["fc.weight"] = (HIDDEN, 4 * HIDDEN)
    draft.tensors["fc_norm.3.weight"] = (HIDDEN,)
    if family == "qwen3":
        del draft.config["num_aux_hidden_states"]
    else:
        draft.config["num_aux_hidden_states"] = 4
    return draft


def nested(**eagle_config: object) -> Draft:
    draft = eagle31()
    del draft.config[IDS]
    draft.config["eagle_config"] = eagle_config
    return draft


GOOD = {
    "plain llama": plain,
    "plain qwen3": lambda: plain("qwen3"),
    "plain mla": lambda: plain("mla"),
    "3.1 llama": eagle31,
    "3.1 qwen3": lambda: eagle31("qwen3"),
    "3.1 mla": lambda: eagle31("mla"),
    "speculators llama": speculators,
    "speculators qwen3": lambda: speculators("qwen3"),
    "mla without a query rank": without_query_rank,
    "wider than its target": widened,
    "norm before fc": normed_before_fc,
    "two layers": two_layers,
    "two layers of mla": lambda: two_layers("mla"),
    "biases": biased,
    "fused projections": fused,
    "wrapped": wrapped,
    "quantized": quantized,
    "quantized, declared in a file next to it": quantized_in_another_file,
    "whole vocabulary, head of the target": full_vocabulary,
    "multimodal target": multimodal,
    "with a record": recorded,
    "default layers, as recorded": recorded_with_default_layers,
    "four aux layers": lambda: four_layers("llama"),
    "four aux layers of qwen3": lambda: four_layers("qwen3"),
    "nested layers where both runners look": lambda: nested(**AUX, layer_ids=AUX[IDS]),
    "nested layers that are the default": lambda: nested(**{IDS: [2, LAYERS // 2, LAYERS - 3]}),
}


def changed(start=eagle31, **fields):
    """A draft with other fields in its config; None removes one."""

    def make() -> Draft:
        draft = start()
        draft.config |= fields
        for name in [name for name, value in fields.items() if value is None]:
            del draft.config[name]
        return draft

    return make


def reshaped(name, shape, start=eagle31):
    def make() -> Draft:
        draft = start()
        draft.tensors[name] = shape
        return draft

    return make


def dropped(*names, start=eagle31):
    def make() -> Draft:
        draft = start()
        draft.drop(*names)
        return draft

    return make


def touched(touch, start=eagle31):
    def make() -> Draft:
        draft = start()
        touch(draft)
        return draft

    return make


def verified_by(name):
    return touched(
        lambda draft: draft.config["speculators_config"]["verifier"].update(name_or_path=name), speculators
    )


BROKEN = [
    (Rule.MODEL_TYPE_MISSING, changed(model_type=None)),
    (Rule.ARCHITECTURE_UNKNOWN, changed(architectures=["Qwen2ForCausalLM"])),
    (Rule.ARCHITECTURE_UNKNOWN, changed(architectures=["PeagleLlamaForCausalLM"])),
    (Rule.ARCHITECTURE_UNKNOWN, changed(architectures=None)),
    (Rule.ARCHITECTURE_UNKNOWN, changed(wrapped, method="eagle")),
    (
        Rule.ARCHITECTURE_UNKNOWN,
        touched(lambda it: it.layer_config.update(model_type="mistral"), speculators),
    ),
    (Rule.CONFIG_FIELD_MISSING, changed(intermediate_size=None)),
    (Rule.CONFIG_FIELD_MISSING, changed(num_hidden_layers=None)),
    (Rule.CONFIG_FIELD_MISSING, changed(lambda: eagle31("mla"), v_head_dim=None)),
    (Rule.CONFIG_FIELD_MISSING, touched(lambda it: it.layer_config.pop("hidden_act"), speculators)),
    (Rule.TARGET_UNSUPPORTED, touched(lambda it: it.target.update(architectures=["BloomForCausalLM"]))),
    (Rule.TARGET_UNSUPPORTED, touched(lambda it: it.target.pop("architectures"))),
    (Rule.TARGET_FIELD_MISSING, touched(lambda it: it.target.pop("num_hidden_layers"))),
    (Rule.TARGET_FIELD_MISSING, touched(lambda it: it.target.pop("vocab_size"))),
    (Rule.TARGET_FIELD_MISSING, touched(lambda it: it.target.pop("hidden_size"))),
    (Rule.SPECULATORS_ALGORITHM, changed(speculators, speculators_model_type="peagle")),
    (Rule.SPECULATORS_LAYER_CONFIG, changed(speculators, transformer_layer_config=None)),
    (Rule.SPECULATORS_VERIFIER, verified_by("Qwen/Qwen3-8B")),
    (Rule.SPECULATORS_VERIFIER, verified_by("/models/other")),
    (Rule.SPECULATORS_VERIFIER, verified_by(None)),
    (Rule.HIDDEN_SIZE, touched(lambda it: it.target.update(hidden_size=2 * HIDDEN))),
    (Rule.HIDDEN_SIZE, touched(lambda it: it.target.update(hidden_size=2 * HIDDEN), speculators)),
    (Rule.HIDDEN_SIZE, touched(lambda it: it.config.update(target_hidden_size=None))),
    (Rule.VOCAB_SIZE, changed(vocab_size=2 * VOCABULARY)),
    (Rule.DRAFT_VOCAB_SIZE, touched(lambda it: (enlarge(it), it.drop("d2t")))),
    (Rule.D2T_MISSING, dropped("d2t")),
    (Rule.D2T_UNEXPECTED, touched(lambda it: it.tensors.update({"d2t": (VOCABULARY,)}), full_vocabulary)),
    (Rule.D2T_SHAPE, reshaped("d2t", (DRAFTED + 1,))),
    (Rule.D2T_DTYPE, touched(lambda it: it.dtypes.update(d2t="BF16"))),
    (Rule.LM_HEAD_MISSING, dropped("lm_head.weight")),
    (Rule.LM_HEAD_SHAPE, reshaped("lm_head.weight", (VOCABULARY, HIDDEN))),
    (Rule.EMBED_TOKENS_MISSING, dropped("embed_tokens.weight", start=widened)),
    (Rule.EMBED_TOKENS_SHAPE, reshaped("embed_tokens.weight", (DRAFTED, HIDDEN))),
    (Rule.FC_MISSING, dropped("fc.weight")),
    (Rule.FC_MISSING, dropped("fc.weight", start=quantized)),
    (Rule.FC_SHAPE, reshaped("fc.weight", (HIDDEN, 2 * HIDDEN))),
    *((Rule.FC_NORM_WEIGHTS, dropped(f"fc_norm.{index}.weight")) for index in range(3)),
    (Rule.FC_NORM_WEIGHTS, reshaped("fc_norm.1.weight", (HIDDEN + 1,))),
    (Rule.FC_NORM_FLAG, changed(fc_norm=False)),
    (Rule.FC_NORM_FLAG, changed(speculators, fc_norm=False)),
    (Rule.NORM_BEFORE_FC_WEIGHTS, dropped("input_norm.weight", start=normed_before_fc)),
    (Rule.NORM_BEFORE_FC_WEIGHTS, reshaped("input_norm.weight", (HIDDEN,), normed_before_fc)),
    (Rule.NORM_BEFORE_FC_FLAG, reshaped("input_norm.weight", (3 * HIDDEN,))),
    (Rule.NORM_BEFORE_FC_FLAG, changed(normed_before_fc, eagle_config={"norm_before_fc": False})),
    (Rule.NORM_BEFORE_FC_IGNORED, changed(lambda: eagle31("mla"), norm_before_fc=True)),
    (Rule.NORM_BEFORE_FC_IGNORED, reshaped("input_norm.weight", (24,), lambda: plain("mla"))),
    (Rule.NORMS_COMBINED, reshaped("input_norm.weight", (24,), changed(norm_before_fc=True))),
    (Rule.NORM_OUTPUT_UNSET, changed(norm_output=None)),
    (Rule.NORM_OUTPUT_UNSET, changed(speculators, norm_output=None)),
    (Rule.AUX_HIDDEN_STATES_OFF, without_aux_states),
    (Rule.AUX_LAYERS_MISSING, changed(**{IDS: None})),
    (Rule.AUX_LAYERS_NESTED, lambda: nested(**AUX)),
    (Rule.AUX_LAYERS_NESTED, lambda: nested(layer_ids=AUX[IDS])),
    (Rule.AUX_LAYERS_RANGE, changed(**{IDS: [1, 4, LAYERS + 1]})),
    (Rule.AUX_LAYERS_RANGE, changed(**{IDS: [-1, 4, 7]})),
    (Rule.AUX_LAYERS_RANGE, changed(**{IDS: ["a", 4, 7]})),
    (Rule.AUX_LAYERS_COUNT, changed(**{IDS: [1, 4, 4]})),
    (Rule.AUX_LAYERS_COUNT, changed(**{IDS: [1, 3, 5, 7]})),
    (Rule.AUX_LAYERS_ORDER, changed(**{IDS: [7, 4, 1]})),
    (Rule.ATTENTION_SHAPE, reshaped(Q_PROJ, (8, HIDDEN))),
    (Rule.ATTENTION_SHAPE, reshaped("midlayer.self_attn.k_proj.weight", (8, 2 * HIDDEN))),
    (Rule.ATTENTION_SHAPE, reshaped("midlayer.self_attn.o_proj.weight", (HIDDEN, HIDDEN + 1))),
    (Rule.ATTENTION_SHAPE, reshaped("midlayer.self_attn.qkv_proj.weight", (15, 2 * HIDDEN), fused)),
    (Rule.ATTENTION_SHAPE, reshaped("layers.1.self_attn.q_proj.weight", (8, 2 * HIDDEN), two_layers)),
    (Rule.MLA_SHAPE, reshaped("midlayer.self_attn.q_a_proj.weight", (6, HIDDEN), lambda: eagle31("mla"))),
    (
        Rule.MLA_SHAPE,
        reshaped("midlayer.self_attn.kv_a_proj_with_mqa.weight", (5, 2 * HIDDEN), lambda: plain("mla")),
    ),
    (Rule.MLA_SHAPE, reshaped("midlayer.self_attn.kv_b_proj.weight", (4, 5), lambda: plain("mla"))),
    (Rule.MLP_SHAPE, reshaped("midlayer.mlp.up_proj.weight", (HIDDEN, HIDDEN))),
    (Rule.NORM_SHAPE, reshaped("midlayer.hidden_norm.weight", (2 * HIDDEN,))),
    (Rule.NORM_SHAPE, reshaped("midlayer.self_attn.q_norm.weight", (4,), lambda: plain("qwen3"))),
    (Rule.TENSOR_MISSING, dropped(Q_PROJ)),
    (Rule.TENSOR_MISSING, dropped("norm.weight")),
    (Rule.TENSOR_MISSING, dropped("midlayer.hidden_norm.weight")),
    (Rule.TENSOR_MISSING, changed(num_hidden_layers=2)),
    (Rule.TENSOR_MISSING, changed(attention_bias=True)),
    (Rule.TENSOR_MISSING, dropped("midlayer.self_attn.q_norm.weight", start=lambda: plain("qwen3"))),
    (Rule.TENSOR_UNKNOWN, reshaped("midlayer.self_attn.q_norm.weight", (2,))),
    (Rule.TENSOR_UNKNOWN, reshaped("fc_norm.3.weight", (HIDDEN,))),
    (Rule.TENSOR_UNKNOWN, reshaped("layers.1.mlp.up_proj.weight", (12, HIDDEN))),
    (Rule.TENSOR_UNKNOWN, reshaped("mask_hidden", (1, 24), lambda: plain("mla"))),
    (Rule.PARALLEL_DRAFT, reshaped("mask_hidden", (1, 24))),
    (Rule.MODEL_PREFIX, touched(lambda it: it.rename(lambda name: f"model.{name}"))),
    (Rule.BIAS_IGNORED, reshaped("midlayer.self_attn.q_proj.bias", (8,))),
    (Rule.BIAS_IGNORED, reshaped("fc.bias", (HIDDEN,))),
    (Rule.QUANTIZATION_UNDECLARED, changed(quantized, quantization_config=None)),
    (Rule.PLAIN_CONTEXT, touched(lambda it: (lengthen(it, 4096), setattr(it, "context", 4096)), plain)),
    (Rule.PLAIN_CONTEXT, touched(lambda it: lengthen(it, 4096), plain)),
    (Rule.PLAIN_CONTEXT, touched(lambda it: setattr(it, "training", {"trained_context": 512}), plain)),
    (Rule.MAX_POSITION_EMBEDDINGS, changed(max_position_embeddings=CONTEXT - 1)),
    (Rule.MAX_POSITION_EMBEDDINGS, touched(lambda it: setattr(it, "context", CONTEXT + 1))),
    (Rule.TRAINING_RECORD_MALFORMED, lambda: recorded(aux_layers="1, 4, 7")),
    (Rule.TRAINING_RECORD_MALFORMED, lambda: recorded(norm_output="yes")),
    (Rule.TRAINING_RECORD_MALFORMED, lambda: recorded(trained_context=0)),
    (Rule.TRAINING_NORM_OUTPUT, lambda: recorded(norm_output=False)),
    (Rule.TRAINING_NORMS, lambda: recorded(fc_norm=False)),
    (Rule.TRAINING_NORMS, lambda: recorded(norm_before_fc=True)),
    (Rule.TRAINING_AUX_LAYERS, lambda: recorded(aux_layers=[2, 4, 7])),
    (Rule.TRAINING_AUX_LAYERS, lambda: recorded(aux_layers=[7, 4, 1])),
]


def enlarge(draft: Draft) -> None:
    draft.config["draft_vocab_size"] = 2 * VOCABULARY
    draft.tensors["lm_head.weight"] = (2 * VOCABULARY, HIDDEN)


def lengthen(draft: Draft, context: int) -> None:
    draft.config["max_position_embeddings"] = draft.target["max_position_embeddings"] = context
