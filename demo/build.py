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

from demo.training.corpus import load_corpus
from demo.training.draft import DraftHead, DraftRecipe, aux_layers, load_draft, save_draft, train_draft
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


class Progress:
    """One line that is rewritten on a terminal, and printed every 50 steps elsewhere."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.started = time.monotonic()

    def __call__(self, step: int, steps: int, text: str) -> None:
        """Show where the training stands and how long it will still take."""
        left = (time.monotonic() - self.started) / step * (steps - step)
        line = f"{self.label}: step {step}/{steps}, {text}, {left / 60:.1f} min left"
        if sys.stdout.isatty():
            sys.stdout.write(f"\r\x1b[K{line}" + ("\n" if step == steps else ""))
            sys.stdout.flush()
        elif step % max(1, min(50, steps // 4)) == 0 or step == steps:
            print(line, flush=True)


def build_draft(
    ids: torch.Tensor, target: LlamaForCausalLM, draft_at: Path, options: argparse.Namespace
) -> None:
    """Train the draft round by round; it is written after each."""
    recipe = DraftRecipe(steps=options.draft_steps)
    torch.manual_seed(recipe.seed)
    head = DraftHead(target.config, target) if options.from_round <= 1 else load_draft(draft_at, target)
    for number, peak_rate in enumerate(recipe.peak_rates, start=1):
        if number < options.from_round:
            continue
        batches = windows(ids, batch=recipe.batch, window=recipe.window, seed=recipe.seed + number - 1)
        if number > 1:
            own = OnPolicyRecipe(rounds=options.on_policy_rounds, seed=recipe.seed + number - 1)
            progress = Progress(f"text for round {number}")
            rows = write_continuations(ids, target, recipe.window, own, progress, options.device)
            batches = mixed(batches, rows, batch=recipe.batch, seed=own.seed)
        progress = Progress(f"draft, round {number}")
        train_draft(head, batches, target, recipe, peak_rate, progress, options.device)
        save_draft(head, target, draft_at)
        write_training_record(target, recipe, draft_at)


def write_training_record(target: LlamaForCausalLM, recipe: DraftRecipe, draft_at: Path) -> None:
    """Write down what has no weights and decides acceptance, for `appliance draft lint`."""
    record = {
        "fc_norm": True,
        "norm_output": True,
        "norm_before_fc": False,
        "aux_layers": list(aux_layers(target.config)),
        "trained_context": recipe.window,
    }
    (draft_at / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train tokenizer, target and draft, in that order, and write them down."""
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
    build_draft(ids, target, draft_at, options)
    size = sum(path.stat().st_size for path in options.out.rglob("*.safetensors"))
    print(f"wrote {target_at} and {draft_at}: {size / 2**20:.1f} MiB of weights", flush=True)


if __name__ == "__main__":
    main()
