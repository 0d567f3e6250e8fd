"""
The rules of `appliance draft lint`, and a finding: one rule that a pair of target and draft breaks.

Every rule follows what vLLM 0.32 does; `docs/draft_lint.yaml` names vLLM's file and the consequence for each.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Severity(StrEnum):
    """Whether a finding keeps a draft from being loaded."""

    ERROR = "error"
    WARNING = "warning"


class Rule(StrEnum):
    """Everything that can be found.  The value is what the audit log and the JSON output name it."""

    severity: Severity
    advice: str
    """What to do, without a full stop."""

    def __new__(cls, value: str, severity: Severity, advice: str) -> Self:
        """Make the member equal to its value alone."""
        rule = str.__new__(cls, value)
        rule._value_, rule.severity, rule.advice = value, severity, advice
        return rule

    MODEL_TYPE_MISSING = (
        "model-type-missing",
        Severity.ERROR,
        "add the model_type of the draft's layer, such as llama, to its config.json",
    )
    ARCHITECTURE_UNKNOWN = (
        "architecture-unknown",
        Severity.ERROR,
        "convert the draft to a Llama, Qwen3 or DeepSeek (MLA) EAGLE 3 head, or correct `architectures`",
    )
    CONFIG_FIELD_MISSING = (
        "config-field-missing",
        Severity.ERROR,
        "add the field to the draft's config.json; in the speculators format to transformer_layer_config",
    )
    TARGET_UNSUPPORTED = (
        "target-unsupported",
        Severity.WARNING,
        "use another method of drafting for this target, such as ngram, if the worker does not start",
    )
    TARGET_FIELD_MISSING = (
        "target-field-missing",
        Severity.WARNING,
        "compare this size of target and draft by hand",
    )
    SPECULATORS_ALGORITHM = ("speculators-algorithm", Severity.ERROR, "use an EAGLE 3 or 3.1 draft")
    SPECULATORS_LAYER_CONFIG = ("speculators-layer-config", Severity.ERROR, "export or copy the draft again")
    SPECULATORS_VERIFIER = (
        "speculators-verifier",
        Severity.WARNING,
        "make sure this is its target, then put the target's path in speculators_config.verifier",
    )
    HIDDEN_SIZE = ("hidden-size", Severity.ERROR, "use the draft that was made for this target")
    VOCAB_SIZE = ("vocab-size", Severity.ERROR, "use the draft that was made for this target")
    DRAFT_VOCAB_SIZE = ("draft-vocab-size", Severity.ERROR, "use the draft that was made for this target")
    D2T_MISSING = ("d2t-missing", Severity.ERROR, "export or copy the draft again")
    D2T_UNEXPECTED = (
        "d2t-unexpected",
        Severity.ERROR,
        "set draft_vocab_size to the length of d2t, or remove d2t where that is the target's vocabulary",
    )
    D2T_SHAPE = ("d2t-shape", Severity.ERROR, "correct the draft's config.json")
    D2T_DTYPE = ("d2t-dtype", Severity.ERROR, "export the draft again with d2t as int64")
    LM_HEAD_MISSING = ("lm-head-missing", Severity.ERROR, "export or copy the draft again")
    LM_HEAD_SHAPE = ("lm-head-shape", Severity.ERROR, "correct the draft's config.json")
    EMBED_TOKENS_MISSING = ("embed-tokens-missing", Severity.ERROR, "export or copy the draft again")
    EMBED_TOKENS_SHAPE = ("embed-tokens-shape", Severity.ERROR, "correct the draft's config.json")
    FC_MISSING = (
        "fc-missing",
        Severity.ERROR,
        "check that it is an EAGLE 3 draft (EAGLE 1 and 2 have no fusion), and copy it again",
    )
    FC_SHAPE = (
        "fc-shape",
        Severity.ERROR,
        "set num_aux_hidden_states to the number of aux layers it was trained with",
    )
    FC_NORM_WEIGHTS = ("fc-norm-weights", Severity.ERROR, "export or copy the draft again")
    FC_NORM_FLAG = ("fc-norm-flag", Severity.ERROR, "set fc_norm: true in the draft's config.json")
    NORM_BEFORE_FC_WEIGHTS = ("norm-before-fc-weights", Severity.ERROR, "export or copy the draft again")
    NORM_BEFORE_FC_FLAG = (
        "norm-before-fc-flag",
        Severity.ERROR,
        "set norm_before_fc: true in the draft's config.json",
    )
    NORM_BEFORE_FC_IGNORED = (
        "norm-before-fc-ignored",
        Severity.ERROR,
        "use a draft without norm_before_fc; no version of it can be served as MLA",
    )
    NORMS_COMBINED = ("norms-combined", Severity.ERROR, "keep the one it was trained with")
    NORM_OUTPUT_UNSET = (
        "norm-output-unset",
        Severity.WARNING,
        "set norm_output as it was trained, or say it in a training.json beside the weights",
    )
    AUX_HIDDEN_STATES_OFF = (
        "aux-hidden-states-off",
        Severity.WARNING,
        "set VLLM_USE_V2_MODEL_RUNNER=0 for the worker if it does not start",
    )
    AUX_LAYERS_MISSING = (
        "aux-layers-missing",
        Severity.WARNING,
        "add eagle_aux_hidden_state_layer_ids, as trained, to the top level of its config.json",
    )
    AUX_LAYERS_NESTED = (
        "aux-layers-nested",
        Severity.ERROR,
        "copy them to eagle_aux_hidden_state_layer_ids at the top level of its config.json",
    )
    AUX_LAYERS_RANGE = ("aux-layers-range", Severity.ERROR, "use the draft that was made for this target")
    AUX_LAYERS_COUNT = (
        "aux-layers-count",
        Severity.ERROR,
        "correct the ids, or set num_aux_hidden_states to how many there are",
    )
    AUX_LAYERS_ORDER = (
        "aux-layers-order",
        Severity.WARNING,
        "make sure it was trained on them in ascending order, then name them so",
    )
    ATTENTION_SHAPE = ("attention-shape", Severity.ERROR, "correct the draft's config.json")
    MLA_SHAPE = ("mla-shape", Severity.ERROR, "correct the draft's config.json")
    MLP_SHAPE = ("mlp-shape", Severity.ERROR, "correct the draft's config.json")
    NORM_SHAPE = ("norm-shape", Severity.ERROR, "correct the draft's config.json")
    TENSOR_MISSING = (
        "tensor-missing",
        Severity.ERROR,
        "copy the draft again; if it is whole, correct num_hidden_layers and the biases in config.json",
    )
    TENSOR_UNKNOWN = (
        "tensor-unknown",
        Severity.ERROR,
        "correct the config so that it describes these weights, or remove the tensor",
    )
    MODEL_PREFIX = ("model-prefix", Severity.ERROR, "strip the prefix from the names in the safetensors file")
    BIAS_IGNORED = (
        "bias-ignored",
        Severity.ERROR,
        "set attention_bias or mlp_bias in the draft's config.json",
    )
    QUANTIZATION_UNDECLARED = (
        "quantization-undeclared",
        Severity.ERROR,
        "copy the quantization_config it was made with to its config.json",
    )
    PLAIN_CONTEXT = (
        "plain-context",
        Severity.WARNING,
        "lower worker.max_model_len, or use an EAGLE 3.1 draft",
    )
    MAX_POSITION_EMBEDDINGS = (
        "max-position-embeddings",
        Severity.WARNING,
        "lower worker.max_model_len, or expect low acceptance beyond it",
    )
    TRAINING_RECORD_MALFORMED = (
        "training-record-malformed",
        Severity.WARNING,
        "correct training.json: fc_norm, norm_output, norm_before_fc, aux_layers, trained_context",
    )
    TRAINING_NORM_OUTPUT = (
        "training-norm-output",
        Severity.ERROR,
        "set norm_output in config.json as training.json says",
    )
    TRAINING_NORMS = ("training-norms", Severity.ERROR, "set the flags in config.json as training.json says")
    TRAINING_AUX_LAYERS = (
        "training-aux-layers",
        Severity.ERROR,
        "set eagle_aux_hidden_state_layer_ids in config.json as training.json says",
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
