"""
Text the target writes itself: what a draft will have to predict when it serves.

A draft trained on the corpus alone is judged on text it never sees in service.  Half of these
continuations are greedy, half are sampled, so that the draft knows both ways of decoding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from demo.training.target import windows


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyRecipe:
    """`rounds` batches of `batch` prompts of `prompt` tokens each."""

    rounds: int = 24
    batch: int = 128
    prompt: int = 64
    seed: int = 33


def write_continuations(
    ids: torch.Tensor,
    target: LlamaForCausalLM,
    window: int,
    recipe: OnPolicyRecipe,
    report: Callable[[int, int, str], None],
    device: str,
) -> torch.Tensor:
    """Rows [rounds * batch, window]: a prompt from the corpus and the target's continuation."""
    torch.manual_seed(recipe.seed)
    target = target.float().to(device).eval()
    prompts = windows(ids, batch=recipe.batch, window=recipe.prompt, seed=recipe.seed)
    rows = []
    for number in range(recipe.rounds):
        prompt = next(prompts).to(device)
        sampling = {"do_sample": False} if number % 2 == 0 else {"do_sample": True, "temperature": 0.8}
        with torch.no_grad():
            written = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=window - recipe.prompt,
                max_new_tokens=window - recipe.prompt,
                pad_token_id=target.config.pad_token_id,
                **sampling,
            )
        rows.append(written.cpu())
        report(number + 1, recipe.rounds, f"{(number + 1) * recipe.batch} continuations")
    return torch.cat(rows)


def mixed(
    corpus: Iterator[torch.Tensor], rows: torch.Tensor, *, batch: int, seed: int
) -> Iterator[torch.Tensor]:
    """Endless batches: the first half of each from the corpus, the rest from `rows`."""
    generator = torch.Generator().manual_seed(seed)
    half = batch // 2
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(rows) - half + 1, half):
            yield torch.cat([next(corpus)[: batch - half], rows[order[start : start + half]]])
