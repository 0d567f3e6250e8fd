"""
The demo target: a Llama trained from scratch, by default of 8 layers of width 256.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from appliance.drafts.training.small.files import load_checkpoint, save_checkpoint
from appliance.drafts.training.small.target import mixed_precision
from appliance.drafts.training.training_recipe import learning_rate
from demo.training.corpus import Corpus
from demo.training.tokenizer import ASSISTANT, BEGIN, END, USER, VOCABULARY


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecipe:
    """`steps` batches of `batch` windows of `window` tokens."""

    steps: int
    batch: int = 16
    window: int = 256
    peak_rate: float = 1.5e-3
    seed: int = 31


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """Sizes of the target; by default those of the demo target."""

    layers: int = 8
    width: int = 256
    inner: int = 704
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = VOCABULARY


DEMO_SIZE = TargetSize()


def target_config(begin: int, end: int, size: TargetSize = DEMO_SIZE) -> LlamaConfig:
    """Config of a target with these ids of the first and the last token of a text."""
    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.width // size.heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=end,
        dtype=torch.bfloat16,
    )


def encode_corpus(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> torch.Tensor:
    """All training text as one run of token ids, documents and dialogues shuffled together."""
    documents = [BEGIN + text + END for text in corpus.training]
    # Dialogues are short: grouped, so that shuffling spreads them evenly between whole files.
    turns = [f"{BEGIN}{USER}{ask}{END}{ASSISTANT}{answer}{END}" for ask, answer in corpus.dialogues]
    random.Random(seed).shuffle(turns)
    documents += ["".join(turns[i : i + 20]) for i in range(0, len(turns), 20)]
    random.Random(seed).shuffle(documents)
    ids: list[int] = []
    for start in range(0, len(documents), 64):
        for piece in tokenizer(documents[start : start + 64])["input_ids"]:
            ids.extend(piece)
    return torch.tensor(ids, dtype=torch.long)


def windows(ids: torch.Tensor, *, batch: int, window: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches [batch, window]: every window once a pass, offsets moved each pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(window, (1,), generator=generator))
        usable = (len(ids) - offset) // window
        rows = ids[offset : offset + usable * window].view(usable, window)
        order = torch.randperm(usable, generator=generator)
        for start in range(0, usable - batch + 1, batch):
            yield rows[order[start : start + batch]]


def never() -> bool:
    return False


def train_target(
    ids: torch.Tensor,
    config: LlamaConfig,
    recipe: TargetRecipe,
    report: Callable[[int, int, str], None],
    device: str,
    run: Path | None = None,
    is_stopped: Callable[[], bool] = never,
) -> LlamaForCausalLM | None:
    """
    Train by next-token prediction; `report(step, steps, text)` is called at each step.

    None if `is_stopped` ended it: a call with the same `run`, the directory of its checkpoint, resumes it.
    """
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(config).float().to(device).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.peak_rate,
        betas=(0.9, 0.95),
    )
    done, smoothed = 0, 0.0
    if run is not None and (state := load_checkpoint(run)) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, smoothed = state["step"], state["loss"]
    batches = windows(ids, batch=recipe.batch, window=recipe.window, seed=recipe.seed)
    for step, rows in enumerate(islice(batches, done, recipe.steps), start=done):
        if run is not None and is_stopped():
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(run, {**state, "step": step, "loss": smoothed})
            return None
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.steps, recipe.peak_rate)
        batch = rows.to(device)
        with mixed_precision(device):
            logits = model(input_ids=batch, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smoothed = loss.item() if step == 0 else 0.95 * smoothed + 0.05 * loss.item()
        report(step + 1, recipe.steps, f"loss {smoothed:.3f}")
    return model.eval()


def save_target(model: LlamaForCausalLM, directory: Path) -> None:
    """Write bfloat16 safetensors and config next to the tokenizer's files."""
    model.to(torch.bfloat16).save_pretrained(directory, safe_serialization=True)
