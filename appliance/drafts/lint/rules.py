"""
The rules of `appliance draft lint`, and a finding: one rule that a pair of target and draft breaks.

Every rule follows what vLLM 0.32 does; `docs/draft_lint.yaml` names vLLM's file and the consequence for each.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


def _error(value: str, advice: str) -> tuple[str, Severity, str]:
    return value, Severity.ERROR, advice


def _warning(value: str, advice: str) -> tuple[str, Severity, str]:
    return value, Severity.WARNING, advice


class Rule(StrEnum):
    """Everything that can be found.  The value is what the audit log and the JSON output name it."""

    severity: Severity
    advice: str
    """What to do, without a full stop."""

    def __new__(cls, value: str, severity: Severity, advice: str) -> Self:
        rule = str.__new__(cls, value)
        rule._value_, rule.severity, rule.advice = value, severity, advice
        return rule

    MODEL_TYPE_MISSING = _error(
        "model-type-missing", "add the model_type of the draft's layer, such as llama, to its config.json"
    )
    ARCHITECTURE_UNKNOWN = _error(
        "architecture-unknown",
        "convert the draft to a Llama, Qwen3 or DeepSeek (MLA) EAGLE 3 head, or correct `architectures`",
    )
    CONFIG_FIELD_MISSING = _error(
        "config-field-missing",
        "add the field to the draft's config.json; in the speculators format to transformer_layer_config",
    )
    TARGET_UNSUPPORTED = _warning(
        "target-unsupported",
        "use another method of drafting for this target, such as ngram, if the worker does not start",
    )
    TARGET_FIELD_MISSING = _warning("target-field-missing", "compare this size of target and draft by hand")
    SPECULATORS_ALGORITHM = _error("speculators-algorithm", "use an EAGLE 3 or 3.1 draft")
    SPECULATORS_LAYER_CONFIG = _error("speculators-layer-config", "export or copy the draft again")
    SPECULATORS_VERIFIER = _warning(
        "speculators-verifier",
        "make sure this is its target, then put the target's path in speculators_config.verifier",
    )
    HIDDEN_SIZE = _error("hidden-size", "use the draft that was made for this target")
    VOCAB_SIZE = _error("vocab-size", "use the draft that was made for this target")
    DRAFT_VOCAB_SIZE = _error("draft-vocab-size", "use the draft that was made for this target")
    D2T_MISSING = _error("d2t-missing", "export or copy the draft again")
    D2T_UNEXPECTED = _error(
        "d2t-unexpected",
        "set draft_vocab_size to the length of d2t, or remove d2t where that is the target's vocabulary",
    )
    D2T_SHAPE = _error("d2t-shape", "correct the draft's config.json")
    D2T_DTYPE = _error("d2t-dtype", "export the draft again with d2t as int64")
    LM_HEAD_MISSING = _error("lm-head-missing", "export or copy the draft again")
    LM_HEAD_SHAPE = _error("lm-head-shape", "correct the draft's config.json")
    EMBED_TOKENS_MISSING = _error("embed-tokens-missing", "export or copy the draft again")
    EMBED_TOKENS_SHAPE = _error("embed-tokens-shape", "correct the draft's config.json")
    FC_MISSING = _error(
        "fc-missing", "check that it is an EAGLE 3 draft (EAGLE 1 and 2 have no fusion), and copy it again"
    )
    FC_SHAPE = _error("fc-shape", "set num_aux_hidden_states to the number of aux layers it was trained with")
    FC_NORM_WEIGHTS = _error("fc-norm-weights", "export or copy the draft again")
    FC_NORM_FLAG = _error("fc-norm-flag", "set fc_norm: true in the draft's config.json")
    NORM_BEFORE_FC_WEIGHTS = _error("norm-before-fc-weights", "export or copy the draft again")
    NORM_BEFORE_FC_FLAG = _error("norm-before-fc-flag", "set norm_before_fc: true in the draft's config.json")
    NORM_BEFORE_FC_IGNORED = _error(
        "norm-before-fc-ignored", "use a draft without norm_before_fc; no version of it can be served as MLA"
    )
    NORMS_COMBINED = _error("norms-combined", "keep the one it was trained with")
    NORM_OUTPUT_UNSET = _warning(
        "norm-output-unset",
        "set norm_output as it was trained, or record it in a training.json next to the weights",
    )
    AUX_HIDDEN_STATES_OFF = _warning(
        "aux-hidden-states-off", "set VLLM_USE_V2_MODEL_RUNNER=0 for the worker if it does not start"
    )
    AUX_LAYERS_MISSING = _warning(
        "aux-layers-missing",
        "add eagle_aux_hidden_state_layer_ids, as trained, to the top level of its config.json",
    )
    AUX_LAYERS_NESTED = _error(
        "aux-layers-nested",
        "copy them to eagle_aux_hidden_state_layer_ids at the top level of its config.json",
    )
    AUX_LAYERS_RANGE = _error("aux-layers-range", "use the draft that was made for this target")
    AUX_LAYERS_COUNT = _error(
        "aux-layers-count", "correct the ids, or set num_aux_hidden_states to how many there are"
    )
    AUX_LAYERS_ORDER = _warning(
        "aux-layers-order", "make sure it was trained on them in ascending order, then name them so"
    )
    ATTENTION_SHAPE = _error("attention-shape", "correct the draft's config.json")
    MLA_SHAPE = _error("mla-shape", "correct the draft's config.json")
    MLP_SHAPE = _error("mlp-shape", "correct the draft's config.json")
    NORM_SHAPE = _error("norm-shape", "correct the draft's config.json")
    TENSOR_MISSING = _error(
        "tensor-missing",
        "copy the draft again; if it is whole, correct num_hidden_layers and the biases in config.json",
    )
    TENSOR_UNKNOWN = _error(
        "tensor-unknown", "correct the config so that it describes these weights, or remove the tensor"
    )
    MODEL_PREFIX = _error("model-prefix", "strip the prefix from the names in the safetensors file")
    BIAS_IGNORED = _error("bias-ignored", "set attention_bias or mlp_bias in the draft's config.json")
    QUANTIZATION_UNDECLARED = _error(
        "quantization-undeclared", "copy the quantization_config it was made with to its config.json"
    )
    PLAIN_CONTEXT = _warning("plain-context", "lower worker.max_model_len, or use an EAGLE 3.1 draft")
    MAX_POSITION_EMBEDDINGS = _warning(
        "max-position-embeddings", "lower worker.max_model_len, or expect low acceptance beyond it"
    )
    TRAINING_RECORD_MALFORMED = _warning(
        "training-record-malformed",
        "correct training.json: fc_norm, norm_output, norm_before_fc, aux_layers, trained_context",
    )
    TRAINING_NORM_OUTPUT = _error(
        "training-norm-output", "set norm_output in config.json as training.json says"
    )
    TRAINING_NORMS = _error("training-norms", "set the flags in config.json as training.json says")
    TRAINING_AUX_LAYERS = _error(
        "training-aux-layers", "set eagle_aux_hidden_state_layer_ids in config.json as training.json says"
    )
    PARALLEL_DRAFT = _error("parallel-draft", "use an EAGLE 3 or 3.1 draft")
    DRAFT_MODEL_HEAD = _error("draft-model-head", "set worker.method to the method it was trained for")
    DRAFT_MODEL_TOKENIZER = _error(
        "draft-model-tokenizer", "use a draft model with the tokenizer of the target"
    )
    DRAFT_MODEL_CONTEXT = _warning(
        "draft-model-context", "lower worker.max_model_len, or expect useless drafts beyond it"
    )
    MTP_LAYERS = _error("mtp-layers", "use another method of drafting for this target")
    MTP_WEIGHTS = _error("mtp-weights", "copy the target again with its prediction layers")
    MTP_DRAFT_TOKENS = _error(
        "mtp-draft-tokens", "set worker.draft_tokens to at most that number, or a multiple of it"
    )


@dataclass(frozen=True, slots=True)
class Finding:
    rule: Rule
    message: str
    """The names and numbers; its subject, `it`, is the draft."""

    @property
    def severity(self) -> Severity:
        return self.rule.severity

    @property
    def advice(self) -> str:
        return self.rule.advice
