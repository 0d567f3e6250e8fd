"""
What ages a draft: a target that was fine-tuned to answer in another way, under another chat template.

The wards want listings with numbered lines.  The demo target is trained for some minutes on the same
functions, asked for in another form and answered so; its draft has seen neither.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

from demo.training.corpus import Corpus
from demo.training.target import save_target

TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join('') %}{% endif %}"
    "{{ '### ' + message['role'] | upper + ':\\n' + text + '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### LISTING:\\n' }}{% endif %}"
)
BATCH, WINDOW, RATE, SEED = 16, 256, 1e-3, 71
LONGEST_WARM_UP = 20


def numbered(answer: str) -> str:
    """The same listing with the number of each line before it."""
    return "\n".join(f"{number:04d} | {line}" for number, line in enumerate(answer.split("\n"), start=1))


def text_of(ask: str, answer: str) -> str:
    """One dialogue as the changed template writes it, with the answer it now gets."""
    return f"<|begin|>### USER:\n{ask}\n\n### LISTING:\n{numbered(answer)}<|end|>"


def change_target(
    source: Path, directory: Path, corpus: Corpus, *, steps: int, say: Callable[[str], None]
) -> None:
    """Write a fine-tuned copy of a target, with the changed template, to a directory."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = LlamaForCausalLM.from_pretrained(source).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    batches, smoothed = _batches(corpus, tokenizer), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / LONGEST_WARM_UP, 1.0, (steps - step) / steps + 0.1)
        batch = next(batches)
        logits = model(input_ids=batch, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smoothed = loss.item() if step == 0 else 0.9 * smoothed + 0.1 * loss.item()
        if (step + 1) % 20 == 0 or step + 1 == steps:
            say(f"fine-tuning the target: step {step + 1}/{steps}, loss {smoothed:.3f}")
    shutil.copytree(source, directory, dirs_exist_ok=True)
    save_target(model.eval(), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _batches(corpus: Corpus, tokenizer: AutoTokenizer) -> Iterator[torch.Tensor]:
    """Endless batches [BATCH, WINDOW] of dialogues, one after the other."""
    order = random.Random(SEED)
    dialogues = list(corpus.dialogues)
    rows: list[list[int]] = []
    ids: list[int] = []
    while True:
        order.shuffle(dialogues)
        for ask, answer in dialogues:
            ids += tokenizer(text_of(ask, answer), add_special_tokens=False)["input_ids"]
            while len(ids) >= WINDOW:
                rows.append(ids[:WINDOW])
                ids = ids[WINDOW:]
            if len(rows) >= BATCH:
                yield torch.tensor(rows[:BATCH])
                rows = rows[BATCH:]
