"""
Checks a draft before vLLM loads it: config.json and tensor headers in, findings out.

vLLM does not notice most faults of an EAGLE 3 or 3.1 draft; the only sign is a low acceptance length.
Pure.  Fails closed: a finding of severity `error` is something vLLM 0.32 is known to fail on or to serve
wrongly without an error.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from appliance.drafts.lint.architectures import TARGETS, Family
from appliance.drafts.lint.fusion import fusion_problems
from appliance.drafts.lint.pair import Pair, make_pair
from appliance.drafts.lint.rules import Finding, Rule, Severity
from appliance.drafts.lint.tensors import tensor_problems, vocabulary_problems
from appliance.errors import ConfigurationError
from appliance.serving.weights import Weights

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SPECULATORS_FIELDS = ("rms_norm_eps", "hidden_act")
"""Fields without a default in the speculators format only."""
USUAL_TRAINED_CONTEXT = 2048
"""Longest text in published EAGLE 3 recipes, in tokens; assumed if no record states it."""
UNKNOWN_TRAINING = f"the length of its training texts is unknown (usually {USUAL_TRAINED_CONTEXT})"


def lint_pair(target: Weights, draft: Weights, *, context: int | None = None) -> tuple[Finding, ...]:
    """All findings about a pair, most fundamental first; `context` defaults to the target's maximum."""
    return tuple(_problems(make_pair(target, draft, context)))


def refuse_errors(findings: tuple[Finding, ...], path: Path) -> None:
    """Raise ConfigurationError with the first error and the number of others, if any finding is an error."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        first = f"{errors[0].message}; {errors[0].advice}"
        raise ConfigurationError(f"the draft in {path} does not fit: {first}{more}")


def _problems(pair: Pair) -> Iterator[Finding]:
    yield from _format_problems(pair)
    if pair.shape.speculators and not isinstance(pair.draft.config.get("transformer_layer_config"), dict):
        return
    yield from _size_problems(pair)
    yield from vocabulary_problems(pair)
    if pair.shape.family is not Family.MLA and any("mask_hidden" in name for name in pair.draft.tensors):
        message = "it holds mask_hidden: it is a P-EAGLE draft, trained to draft all its tokens at once"
        yield Finding(Rule.PARALLEL_DRAFT, message)
    if pair.shape.family is not None:
        yield from fusion_problems(pair)
        yield from tensor_problems(pair)
    yield from _context_problems(pair)


def _format_problems(pair: Pair) -> Iterator[Finding]:
    config, shape = pair.draft.config, pair.shape
    if shape.speculators:
        yield from _speculators_problems(pair)
        if not isinstance(config.get("transformer_layer_config"), dict):
            return
    elif shape.model_type is None:
        yield Finding(Rule.MODEL_TYPE_MISSING, "its config.json has no model_type")
    if shape.family is None:
        wanted = ", ".join(shape.architectures) or shape.model_type or "none at all"
        message = f"its architecture is {wanted}, which vLLM 0.32 has no EAGLE 3 draft for"
        yield Finding(Rule.ARCHITECTURE_UNKNOWN, message)
    missing = [name for name in SIZES if shape.size(name) is None]
    if shape.family is Family.MLA:
        missing += [name for name in MLA_SIZES if shape.size(name) is None]
    if shape.speculators:
        missing += [name for name in SPECULATORS_FIELDS if shape.fields.get(name) is None]
    if missing:
        yield Finding(Rule.CONFIG_FIELD_MISSING, f"its config.json lacks {', '.join(missing)}")
    named = pair.target.config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if not TARGETS.intersection(names):
        message = f"its target is a {', '.join(names) or 'model without a named architecture'}"
        yield Finding(Rule.TARGET_UNSUPPORTED, f"{message}, not known to support EAGLE 3")
    unsaid = [
        name for name in ("hidden_size", "vocab_size", "num_hidden_layers") if pair.target_size(name) is None
    ]
    if unsaid:
        yield Finding(Rule.TARGET_FIELD_MISSING, f"its target's config.json lacks {', '.join(unsaid)}")


def _speculators_problems(pair: Pair) -> Iterator[Finding]:
    config = pair.draft.config
    algorithm = config.get("speculators_model_type")
    if algorithm != "eagle3":
        yield Finding(Rule.SPECULATORS_ALGORITHM, f"its speculators_model_type is {algorithm}, not eagle3")
    if not isinstance(config.get("transformer_layer_config"), dict):
        yield Finding(Rule.SPECULATORS_LAYER_CONFIG, "its config.json has no transformer_layer_config")
    section = config.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    # Text is compared, not files: a link to the target's directory is a warning, and only that.
    if not isinstance(name, str) or os.path.normpath(name) != os.path.normpath(pair.target.path):
        message = f"its verifier is {name or 'not named'}, where the target is {pair.target.path}"
        yield Finding(Rule.SPECULATORS_VERIFIER, message)


def _size_problems(pair: Pair) -> Iterator[Finding]:
    shape, hidden = pair.shape, pair.target_size("hidden_size")
    made_for = shape.target_hidden_size if shape.fuses else shape.size("hidden_size")
    is_null = "target_hidden_size" in shape.fields and shape.target_hidden_size is None
    if shape.fuses and is_null:
        message = f"its target_hidden_size is {shape.fields['target_hidden_size']}, which is no width"
        yield Finding(Rule.HIDDEN_SIZE, message)
    elif None not in {hidden, made_for} and hidden != made_for:
        message = f"it is made for a target of hidden size {made_for}, the target's is {hidden}"
        yield Finding(Rule.HIDDEN_SIZE, message)


def _context_problems(pair: Pair) -> Iterator[Finding]:
    shape, context = pair.shape, pair.context
    if context is None:
        return
    types = shape.fields.get("layer_types")
    slides = isinstance(types, list) and bool(types) and set(map(str, types)) == {"sliding_attention"}
    if not (slides or shape.flag("fc_norm") or shape.flag("norm_output")):
        trained = pair.record.trained_context
        if context > (trained or USUAL_TRAINED_CONTEXT):
            known = f"it was trained on {trained} tokens" if trained else UNKNOWN_TRAINING
            message = f"it is plain EAGLE 3, contexts may have {context} tokens, and {known}"
            yield Finding(Rule.PLAIN_CONTEXT, message)
    longest = shape.size("max_position_embeddings")
    if longest is not None and longest < context:
        message = f"its max_position_embeddings is {longest}, and contexts may have {context} tokens"
        yield Finding(Rule.MAX_POSITION_EMBEDDINGS, message)
