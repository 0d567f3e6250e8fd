"""
Rebuild the demo pair from this interpreter's own standard library: `python -m demo.build`.

Writes `demo-coder/` and `demo-coder-eagle31/` below --out.  With the default recipe it takes an hour
or more on two CPU cores; --target-steps and --draft-steps scale it down for a trial.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from appliance.drafts.training.head_shape import HeadShape
from appliance.drafts.training.small.files import load_head, new_head, save_head
from appliance.drafts.training.small.target import FrozenTarget
from appliance.drafts.training.small.trainer import Trainer, plain_batch
from appliance.drafts.training.training_recipe import TrainingRecipe, learning_rate
from demo.training.corpus import load_corpus
from demo.training.on_policy import OnPolicyRecipe, mixed, write_continuations
from demo.training.target import (
    TargetRecipe,
    encode_corpus,
    save_target,
    target_config,
    train_target,
    windows,
)
from demo.training.tokenizer import train_tokenizer

TARGET_STEPS = 1200
DRAFT_STEPS = 1000
PEAK_RATES = (2e-3, 1e-3)
"""Per round: the first trains on the corpus, the others half on text the target generates."""
WINDOW = 192


class Progress:
    """One line that is rewritten on a terminal, and printed every 50 steps elsewhere."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.started = time.monotonic()

    def __call__(self, step: int, steps: int, text: str) -> None:
        """Show the progress and the time left."""
        left = (time.monotonic() - self.started) / step * (steps - step)
        line = f"{self.label}: step {step}/{steps}, {text}, {left / 60:.1f} min left"
        if sys.stdout.isatty():
            sys.stdout.write(f"\r\x1b[K{line}" + ("\n" if step == steps else ""))
            sys.stdout.flush()
        elif step % max(1, min(50, steps // 4)) == 0 or step == steps:
            print(line, flush=True)


def build_draft(
    ids: torch.Tensor, target: LlamaForCausalLM, target_at: Path, draft_at: Path, options: argparse.Namespace
) -> None:
    """Train the draft in rounds; it is saved after each."""
    config = json.loads((target_at / "config.json").read_text(encoding="utf-8"))
    frozen = FrozenTarget(target.float(), options.device)
    seed = TrainingRecipe().seed
    torch.manual_seed(seed)
    stored = new_head(config, frozen.output) if options.from_round <= 1 else None
    if stored is None:
        stored = load_head(draft_at, config, frozen.output)
    draft_at.mkdir(parents=True, exist_ok=True)
    for number, peak_rate in enumerate(PEAK_RATES, start=1):
        if number < options.from_round:
            continue
        recipe = TrainingRecipe(steps=options.draft_steps, window=WINDOW, rate=peak_rate, seed=seed)
        batches = windows(ids, batch=recipe.batch, window=recipe.window, seed=seed + number - 1)
        if number > 1:
            own = OnPolicyRecipe(rounds=options.on_policy_rounds, seed=seed + number - 1)
            progress = Progress(f"text for round {number}")
            rows = write_continuations(ids, target, recipe.window, own, progress, options.device)
            batches = mixed(batches, rows, batch=recipe.batch, seed=own.seed)
        progress = Progress(f"draft, round {number}")
        trainer = Trainer(stored.head, frozen, recipe, options.device)
        for step in range(options.draft_steps):
            rate = learning_rate(step, options.draft_steps, peak_rate)
            trainer.step(plain_batch(next(batches)), rate)
            shown = " ".join(f"{value:.2f}" for value in trainer.agreement)
            progress(step + 1, options.draft_steps, f"agreement {shown}")
        save_head(stored, draft_at)
        write_training_record(stored.head.shape, draft_at)


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


def main() -> None:
    """Train and save tokenizer, target and draft, in that order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models")
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--draft-steps", type=int, default=DRAFT_STEPS, help="in each round")
    parser.add_argument("--on-policy-rounds", type=int, default=24)
    parser.add_argument(
        "--from-round", type=int, default=0, help="keep the target in --out, and the draft's earlier rounds"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()

    target_at, draft_at = options.out / "demo-coder", options.out / "demo-coder-eagle31"
    recipe = TargetRecipe(steps=options.target_steps)
    corpus = load_corpus()
    print(
        f"corpus: {len(corpus.training)} training files, {len(corpus.held_out)} held out, "
        f"{len(corpus.dialogues)} dialogues",
        flush=True,
    )
    tokenizer = train_tokenizer(corpus.training, target_at)
    ids = encode_corpus(corpus, tokenizer, recipe.seed)
    print(f"corpus: {len(ids):,} tokens", flush=True)

    if options.from_round:
        target = LlamaForCausalLM.from_pretrained(target_at)
    else:
        config = target_config(tokenizer.bos_token_id, tokenizer.eos_token_id)
        target = train_target(ids, config, recipe, Progress("target"), options.device)
        save_target(target, target_at)
    build_draft(ids, target, target_at, draft_at, options)
    size = sum(path.stat().st_size for path in options.out.rglob("*.safetensors"))
    print(f"wrote {target_at} and {draft_at}: {size / 2**20:.1f} MiB of weights", flush=True)


if __name__ == "__main__":
    main()
