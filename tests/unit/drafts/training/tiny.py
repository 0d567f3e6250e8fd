"""
A target of width 32 and data for it, small enough to train in a test.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from appliance.drafts.training.training_job import Job, JobSample, TrainingSet
from appliance.drafts.training.training_recipe import TrainingRecipe

WIDTH, LAYERS, VOCABULARY = 32, 4, 61
torch.set_num_threads(1)  # more of them only wait for each other on numbers as small as these
TARGET, PARENT, DATASET = ("sha256:" + sign * 64 for sign in "abc")


def write_target(directory: Path, *, layers: int = LAYERS, seed: int = 1) -> Path:
    """A target with peaked distributions, the same for the same seed."""
    torch.manual_seed(seed)
    disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        model.lm_head.weight.mul_(6)
    model.save_pretrained(directory)
    return directory


@dataclass
class Text:
    """Any text."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def text(length: int, prompt: int, seed: int = 0) -> Text:
    """A prompt, and an answer after it."""
    chance = random.Random(seed)
    ids = tuple(chance.randrange(2, VOCABULARY) for _ in range(length))
    return Text(token_ids=ids, loss_mask=(False,) * prompt + (True,) * (length - prompt))


def samples(count: int = 12, *, held_out: int = 2) -> TrainingSet:
    """Samples of several lengths, the last ones held out."""
    made = []
    for number in range(count):
        one = text(12 + 5 * (number % 4), 4, seed=number)
        made.append(
            JobSample(
                request_id=f"req-{number:03}",
                digest=f"{number:064x}",
                held_out=number >= count - held_out,
                token_ids=one.token_ids,
                loss_mask=one.loss_mask,
            )
        )
    return TrainingSet(samples=tuple(made), missing=3)


def job(run: Path, target: Path, *, parent: Path | None = None, **recipe) -> Job:
    """A training of some steps on a CPU."""
    numbers = {"steps": 12, "batch": 4, "window": 24, "unroll": 3, "rate": 5e-3, **recipe}
    return Job(
        run=str(run),
        target=str(target),
        target_digest=TARGET,
        parent=None if parent is None else str(parent),
        parent_digest=None if parent is None else PARENT,
        dataset=DATASET,
        recipe=TrainingRecipe(**numbers),
        device="cpu",
    )


@dataclass
class FakeEntry:
    """As a manifest has it."""

    request_id: str
    digest: str


@dataclass
class FakeManifest:
    """Of a data set."""

    samples: list[FakeEntry]
    target: str = TARGET
    digest: str = DATASET


@dataclass
class FakeDataset:
    """A data set as training reads it."""

    given: TrainingSet
    erased: set[str] = field(default_factory=set)
    withheld: int = 0
    missing: int = 0

    @property
    def manifest(self) -> FakeManifest:
        return FakeManifest([FakeEntry(sample.request_id, sample.digest) for sample in self.given.samples])

    def read(self, held_out: bool):
        for sample in self.given.held_out if held_out else self.given.training:
            if sample.request_id in self.erased:
                self.missing += 1
            else:
                yield sample
