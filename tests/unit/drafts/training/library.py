"""
Records what speculators makes of our arguments and of the demo draft, for tests that need no speculators.

    python -m tests.unit.drafts.training.library

The library has to be importable, in the version that training asks for.
"""

import json
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from appliance.drafts.training.small.target import FrozenTarget, TokenBatch, load_target
from appliance.drafts.training.small.trainer import plain_batch
from appliance.drafts.training.speculators.commands import VERSION, Setup, train_arguments
from appliance.drafts.training.speculators.convert import convert_draft
from appliance.drafts.training.training_recipe import TrainingRecipe
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.weights import inspect_weights

RECORDED_AT = Path(__file__).parents[3] / "data" / f"speculators-{VERSION}.json"
SETUP = Setup(
    python=Path("/train/bin/python"),
    target=Path("/models/target"),
    parent=None,
    layers=(2, 16, 29),
    depth=32,
    recipe=TrainingRecipe(steps=500, batch=8, window=1024, unroll=3, decay=0.9, rate=1e-4),
    tokens=1_000_000,
    scratch=Path("/dev/shm/appliance-train-x"),
    checkpoints=Path("/drafts/runs/one/checkpoints"),
    port=8123,
    gpus=4,
)
PARENTS = {"none": None, "parent": Path("/drafts/parent")}
LENGTH, STEPS = 65, 3
ROWS, COLUMNS = slice(0, LENGTH - 4, 10), slice(0, None, 64)
"""Of the logits of a step, those that are kept, in millionths."""


def a_batch() -> TokenBatch:
    """Return the tokens whose logits were recorded."""
    return plain_batch(torch.tensor([[(37 * place + 11) % 2048 for place in range(LENGTH)]]))


def demo_target() -> FrozenTarget:
    """Return the demo target in single precision."""
    return FrozenTarget(load_target(DEMO_TARGET, "cpu")._model.float(), "cpu")


def record() -> dict[str, Any]:
    """Ask the library."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig  # noqa: PLC0415
    from speculators.models.eagle3.core import Eagle3DraftModel  # noqa: PLC0415
    from speculators.train.config import TrainConfig  # noqa: PLC0415

    assert version("speculators") == VERSION
    parsed = {}
    for name, parent in PARENTS.items():
        arguments = train_arguments(replace(SETUP, parent=parent))
        config = TrainConfig.resolve(arguments)
        parsed[name] = {
            "arguments": arguments,
            "target": config.verifier.verifier_name_or_path,
            "layers": config.draft.target_layer_ids,
            "flags": [config.draft.fc_norm, config.draft.norm_before_fc, config.draft.norm_output],
            "steps": config.trainer.max_steps,
            "tokens": config.data.total_seq_len,
        }
    target, batch = demo_target(), a_batch()
    logits: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as directory:
        converted, saved = Path(directory) / "converted", Path(directory) / "saved"
        convert_draft(DEMO_DRAFT, inspect_weights(DEMO_TARGET), converted)
        config = Eagle3SpeculatorConfig.from_pretrained(converted)
        config.transformer_layer_config._attn_implementation = "sdpa"
        theirs = Eagle3DraftModel.from_pretrained(
            str(converted), config=config, verifier=str(DEMO_TARGET)
        ).float()
        theirs.lm_head.register_forward_hook(lambda _module, _given, made: logits.append(made.detach()))
        with torch.no_grad():
            seen = target.observe(batch, inspect_weights(DEMO_DRAFT).training["aux_layers"])
            theirs(
                hidden_states=torch.cat(seen.captured, -1)[:, :-1],
                input_ids=batch.ids[:, 1:],
                document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
                position_ids=batch.positions[:, 1:],
                ttt_steps=STEPS,
            )
        # And back: what it writes.
        theirs.to(torch.bfloat16).save_pretrained(saved)
        written = inspect_weights(saved)
        written.config["speculators_config"]["verifier"]["name_or_path"] = str(SETUP.target)
        return {
            "arguments": parsed,
            "logits": [(each[0, ROWS, COLUMNS] * 1e6).round().int().tolist() for each in logits],
            "saved": {"config": written.config, "tensors": sorted(written.tensors)},
        }


if __name__ == "__main__":
    RECORDED_AT.write_text(json.dumps(record(), sort_keys=True, separators=(",", ":")) + "\n")
