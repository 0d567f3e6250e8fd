"""
Promises of the backend speculators, by what the library was recorded to do (`library.py`).

Training refuses every other version of it than the recorded one.
"""

import json
from dataclasses import replace

import pytest
import torch

from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.training.small.files import load_head
from appliance.drafts.training.small.head import StepCache
from appliance.drafts.training.speculators.commands import train_arguments
from appliance.drafts.training.speculators.convert import convert_draft, speculators_config
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.weights import inspect_weights
from tests.unit.drafts.training.library import (
    COLUMNS,
    PARENTS,
    RECORDED_AT,
    ROWS,
    SETUP,
    STEPS,
    a_batch,
    demo_target,
)

RECORDED = json.loads(RECORDED_AT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("parent", PARENTS)
def test_library_accepts_the_arguments(parent):
    """Every flag exists and accepts its value."""
    recorded = RECORDED["arguments"][parent]
    arguments = list(train_arguments(replace(SETUP, parent=PARENTS[parent])))
    assert arguments == recorded["arguments"], "ask the library again: see library.py"
    assert (recorded["target"], recorded["layers"]) == ("/models/target", [2, 16, 29])
    assert (recorded["steps"], recorded["tokens"]) == (500, 8 * 1024)
    if PARENTS[parent] is None:
        assert recorded["flags"] == [True, False, True]


def test_library_computes_the_same_loss():
    """The demo draft in the library's class: the same logits at each step."""
    target, batch = demo_target(), a_batch()
    ours = load_head(DEMO_DRAFT, inspect_weights(DEMO_TARGET).config, target.output).head
    seen = target.observe(batch, ours.shape.aux_layers)
    rows = batch.ids.shape[1] - STEPS - 1
    with torch.no_grad():
        fed, cache = ours.fuse([state[:, :rows] for state in seen.captured]), StepCache()
        for step, recorded in enumerate(RECORDED["logits"]):
            embeds = seen.embeds[:, 1 + step : 1 + step + rows]
            output, fed = ours.step(fed, embeds, batch.positions[:, :rows] + step, cache)
            theirs = torch.tensor(recorded) / 1e6
            torch.testing.assert_close(ours.logits(output)[0, ROWS, COLUMNS], theirs, atol=1e-4, rtol=1e-4)


def test_what_the_library_writes_can_be_served_and_refreshed(tmp_path):
    target, saved = inspect_weights(DEMO_TARGET), tmp_path / "saved"
    convert_draft(DEMO_DRAFT, target, saved)
    assert sorted(inspect_weights(saved).tensors) == RECORDED["saved"]["tensors"]
    config = speculators_config(RECORDED["saved"]["config"], target)
    (saved / "config.json").write_text(json.dumps(config))
    assert lint_pair(target, inspect_weights(saved)) == ()
    output = demo_target().output
    ours, again = (load_head(draft, target.config, output).head for draft in (DEMO_DRAFT, saved))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
