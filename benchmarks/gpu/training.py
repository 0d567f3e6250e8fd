"""
The steps that train a pair: `target`, then `draft`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.steps import Found, Slice
from demo.build import Progress
from demo.training.corpus import load_corpus
from demo.training.draft import train_draft
from demo.training.target import encode_corpus, save_target, target_config, train_target
from demo.training.tokenizer import train_tokenizer

TARGET, DRAFT, IDS = "gpu-coder", "gpu-coder-eagle31", "ids.pt"


def pair_of(sizes: Sizes, state: Path) -> tuple[Path, Path]:
    """The directories of the pair that is served."""
    return (DEMO_TARGET, DEMO_DRAFT) if sizes.serves_demo else (state / TARGET, state / DRAFT)


class Last:
    """Shows progress, and keeps the last line of it."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, label: str) -> Callable[[int, int, str], None]:
        shown = Progress(label)

        def report(step: int, steps: int, text: str) -> None:
            self.text = text
            shown(step, steps, text)

        return report


def train_the_target(sizes: Sizes, part: Slice) -> Found | None:
    recipe, directory = sizes.target_recipe, part.state / TARGET
    ids_at = part.state / IDS
    if not ids_at.exists():
        corpus, few = load_corpus(), sizes.documents
        corpus = replace(corpus, training=corpus.training[:few], dialogues=corpus.dialogues[:few])
        tokenizer = train_tokenizer(corpus.training, directory, sizes.target.vocabulary)
        torch.save(encode_corpus(corpus, tokenizer, recipe.seed), ids_at.with_suffix(".part"))
        ids_at.with_suffix(".part").replace(ids_at)
    ids, tokenizer = torch.load(ids_at), PreTrainedTokenizerFast.from_pretrained(directory)
    config, last = target_config(tokenizer.bos_token_id, tokenizer.eos_token_id, sizes.target), Last()
    run = part.state / "target-run"
    run.mkdir(exist_ok=True)
    model = train_target(ids, config, recipe, last("target"), _device(sizes), run, part.is_over)
    if model is None:
        return None
    save_target(model, directory)
    return {
        "parameters": model.num_parameters(),
        "tokens": len(ids),
        "steps": recipe.steps,
        "batch": recipe.batch,
        "window": recipe.window,
        "reached": last.text,
    }


def train_the_draft(sizes: Sizes, part: Slice) -> Found | None:
    recipe, last, target_at = sizes.draft_recipe, Last(), part.state / TARGET
    target = LlamaForCausalLM.from_pretrained(target_at)
    run = part.state / "draft-run"
    run.mkdir(exist_ok=True)
    ids = torch.load(part.state / IDS)
    finished = train_draft(
        *(ids, target, target_at, part.state / DRAFT, recipe, last, _device(sizes)),
        run=run,
        is_stopped=part.is_over,
    )
    if not finished:
        return None
    return {
        "rounds": len(recipe.peak_rates),
        "steps": recipe.steps,
        "batch": recipe.batch,
        "reached": last.text,
    }


def _device(sizes: Sizes) -> str:
    return "cuda" if sizes.device == "gpu" else "cpu"
