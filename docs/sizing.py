"""
Planning table of docs/how-to/refresh-the-draft.md: disk, time and GPUs.  Run `python -m docs.sizing`.

Arithmetic over the published shapes of three pairs on one kind of GPU.  Sizes are in bytes, times in
seconds, work in floating-point operations (a multiplication and an addition are two).  `utilisation` covers
what is not modelled (launch gaps, loading, evaluation): the figures are for planning only.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

BFLOAT16, FLOAT32 = 2, 4
"""Bytes of a number."""
HANDED_OVER = 4
"""Hidden states of the target that training reads: those of the aux layers, and the last one."""
TRAINED = FLOAT32 + FLOAT32 + 2 * FLOAT32 + BFLOAT16
"""Bytes per trained weight: itself, its gradient, Adam's two moments, and its bfloat16 copy."""
CHECKPOINT = FLOAT32 + 2 * FLOAT32
"""Bytes per trained weight in a checkpoint: itself and the moments."""
CHECKPOINTS = 2
"""Checkpoints on disk at once: the last one stays until the next is complete."""
IN_FLIGHT = 2
"""Steps whose hidden states exist at once when nothing is stored: one in training, one being made."""
FORWARD, BOTH_WAYS = 2, 6
"""Operations per weight and token: forward; forward and backward."""


class Source(StrEnum):
    ONLINE = "online"
    """The target computes them during training; they are dropped after their step."""
    OFFLINE = "offline"
    """The target computes all of them first; they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Sizes of a Llama-like model, dense or mixture of experts, with untied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of each expert."""
    vocabulary: int
    experts: int = 1
    experts_per_token: int = 1
    norms_heads: bool = False
    """Whether queries and keys have a norm (Qwen3)."""

    @property
    def parameters(self) -> int:
        return self._with(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights used per token."""
        return self._with(self.experts_per_token)

    def _with(self, experts: int) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.norms_heads else 0)
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + norms + router + experts * 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Sizes of an EAGLE 3.1 draft with one layer; it shares the target's frozen embeddings."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_vocabulary: int
    """Tokens it can propose."""
    target_hidden: int
    aux_layers: int = 3

    @property
    def parameters(self) -> int:
        """
        Trained weights.

        Fusion of the target's layers with a norm for each; attention, whose input (an embedding and a
        hidden state) is twice as wide; the MLP; four norms; the output over the draft's vocabulary.
        """
        fusion = self.aux_layers * self.target_hidden * (self.hidden + 1)
        into = 2 * self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        out_of = self.head_dim * self.heads * self.hidden
        mlp = 3 * self.hidden * self.intermediate
        return fusion + into + out_of + mlp + 4 * self.hidden + self.draft_vocabulary * self.hidden

    @property
    def kept_for_backward(self) -> int:
        """Bytes per token and draft token: activations of the layer, logits and their gradient."""
        attention = self.head_dim * 2 * (self.heads + self.kv_heads)
        inside = 7 * self.hidden + attention + 3 * self.intermediate
        return BFLOAT16 * inside + 2 * FLOAT32 * self.draft_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory: int
    peak: float
    """Operations per second in bfloat16, dense, from the data sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One refresh: pair, GPU, amount of text."""

    target: Target
    head: Head
    gpu: Gpu
    samples: int = 50_000
    sample_tokens: int = 1024
    """Mean tokens of a sample, prompt and answer together."""
    epochs: int = 1
    unroll: int = 3
    """Draft tokens trained in a row."""
    step_tokens: int = 8 * 512
    """Tokens of one training step on one GPU."""
    utilisation: float = 0.3
    """Share of a GPU's peak reached over the whole run."""
    usable: float = 0.9
    """Share of a GPU's memory available for planning."""
    cache: float = 0.2
    """Share of that for the target's cache and activations."""

    @property
    def tokens(self) -> int:
        return self.samples * self.sample_tokens

    def hidden_bytes(self, layers: int = HANDED_OVER) -> int:
        return layers * self.target.hidden * BFLOAT16

    def hidden_disk(self, source: Source) -> int:
        """Peak bytes of hidden states on disk or in shared memory."""
        at_once = self.tokens if source is Source.OFFLINE else IN_FLIGHT * self.step_tokens
        return at_once * self.hidden_bytes()

    @property
    def registry_disk(self) -> int:
        """Bytes one refresh adds to the registry: checkpoints during training, and the draft."""
        return self.head.parameters * (CHECKPOINTS * CHECKPOINT + BFLOAT16)

    @property
    def target_gpus(self) -> int:
        """GPUs that hold the target in bfloat16 and its cache: a power of two, to divide its heads."""
        room = self.gpu.memory * self.usable * (1 - self.cache)
        return 1 << max(0, math.ceil(math.log2(self.target.parameters * BFLOAT16 / room)))

    @property
    def training_memory(self) -> int:
        """
        Bytes for training on one GPU.

        Trained weights with gradients and moments; the target's frozen embeddings and output; activations
        kept for the backward pass; the target's logits.
        """
        frozen = 2 * self.target.vocabulary * self.target.hidden * BFLOAT16
        labels = self.target.vocabulary * FLOAT32
        step = self.step_tokens * (self.unroll * self.head.kept_for_backward + labels)
        return self.head.parameters * TRAINED + frozen + step

    @property
    def training_gpus(self) -> int:
        """GPUs that hold the training state, sharded."""
        return math.ceil(self.training_memory / (self.gpu.memory * self.usable))

    def gpus(self, source: Source) -> int:
        """GPUs needed at the same time."""
        both = self.target_gpus, self.training_gpus
        return sum(both) if source is Source.ONLINE else max(both)

    def target_work(self, source: Source) -> int:
        """Operations of the target: 2 x active weights x tokens, once (offline) or per epoch (online)."""
        passes = self.epochs if source is Source.ONLINE else 1
        return FORWARD * self.target.active_parameters * self.tokens * passes

    @property
    def training_work(self) -> int:
        """Operations of training: 6 x the head's weights per draft token, and the target's logits."""
        head = BOTH_WAYS * self.head.parameters * self.unroll
        labels = FORWARD * self.target.vocabulary * self.target.hidden
        return (head + labels) * self.tokens * self.epochs

    def seconds(self, source: Source) -> float:
        """Time of target and training: overlapping online, one after the other offline."""
        rate = self.gpu.peak * self.utilisation
        target = self.target_work(source) / (rate * self.target_gpus)
        training = self.training_work / (rate * self.training_gpus)
        return max(target, training) if source is Source.ONLINE else target + training


PAGE = Path(__file__).parent / "how-to" / "refresh-the-draft.md"
BEGIN, END = "<!-- Written by `python -m docs.sizing`. -->\n", "<!-- Until here. -->\n"

H100 = Gpu(name="H100 SXM, 80 GB", memory=80 * 10**9, peak=989.4e12)
"""NVIDIA's data sheet: 80 GB; 1,979 TFLOPS in bfloat16 with sparsity, half of that without."""

# Shapes as in each model's config.json; heads as SpecForge's configs have them (llama3-70B-ealge3.json,
# qwen3-30B-A3B-eagle3.1.json; the 8B alike), with 32,000 tokens to propose.
PAIRS = (
    (
        Target(
            name="Llama-3.1-8B",
            hidden=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=14336,
            vocabulary=128256,
        ),
        Head(
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=14336,
            draft_vocabulary=32000,
            target_hidden=4096,
        ),
    ),
    (
        Target(
            name="Llama-3.1-70B",
            hidden=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            intermediate=28672,
            vocabulary=128256,
        ),
        Head(
            hidden=8192,
            heads=64,
            kv_heads=8,
            head_dim=128,
            intermediate=28672,
            draft_vocabulary=32000,
            target_hidden=8192,
        ),
    ),
    (
        Target(
            name="Qwen3-30B-A3B",
            hidden=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            intermediate=768,
            vocabulary=151936,
            experts=128,
            experts_per_token=8,
            norms_heads=True,
        ),
        Head(
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            intermediate=12288,
            draft_vocabulary=32000,
            target_hidden=2048,
        ),
    ),
)


def plans() -> tuple[Plan, ...]:
    return tuple(Plan(target=target, head=head, gpu=H100) for target, head in PAIRS)


def sizing_table() -> str:
    columns = [_column(plan) for plan in plans()]
    lines = ["| | " + " | ".join(plan.target.name for plan in plans()) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    lines += [f"| {name} | " + " | ".join(column[name] for column in columns) + " |" for name in columns[0]]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{sizing_table()}\n{END}{after}"


def _column(plan: Plan) -> dict[str, str]:
    online, offline = Source.ONLINE, Source.OFFLINE
    return {
        "weights of the target, and those a token goes through": (
            f"{_billions(plan.target.parameters)}, {_billions(plan.target.active_parameters)}"
        ),
        "weights of the head": _billions(plan.head.parameters),
        "hidden states of one token": f"{plan.hidden_bytes() / 1024:.0f} KiB",
        "hidden states on disk, offline": _bytes(plan.hidden_disk(offline)),
        "hidden states at once, online": _bytes(plan.hidden_disk(online)),
        "registry: checkpoints and the draft": _bytes(plan.registry_disk),
        "memory for training, one GPU": _bytes(plan.training_memory),
        "GPUs, offline": str(plan.gpus(offline)),
        "GPUs, online (target + training)": (
            f"{plan.gpus(online)} ({plan.target_gpus} + {plan.training_gpus})"
        ),
        "hours, offline": f"{plan.seconds(offline) / 3600:.1f}",
        "hours, online": f"{plan.seconds(online) / 3600:.1f}",
    }


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B"


def _bytes(number: int) -> str:
    return f"{number / 1e12:.2f} TB" if number >= 10**12 else f"{number / 1e9:.1f} GB"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the table of {PAGE.name}")


if __name__ == "__main__":
    main()
