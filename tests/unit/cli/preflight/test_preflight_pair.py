"""The checks of draft and tokenizer."""

import json
import shutil

import pytest

from appliance.cli.preflight import draft_fit
from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.draft_fit import (
    TokenizerLoad,
    check_pair,
    judge_draft,
    judge_tokenizer,
    load_tokenizer,
)
from appliance.drafts.lint.lint import lint_pair
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.weights import inspect_weights
from tests.unit.cli.preflight.test_preflight_files import inquiry_in


@pytest.fixture
def misfit(tmp_path):
    """The demo draft with the config of a draft for another target."""
    shutil.copytree(DEMO_DRAFT, tmp_path / "draft")
    config = json.loads((DEMO_DRAFT / "config.json").read_text())
    config["target_hidden_size"] = 999
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    return tmp_path / "draft"


def test_a_draft_that_fits():
    assert judge_draft((), may_go=False).result is CheckResult.OK


def test_a_draft_that_does_not_fit_is_a_failure(misfit):
    """With `bad_draft` other than `refuse` it is a warning: the target is served alone."""
    findings = lint_pair(inspect_weights(DEMO_TARGET), inspect_weights(misfit))
    refused = judge_draft(findings, may_go=False)
    assert refused.result is CheckResult.FAIL
    assert "999" in refused.seen
    assert judge_draft(findings, may_go=True).result is CheckResult.WARN


def test_the_pair_of_the_settings_is_judged(misfit, tmp_path, monkeypatch):
    """The tokenizer's process is replaced."""
    monkeypatch.setattr(
        draft_fit, "load_tokenizer", lambda model: TokenizerLoad(alone=True, tokens=5, problem="")
    )
    worker = {"model": str(DEMO_TARGET), "draft": str(misfit)}
    assert next(iter(check_pair(inquiry_in(tmp_path, worker=worker)))).result is CheckResult.FAIL
    alone = {"model": str(DEMO_TARGET), "draft": None, "method": "none"}
    assert next(iter(check_pair(inquiry_in(tmp_path, worker=alone)))).result is CheckResult.SKIPPED
    layers = {"model": str(DEMO_TARGET), "method": "mtp"}
    assert next(iter(check_pair(inquiry_in(tmp_path, worker=layers)))).result is CheckResult.FAIL
    missing = {"model": str(tmp_path / "none")}
    assert {check.result for check in check_pair(inquiry_in(tmp_path, worker=missing))} == {
        CheckResult.SKIPPED
    }


@pytest.mark.parametrize(
    ("loaded", "chats", "result"),
    [
        (TokenizerLoad(alone=True, tokens=6, problem=""), True, CheckResult.OK),
        (TokenizerLoad(alone=False, tokens=6, problem=""), True, CheckResult.OK),
        (TokenizerLoad(alone=True, tokens=0, problem=""), True, CheckResult.WARN),
        (TokenizerLoad(alone=True, tokens=0, problem=""), False, CheckResult.OK),
        (TokenizerLoad(alone=True, tokens=0, problem="OSError: no such file"), True, CheckResult.FAIL),
    ],
)
def test_text_becomes_tokens_without_a_network(loaded, chats, result):
    """A chat needs a template as well; embeddings do not."""
    assert judge_tokenizer(loaded, chats=chats).result is result


def test_environment_that_allows_egress_is_a_failure(monkeypatch):
    """A worker would refuse to start with it; the tokenizer process is not started."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    loaded = load_tokenizer(DEMO_TARGET)
    assert "HF_HUB_OFFLINE" in loaded.problem
    assert judge_tokenizer(loaded, chats=True).result is CheckResult.FAIL


def test_silent_tokenizer_process_is_a_failure(monkeypatch):
    """For instance if a library is broken."""
    monkeypatch.setattr(draft_fit, "CHILD", "appliance.none_of_that_name")
    assert judge_tokenizer(load_tokenizer(DEMO_TARGET), chats=True).result is CheckResult.FAIL
