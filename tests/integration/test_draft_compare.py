"""
`appliance draft compare` on real workers: n-gram and the demo's EAGLE 3.1 head.

The search for leaks (`tests.leaks`) shows that neither the logs of the workers nor the command keep a prompt.
"""

import json

import psutil
import pytest
import typer
from typer.testing import CliRunner

from appliance.cli.draft import compare as command
from appliance.infra.settings import DEMO_DRAFT
from demo.training.corpus import held_out_prompts, load_corpus

pytestmark = [pytest.mark.worker, pytest.mark.slow]

PROMPTS, LARGEST, ROUNDS = 6, 3, 5


def test_two_methods_are_measured_at_every_number(tmp_path):
    """Whether they pay here depends on the machine; that K is followed does not."""
    asked = [{"prompt": text, "temperature": 0} for text in held_out_prompts(load_corpus(), count=PROMPTS)]
    prompts, config = tmp_path / "prompts.kept-by-the-client", tmp_path / "settings.yaml"
    prompts.write_text("\n".join(map(json.dumps, asked)))
    config.write_text(
        json.dumps({"worker": {"device": "cpu", "dtype": "float32", "draft_tokens": LARGEST}}),
    )
    app = typer.Typer()
    app.command()(command.COMMANDS["compare"])
    words = [str(prompts), "--config", str(config), "--data", str(tmp_path / "data"), "--json"]
    words += ["--method", "ngram", "--method", "eagle3", "--concurrency", "2"]
    words += ["--rounds", str(ROUNDS), "--max-tokens", "32"]
    before = set(psutil.Process().children(recursive=True))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert [(each["method"], each.get("draft"), each["problem"]) for each in found["methods"]] == [
        ("ngram", None, ""),
        ("eagle3", str(DEMO_DRAFT), ""),
    ]
    for method in found["methods"]:
        cells = {cell["draft_tokens"]: cell for cell in method["cells"]}
        assert list(cells) == [0, 1, 2, LARGEST]
        assert "acceptance_length" not in cells[0], "the worker drafted at K=0"
        for draft_tokens in (1, 2, LARGEST):
            cell = cells[draft_tokens]
            assert 1 <= cell["acceptance_length"] <= 1 + draft_tokens
            ratio = cell["ratio"]
            assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
            plain = cells[0]["tokens_per_second"]
            assert ratio["value"] == pytest.approx(cell["tokens_per_second"] / plain)
    head = [cell["acceptance_length"] for cell in found["methods"][1]["cells"][1:]]
    assert head == sorted(head)
    assert head[0] > 1.2, "the demo's head knows this code"
    assert found["recommendation"]["method"] in {"ngram", "eagle3", "none"}
    assert not set(psutil.Process().children(recursive=True)) - before
