"""
Lint of every drafting method: what vLLM 0.32 needs of a target and its draft, besides EAGLE 3's rules.

Fails closed, as `lint_pair`.  Reads the tokenizers of an independent draft model; the rest is pure.
"""

import json
from collections.abc import Iterator
from typing import Any

from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.lint.pair import language_model
from appliance.drafts.lint.rules import Finding, Rule
from appliance.drafts.training_record import is_count
from appliance.infra.settings import WorkerSettings
from appliance.serving.weights import Weights

PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields that state the number of a target's prediction layers, by family of models."""


def lint_settings(settings: WorkerSettings, target: Weights, draft: Weights | None) -> tuple[Finding, ...]:
    context, draft_tokens = settings.max_model_len, settings.draft_tokens
    return lint_method(settings.method, target, draft, context=context, draft_tokens=draft_tokens)


def lint_method(
    method: str, target: Weights, draft: Weights | None, *, context: int | None = None, draft_tokens: int = 1
) -> tuple[Finding, ...]:
    """All findings about a method, for at most `draft_tokens` per step; `draft` is None if it reads none."""
    match method:
        case "eagle3" if draft is not None:
            return lint_pair(target, draft, context=context)
        case "draft_model" if draft is not None:
            return tuple(_draft_model_problems(target, draft, context))
        case "mtp":
            return tuple(_mtp_problems(target, draft_tokens))
        case _:
            return ()


def _draft_model_problems(target: Weights, draft: Weights, context: int | None) -> Iterator[Finding]:
    named = _architectures(draft.config)
    if "speculators_model_type" in draft.config or any("Eagle" in name or "DFlash" in name for name in named):
        message = f"it is a head ({', '.join(named) or 'speculators'}), not a complete model"
        yield Finding(Rule.DRAFT_MODEL_HEAD, message)
        return
    mine, theirs = language_model(draft.config), language_model(target.config)
    sizes = _size(theirs, "vocab_size"), _size(mine, "vocab_size")
    if sizes[0] != sizes[1]:
        message = f"its vocab_size is {sizes[1]}, the target's is {sizes[0]}"
        yield Finding(Rule.VOCAB_SIZE, message)
    elif (own := _vocabulary(draft)) is not None and own != _vocabulary(target):
        yield Finding(Rule.DRAFT_MODEL_TOKENIZER, "its tokenizer.json gives other tokens the target's ids")
    longest = _size(mine, "max_position_embeddings")
    wanted = context or _size(theirs, "max_position_embeddings")
    if longest is not None and wanted is not None and longest < wanted:
        message = f"its max_position_embeddings is {longest}, and contexts may have {wanted} tokens"
        yield Finding(Rule.DRAFT_MODEL_CONTEXT, message)


def _mtp_problems(target: Weights, draft_tokens: int) -> Iterator[Finding]:
    fields = language_model(target.config)
    layers = next((size for name in PREDICTION_LAYERS if (size := _size(fields, name))), None)
    if layers is None:
        message = f"the target's config has no prediction layers ({', '.join(PREDICTION_LAYERS)})"
        yield Finding(Rule.MTP_LAYERS, message)
        return
    behind = f"layers.{_size(fields, 'num_hidden_layers')}."
    if not any("mtp" in name or "nextn" in name or behind in name for name in target.tensors):
        message = f"the target's config.json names {layers} prediction layers, its files hold none"
        yield Finding(Rule.MTP_WEIGHTS, message)
    if draft_tokens > layers and draft_tokens % layers:
        message = f"worker.draft_tokens is {draft_tokens}, and the target has {layers} prediction layers"
        yield Finding(Rule.MTP_DRAFT_TOKENS, message)


def _architectures(config: Any) -> list[str]:  # noqa: ANN401 - JSON
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def _size(fields: Any, name: str) -> int | None:  # noqa: ANN401 - JSON
    value = fields.get(name)
    return value if is_count(value) else None


def _vocabulary(weights: Weights) -> object:
    """Ids by token; None if there is no tokenizer.json: vLLM then uses the target's tokenizer alone."""
    try:
        return json.loads((weights.path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
