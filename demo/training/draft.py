"""
The demo draft: an EAGLE 3.1 head, trained in rounds.

The first round trains on the corpus, the others half on text that the target generates.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from appliance.drafts.training.head_shape import HeadShape
from appliance.drafts.training.small.files import (
    load_checkpoint,
    load_head,
    new_head,
    save_checkpoint,
    save_head,
)
from appliance.drafts.training.small.target import FrozenTarget
from appliance.drafts.training.small.trainer import Trainer, plain_batch
from appliance.drafts.training.training_recipe import TrainingRecipe, learning_rate
from demo.training.on_policy import OnPolicyRecipe, mixed, write_continuations
from demo.training.target import never, windows

PEAK_RATES = (2e-3, 1e-3)
"""Per round."""
WINDOW = 192
ROWS = "continuations.pt"

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecipe:
    steps: int = 1000
    """In each round."""
    batch: int = TrainingRecipe().batch
    peak_rates: tuple[float, ...] = PEAK_RATES
    on_policy: OnPolicyRecipe = field(default_factory=OnPolicyRecipe)
    """Text that the target generates for each round but the first, with a seed of the round's."""
    from_round: int = 1
    """Rounds before it are not trained: the head is the stored one."""


def train_draft(
    ids: Tensor,
    target: LlamaForCausalLM,
    target_at: Path,
    draft_at: Path,
    recipe: DraftRecipe,
    progress: Callable[[str], Report],
    device: str,
    run: Path | None = None,
    is_stopped: Callable[[], bool] = never,
) -> bool:
    """
    Train and save a draft, after each round; `progress(label)` returns what each step is reported to.

    False if `is_stopped` ended it: a call with the same `run`, the directory of its checkpoint, resumes it.
    """
    config = json.loads((target_at / "config.json").read_text(encoding="utf-8"))
    frozen = FrozenTarget(target.float(), device)
    seed = TrainingRecipe().seed
    torch.manual_seed(seed)
    state = None if run is None else load_checkpoint(run)
    first = recipe.from_round if state is None else state["round"]
    stored = new_head(config, frozen.output) if recipe.from_round <= 1 else None
    if stored is None:
        stored = load_head(draft_at, config, frozen.output)
    draft_at.mkdir(parents=True, exist_ok=True)
    for number, peak_rate in enumerate(recipe.peak_rates, start=1):
        if number < first:
            continue
        training = TrainingRecipe(
            steps=recipe.steps, batch=recipe.batch, window=WINDOW, rate=peak_rate, seed=seed
        )
        batches = windows(ids, batch=training.batch, window=WINDOW, seed=seed + number - 1)
        if number > 1:
            own = replace(recipe.on_policy, seed=seed + number - 1)
            rows = _continuations(ids, target, own, progress(f"text for round {number}"), device, run, number)
            batches = mixed(batches, rows, batch=training.batch, seed=own.seed)
        report = progress(f"draft, round {number}")
        trainer = Trainer(stored.head, frozen, training, device)
        done = 0
        if state is not None:
            trainer.restore(state)
            done, state = state["step"], None
        for step, batch in enumerate(islice(batches, done, recipe.steps), start=done):
            if run is not None and is_stopped():
                save_checkpoint(run, {**trainer.state(), "round": number, "step": step})
                return False
            trainer.step(plain_batch(batch), learning_rate(step, recipe.steps, peak_rate))
            shown = " ".join(f"{value:.2f}" for value in trainer.agreement)
            report(step + 1, recipe.steps, f"agreement {shown}")
        save_head(stored, draft_at)
        write_training_record(stored.head.shape, draft_at)
    return True


def _continuations(
    ids: Tensor,
    target: LlamaForCausalLM,
    recipe: OnPolicyRecipe,
    report: Report,
    device: str,
    run: Path | None,
    number: int,
) -> Tensor:
    """The target's text of a round; kept in `run`, so that a resumed round has the same."""
    kept = None if run is None else run / f"{number}-{ROWS}"
    if kept is not None and kept.exists():
        rows: Tensor = torch.load(kept, weights_only=True)
        return rows
    rows = write_continuations(ids, target, WINDOW, recipe, report, device)
    if kept is not None:
        partial = kept.with_suffix(".part")
        torch.save(rows, partial)
        partial.replace(kept)
    return rows


def write_training_record(shape: HeadShape, draft_at: Path) -> None:
    """Record the settings without weights that decide acceptance, for `appliance draft lint`."""
    record = {
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "norm_before_fc": shape.norm_before_fc,
        "aux_layers": list(shape.aux_layers),
        "trained_context": WINDOW,
    }
    (draft_at / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
