"""
What each rule finds, what vLLM does about it, and what to do.

Every rule follows what vLLM 0.32 does; the file named in `why` is where (paths below `vllm/`).  Most
of them exist because of one fact: a draft's `load_weights` returns nothing, so the check that every
weight was loaded never runs for it, and what is missing stays as it was made.  Which damage fails
and which is silent was tried: the demo draft, broken in 26 ways, loaded by vLLM's own loader.

It is longer than other files because it is a table; there is no logic in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from appliance.drafts.lint.rules import Rule, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is said about a rule to people."""

    severity: Severity
    finds: str
    """What is wrong, as one sentence."""
    why: str
    """What vLLM 0.32 does about it, and in which of its files."""
    advice: str
    """What to do."""


def _error(finds: str, why: str, advice: str) -> Explanation:
    return Explanation(severity=Severity.ERROR, finds=finds, why=why, advice=advice)


def _warning(finds: str, why: str, advice: str) -> Explanation:
    return Explanation(severity=Severity.WARNING, finds=finds, why=why, advice=advice)


_OTHER_TARGET = "use the draft that was made for this target"
_AGAIN = "export or copy the draft again"
_CONFIG = "correct the draft's config.json"

EXPLANATIONS: Mapping[Rule, Explanation] = MappingProxyType(
    {
        Rule.MODEL_TYPE_MISSING: _error(
            "The draft's config.json has no `model_type` and is not in the speculators format.",
            "`transformers_utils/config.py` cannot tell how to read it and does not start.",
            "add the model_type of the draft's layer, such as llama, to its config.json",
        ),
        Rule.ARCHITECTURE_UNKNOWN: _error(
            "vLLM has no EAGLE 3 draft of this architecture.",
            "`transformers_utils/configs/eagle.py` puts `Eagle3` before a name without it, and "
            "`model_executor/models/registry.py` knows eight such names; others do not start. A speculators "
            "draft (`transformers_utils/configs/speculators/algos.py`) has a llama or a qwen3 layer.",
            "convert the draft to a Llama, Qwen3 or DeepSeek (MLA) EAGLE 3 head, or correct `architectures`",
        ),
        Rule.CONFIG_FIELD_MISSING: _error(
            "The draft's config.json lacks a size that decides the shape of its layers.",
            "transformers fills in the sizes of another model (4096 wide, 32 layers for llama) and "
            "`model_executor/models/llama_eagle3.py` builds that; the speculators format has no defaults and "
            "does not start.",
            "add the field to the draft's config.json; in the speculators format to transformer_layer_config",
        ),
        Rule.TARGET_UNSUPPORTED: _warning(
            "vLLM's class for the target is not known to support EAGLE 3.",
            "`v1/worker/gpu_model_runner.py` refuses to start with a target that is no `SupportsEagle3` "
            "(`model_executor/models/interfaces.py`).",
            "use another method of drafting for this target, such as ngram, if the worker does not start",
        ),
        Rule.TARGET_FIELD_MISSING: _warning(
            "The target's config.json does not say a size the draft is compared with.",
            "vLLM may find it elsewhere (`model_executor/models/registry.py` has a class for each kind of "
            "target); what depends on it is not judged here.",
            "compare this size of target and draft by hand",
        ),
        Rule.SPECULATORS_ALGORITHM: _error(
            "A draft in the speculators format was made for another algorithm than EAGLE 3.",
            "`transformers_utils/configs/speculators/algos.py` maps each algorithm to other classes; the "
            "worker is started with `method: eagle3`, which drives them wrongly or not at all.",
            "use an EAGLE 3 or 3.1 draft",
        ),
        Rule.SPECULATORS_LAYER_CONFIG: _error(
            "A draft in the speculators format has no `transformer_layer_config`.",
            "`transformers_utils/configs/speculators/base.py` takes every size from it and has none then.",
            _AGAIN,
        ),
        Rule.SPECULATORS_VERIFIER: _warning(
            "A draft in the speculators format names another verifier than this target's directory.",
            "Given a target and a `--speculative-config`, as the launcher does, "
            "`transformers_utils/config.py` never reads it; `vllm serve` on the draft itself would load what "
            "it names, from a hub if it is no path.",
            "make sure this is its target, then put the target's path in speculators_config.verifier",
        ),
        Rule.HIDDEN_SIZE: _error(
            "The draft was made for hidden states of another width than the target's.",
            "`model_executor/models/llama_eagle3.py` sizes `fc` by the draft's own config and fails at the "
            "first step, after the target was loaded.",
            _OTHER_TARGET,
        ),
        Rule.VOCAB_SIZE: _error(
            "Target and draft have vocabularies of different sizes.",
            "vLLM compares them for the method `draft_model` only (`config/speculative.py`); an EAGLE draft "
            "proposes ids that mean other tokens, or looks up rows that do not exist.",
            _OTHER_TARGET,
        ),
        Rule.DRAFT_VOCAB_SIZE: _error(
            "The draft's own vocabulary is larger than the target's.",
            "`compute_logits` in `model_executor/models/llama_eagle3.py` scatters its logits into the "
            "target's vocabulary, beyond its end.",
            _OTHER_TARGET,
        ),
        Rule.D2T_MISSING: _error(
            "The draft has a smaller vocabulary than the target, but no `d2t` tensor to map it.",
            "`model_executor/models/llama_eagle3.py` leaves the map at zeros: every draft token stands for "
            "the target's token of the same number.",
            _AGAIN,
        ),
        Rule.D2T_UNEXPECTED: _error(
            "The draft has a `d2t` tensor, but the target's whole vocabulary.",
            "`model_executor/models/llama_eagle3.py` makes no parameter for it and loading fails.",
            "set draft_vocab_size to the length of d2t, or remove d2t where that is the target's vocabulary",
        ),
        Rule.D2T_SHAPE: _error(
            "`d2t` does not have one entry for each of `draft_vocab_size` tokens.",
            "Loading fails on a bare assertion (`model_executor/model_loader/weight_utils.py`).",
            _CONFIG,
        ),
        Rule.D2T_DTYPE: _error(
            "`d2t` is stored in a type that cannot hold token offsets.",
            "It is copied into 64-bit integers (`model_executor/model_loader/weight_utils.py`); bfloat16 has "
            "rounded every offset above 256 by then.",
            "export the draft again with d2t as int64",
        ),
        Rule.LM_HEAD_MISSING: _error(
            "The draft has no `lm_head.weight`, and the target's does not fit it.",
            "`v1/spec_decode/llm_base_proposer.py` and `v1/worker/gpu/spec_decode/eagle/utils.py` put the "
            "target's there without comparing shapes; its first rows are read as the draft's vocabulary.",
            _AGAIN,
        ),
        Rule.LM_HEAD_SHAPE: _error(
            "`lm_head.weight` is not `draft_vocab_size` by `hidden_size`.",
            "Loading fails on a bare assertion (`model_executor/layers/vocab_parallel_embedding.py`).",
            _CONFIG,
        ),
        Rule.EMBED_TOKENS_MISSING: _error(
            "The draft has no `embed_tokens.weight`, and the target's has another width.",
            "`v1/spec_decode/llm_base_proposer.py` then keeps the draft's own, which nothing was loaded "
            "into; the other runner (`v1/worker/gpu/spec_decode/eagle/utils.py`) shares the target's and "
            "fails.",
            _AGAIN,
        ),
        Rule.EMBED_TOKENS_SHAPE: _error(
            "`embed_tokens.weight` is not `vocab_size` by `hidden_size`.",
            "Loading fails on a bare assertion (`model_executor/layers/vocab_parallel_embedding.py`).",
            _CONFIG,
        ),
        Rule.FC_MISSING: _error(
            "There is no `fc.weight` to fuse the target's hidden states with.",
            "`load_weights` in `model_executor/models/llama_eagle3.py` does not notice: the draft multiplies "
            "with uninitialised memory.",
            "check that it is an EAGLE 3 draft (EAGLE 1 and 2 have no fusion), and copy it again",
        ),
        Rule.FC_SHAPE: _error(
            "`fc.weight` is not `hidden_size` by aux layers x `target_hidden_size`.",
            "Loading fails on a bare assertion (`model_executor/layers/linear.py`). How many aux layers "
            "there are is read from different fields for Llama and MLA (`num_aux_hidden_states`, then "
            "`eagle_config`, then 3) and Qwen3 (`num_aux_layers` and the top-level ids as well).",
            "set num_aux_hidden_states to the number of aux layers it was trained with",
        ),
        Rule.FC_NORM_WEIGHTS: _error(
            "The config says `fc_norm` (EAGLE 3.1), but a norm's weights are missing or of another width.",
            "`load_weights` in `model_executor/models/llama_eagle3.py` does not notice that one is missing: "
            "it stays at ones.",
            _AGAIN,
        ),
        Rule.FC_NORM_FLAG: _error(
            "The draft has `fc_norm.*` weights (EAGLE 3.1), but its config does not say `fc_norm`.",
            "`model_executor/models/llama_eagle3.py` builds no such norms and loading fails with a list of "
            "all parameters.",
            "set fc_norm: true in the draft's config.json",
        ),
        Rule.NORM_BEFORE_FC_WEIGHTS: _error(
            "The config says `norm_before_fc`, but `input_norm.weight` is missing or of another width.",
            "`load_weights` in `model_executor/models/llama_eagle3.py` does not notice that one is missing: "
            "it stays at ones.",
            _AGAIN,
        ),
        Rule.NORM_BEFORE_FC_FLAG: _error(
            "The draft has `input_norm.weight`, but its config does not say `norm_before_fc`.",
            "`load_weights` in `model_executor/models/llama_eagle3.py` drops the tensor silently and serves "
            "the draft without its norm.",
            "set norm_before_fc: true in the draft's config.json",
        ),
        Rule.NORM_BEFORE_FC_IGNORED: _error(
            "An MLA draft says `norm_before_fc` or has its weights.",
            "`model_executor/models/deepseek_eagle3.py` has no such norm: the flag is ignored silently, the "
            "tensor makes loading fail.",
            "use a draft without norm_before_fc; no version of it can be served as MLA",
        ),
        Rule.NORMS_COMBINED: _error(
            "The config says both `fc_norm` and `norm_before_fc`.",
            "`combine_hidden_states` in `model_executor/models/llama_eagle3.py` applies one after the other; "
            "no trainer makes such a draft.",
            "keep the one it was trained with",
        ),
        Rule.NORM_OUTPUT_UNSET: _warning(
            "The config says `fc_norm` but not `norm_output`, and no training record says this is right.",
            "EAGLE 3.1 has both. `norm_output` has no weights, so `model_executor/models/llama_eagle3.py` "
            "cannot notice; a wrong value only lowers acceptance, on the demo pair from 2.42 to 2.33.",
            "set norm_output as it was trained, or say it in a training.json beside the weights",
        ),
        Rule.AUX_HIDDEN_STATES_OFF: _warning(
            "The draft takes the target's last hidden state only (`use_aux_hidden_state: false`).",
            "`v1/spec_decode/llm_base_proposer.py` reads the flag; the other runner (`v1/worker/gpu/"
            "model_runner.py`, the default on GPUs) captures aux layers all the same and fails.",
            "set VLLM_USE_V2_MODEL_RUNNER=0 for the worker if it does not start",
        ),
        Rule.AUX_LAYERS_MISSING: _warning(
            "Nothing says which of the target's layers the draft listens to.",
            "vLLM takes layers 2, n/2 and n-3 (`model_executor/models/interfaces.py`). For a draft trained "
            "with others one case served acceptance length 1.04 instead of 2.77, and nothing showed it.",
            "add eagle_aux_hidden_state_layer_ids, as trained, to the top level of its config.json",
        ),
        Rule.AUX_LAYERS_NESTED: _error(
            "The aux layers are named only where one of vLLM's two runners looks.",
            "`v1/worker/gpu_model_runner.py` reads `eagle_config.eagle_aux_hidden_state_layer_ids`, "
            "`v1/worker/gpu/spec_decode/eagle/eagle3_utils.py` reads `eagle_config.layer_ids`; the other one "
            "takes layers 2, n/2 and n-3 silently, which are not these.",
            "copy them to eagle_aux_hidden_state_layer_ids at the top level of its config.json",
        ),
        Rule.AUX_LAYERS_RANGE: _error(
            "An aux layer is not one of the target's.",
            "A layer that does not exist is never captured (`model_executor/models/interfaces.py`), so `fc` "
            "gets too few values and the worker ends at its first step.",
            _OTHER_TARGET,
        ),
        Rule.AUX_LAYERS_COUNT: _error(
            "There are not as many different aux layers as `fc` was built for.",
            "`model_executor/models/interfaces.py` captures each layer once, however often it is named; `fc` "
            "then gets another width than it has.",
            "correct the ids, or set num_aux_hidden_states to how many there are",
        ),
        Rule.AUX_LAYERS_ORDER: _warning(
            "The aux layers are not named in ascending order.",
            "vLLM hands them to `fc` in ascending order whatever the config says "
            "(`model_executor/models/interfaces.py` sorts them).",
            "make sure it was trained on them in ascending order, then name them so",
        ),
        Rule.ATTENTION_SHAPE: _error(
            "A projection of the attention has another shape than the config says.",
            "Too small a tensor ends loading on a bare assertion; of one with too many rows (o: columns) the "
            "first ones are taken silently (`model_executor/parameter.py`). The first layer's q, k and v "
            "take twice `hidden_size` (`model_executor/models/llama_eagle3.py`).",
            _CONFIG,
        ),
        Rule.MLA_SHAPE: _error(
            "A projection of the latent attention (MLA) has another shape than the config says.",
            "As for `attention-shape`; `q_lora_rank` decides whether there is one query projection or two "
            "(`model_executor/models/deepseek_v2.py`).",
            _CONFIG,
        ),
        Rule.MLP_SHAPE: _error(
            "A projection of the MLP has another shape than the config says.",
            "Too small a tensor ends loading on a bare assertion; of one with too many rows (down: columns) "
            "the first ones are taken silently (`model_executor/parameter.py`).",
            _CONFIG,
        ),
        Rule.NORM_SHAPE: _error(
            "A norm has another width than the config says.",
            "Loading fails on a bare assertion (`model_executor/model_loader/weight_utils.py`).",
            _CONFIG,
        ),
        Rule.TENSOR_MISSING: _error(
            "A tensor that the config promises is not in the file.",
            "`model_executor/model_loader/default_loader.py` checks for such tensors only where "
            "`load_weights` says what it loaded; drafts do not. Norms stay at ones, projections at whatever "
            "memory held.",
            "copy the draft again; if it is whole, correct num_hidden_layers and the biases in config.json",
        ),
        Rule.TENSOR_UNKNOWN: _error(
            "The file has a tensor that the draft's class has no place for.",
            "Loading fails with a list of all parameters (`model_executor/models/utils.py`).",
            "correct the config so that it describes these weights, or remove the tensor",
        ),
        Rule.MODEL_PREFIX: _error(
            "The names of the tensors begin with `model.`.",
            "`load_weights` in `model_executor/models/llama_eagle3.py` puts that before every name itself, "
            "and nothing is called `model.model.*`. NeMo AutoModel writes such names.",
            "strip the prefix from the names in the safetensors file",
        ),
        Rule.BIAS_IGNORED: _error(
            "The file has biases that the config does not announce.",
            "`model_executor/models/utils.py` skips a `.bias` without a place silently, and the draft "
            "computes without it.",
            "set attention_bias or mlp_bias in the draft's config.json",
        ),
        Rule.QUANTIZATION_UNDECLARED: _error(
            "Weights are quantized, but nothing says how.",
            "Without a `quantization_config` (`get_draft_quant_config` in `model_executor/models/utils.py`) "
            "their numbers are copied as if they were the weights, without their scales.",
            "copy the quantization_config it was made with to its config.json",
        ),
        Rule.PLAIN_CONTEXT: _warning(
            "A plain EAGLE 3 draft (neither `fc_norm` nor `norm_output`) may get longer contexts than it was "
            "trained on.",
            "`model_executor/models/llama_eagle3.py` then feeds it its own un-normed output. Such drafts "
            "lose acceptance as the context grows: 2.30 at 2k tokens, 1.29 at 12k, 1.09 at 16k "
            "(vllm-project/speculators #684, Qwen3-8B).",
            "lower worker.max_model_len, or use an EAGLE 3.1 draft",
        ),
        Rule.MAX_POSITION_EMBEDDINGS: _warning(
            "The draft's `max_position_embeddings` is below the context the worker serves.",
            "`config/speculative.py` raises it to the target's context without a warning; the draft then "
            "stands at positions it was not made for.",
            "lower worker.max_model_len, or expect low acceptance beyond it",
        ),
        Rule.TRAINING_RECORD_MALFORMED: _warning(
            "The `training.json` beside the draft cannot be understood.",
            "vLLM does not read it (`config/speculative.py` knows config.json only); what it says is not "
            "compared with the config.",
            "correct training.json: fc_norm, norm_output, norm_before_fc, aux_layers, trained_context",
        ),
        Rule.TRAINING_NORM_OUTPUT: _error(
            "The config's `norm_output` is not what the draft was trained with.",
            "`norm_output` has no weights, so `model_executor/models/llama_eagle3.py` cannot notice; "
            "acceptance falls and nothing else shows.",
            "set norm_output in config.json as training.json says",
        ),
        Rule.TRAINING_NORMS: _error(
            "The config's `fc_norm` or `norm_before_fc` is not what the draft was trained with.",
            "`model_executor/models/llama_eagle3.py` builds what the config says; norms without weights stay "
            "at ones.",
            "set the flags in config.json as training.json says",
        ),
        Rule.TRAINING_AUX_LAYERS: _error(
            "The draft would listen to other layers of the target than it was trained on.",
            "`v1/worker/gpu_model_runner.py` takes the config's layers, or 2, n/2 and n-3, and nothing "
            "compares them with the training.",
            "set eagle_aux_hidden_state_layer_ids in config.json as training.json says",
        ),
    }
)
