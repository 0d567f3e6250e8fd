"""Each method's rules: a good pair has no findings, and one that breaks a rule has just that one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.drafts.lint.methods import lint_settings
from appliance.drafts.lint.rules import Rule
from appliance.infra.settings import WorkerSettings
from appliance.serving.weights import TensorInfo, Weights
from tests.unit.drafts.lint.builder import LAYERS, SIZES, TARGET, VOCABULARY

WEIGHT = TensorInfo(shape=(1,), dtype="BF16")
TOKENS = {"model": {"vocab": {"a": 0, "b": 1}}}


class Site:
    """Settings, target and draft of a method; a test changes one of them."""

    def __init__(self, method: str, directory: Path) -> None:
        self.settings = {"method": method, "draft_tokens": 3}
        self.target: dict[str, Any] = dict(TARGET)
        self.draft: dict[str, Any] = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        self.tensors = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(LAYERS)]
        self.tokenizers: dict[str, Any] = {"target": TOKENS, "draft": TOKENS}
        self._directory = directory
        if method == "mtp":
            self.target["num_nextn_predict_layers"] = 1
            self.tensors.append(f"model.layers.{LAYERS}.eh_proj.weight")

    def lint(self) -> list[Rule]:
        weights = {}
        for name, config in (("target", self.target), ("draft", self.draft)):
            path = self._directory / name
            path.mkdir()
            if self.tokenizers[name] is not None:
                (path / "tokenizer.json").write_text(json.dumps(self.tokenizers[name]))
            tensors = dict.fromkeys(self.tensors, WEIGHT)
            weights[name] = Weights(path=path, config=config, tensors=tensors)
        settings = WorkerSettings(**self.settings)
        draft = weights["draft"] if settings.own_draft is not None else None
        findings = lint_settings(settings, weights["target"], draft)
        assert all(finding.message.isprintable() for finding in findings)
        return [finding.rule for finding in findings]


@pytest.mark.parametrize("method", ["draft_model", "mtp", "ngram", "suffix", "none"])
def test_what_fits_has_no_findings(tmp_path, method):
    assert Site(method, tmp_path).lint() == []


def drafted(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site.draft.update(fields)


def aimed(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site.target.update(fields)


def chosen(**fields: Any) -> Callable[[Site], None]:
    return lambda site: site.settings.update(fields)


def retokenized(site: Site) -> None:
    site.tokenizers["draft"] = {"model": {"vocab": {"a": 1, "b": 0}}}


BROKEN_METHODS: tuple[tuple[Rule, str, Callable[[Site], None]], ...] = (
    (Rule.DRAFT_MODEL_HEAD, "draft_model", drafted(architectures=["LlamaForCausalLMEagle3"])),
    (Rule.DRAFT_MODEL_HEAD, "draft_model", drafted(speculators_model_type="eagle3")),
    (Rule.VOCAB_SIZE, "draft_model", drafted(vocab_size=VOCABULARY + 1)),
    (Rule.DRAFT_MODEL_TOKENIZER, "draft_model", retokenized),
    (Rule.DRAFT_MODEL_CONTEXT, "draft_model", drafted(max_position_embeddings=16)),
    (Rule.MTP_LAYERS, "mtp", aimed(num_nextn_predict_layers=0)),
    (Rule.MTP_WEIGHTS, "mtp", lambda site: site.tensors.pop()),
    (Rule.MTP_DRAFT_TOKENS, "mtp", aimed(num_nextn_predict_layers=2)),
)


@pytest.mark.parametrize(("rule", "method", "damage"), BROKEN_METHODS)
def test_what_breaks_a_rule_has_exactly_its_finding(tmp_path, rule, method, damage):
    site = Site(method, tmp_path)
    damage(site)
    assert site.lint() == [rule]


def test_a_draft_model_without_a_tokenizer_is_compared_by_size_alone(tmp_path):
    """vLLM reads the target's tokenizer only."""
    site = Site("draft_model", tmp_path)
    site.tokenizers["draft"] = None
    assert site.lint() == []


@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
def test_mtp_drafts_up_to_its_layers_and_in_multiples_of_them(tmp_path, draft_tokens):
    site = Site("mtp", tmp_path)
    site.target["num_nextn_predict_layers"] = 2
    site.settings["draft_tokens"] = draft_tokens
    assert site.lint() == []


def test_prediction_layers_are_found_in_a_multimodal_target(tmp_path):
    site = Site("mtp", tmp_path)
    site.target = {"text_config": {**TARGET, "mtp_num_hidden_layers": 1}}
    site.tensors[-1] = "mtp.fc.weight"
    assert site.lint() == []
