"""
Rebuild the demo pair from this interpreter's own standard library: `python -m demo.build`.

Writes `demo-coder/` and `demo-coder-eagle31/` below --out.  With the default recipe it takes an hour
or more on two CPU cores; --target-steps and --draft-steps scale it down for a trial.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from demo.training.corpus import load_corpus
from demo.training.draft import DraftRecipe, train_draft
from demo.training.on_policy import OnPolicyRecipe
from demo.training.target import TargetRecipe, encode_corpus, save_target, target_config, train_target
from demo.training.tokenizer import train_tokenizer

TARGET_STEPS = 1200


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


def main() -> None:
    """Train and save tokenizer, target and draft, in that order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models")
    parser.add_argument("--target-steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--draft-steps", type=int, default=DraftRecipe().steps, help="in each round")
    parser.add_argument("--on-policy-rounds", type=int, default=OnPolicyRecipe().rounds)
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
    draft = DraftRecipe(
        steps=options.draft_steps,
        on_policy=OnPolicyRecipe(rounds=options.on_policy_rounds),
        from_round=options.from_round,
    )
    train_draft(ids, target, target_at, draft_at, draft, Progress, options.device)
    size = sum(path.stat().st_size for path in options.out.rglob("*.safetensors"))
    print(f"wrote {target_at} and {draft_at}: {size / 2**20:.1f} MiB of weights", flush=True)


if __name__ == "__main__":
    main()
