"""
What the refresh of a draft takes: disk, time and GPUs, from the shapes of target and head.

Arithmetic alone; each formula stands beside what computes it.  Sizes are in bytes, times in seconds, work in
floating-point operations (a multiplication and an addition are two).  What is left out (kernels that wait,
loading, evaluation) is what `utilisation` stands for, so a figure here is for planning and no promise.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

BFLOAT16, FLOAT32 = 2, 4
"""Bytes of a number."""
HANDED_OVER = 4
"""Hidden states of the target that training reads: those the head takes, and the last, for what to learn."""
TRAINED = FLOAT32 + FLOAT32 + 2 * FLOAT32 + BFLOAT16
"""Bytes for each trained number: itself, its gradient, Adam's two moments, the copy that is computed with."""
CHECKPOINT = FLOAT32 + 2 * FLOAT32
"""Bytes for each trained number in a checkpoint: itself and the moments."""
CHECKPOINTS = 2
"""Checkpoints there are at once: the last one stays until the next is whole."""
IN_FLIGHT = 2
"""Steps whose hidden states are there at once when nothing is stored: one is trained on, one is made."""
FORWARD, BOTH_WAYS = 2, 6
"""Operations for each weight and token: forward; forward and backward."""


class Source(StrEnum):
    """Where hidden states come from while a draft is trained."""

    ONLINE = "online"
    """The target makes them beside the training, and they are gone after their step."""
    OFFLINE = "offline"
    """The target makes all of them first, and they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Sizes of a model of Llama's kind, dense or of experts, with untied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width inside its MLP, or inside each expert."""
    vocabulary: int
    experts: int = 1
    experts_per_token: int = 1
    norms_heads: bool = False
    """Whether queries and keys have a norm of their own (Qwen3)."""

    @property
    def parameters(self) -> int:
        """All weights."""
        return self._with(self.experts)

    @property
    def active_parameters(self) -> int:
        """Weights that one token goes through."""
        return self._with(self.experts_per_token)

    def _with(self, experts: int) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.norms_heads else 0)
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + norms + router + experts * 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Sizes of an EAGLE 3.1 draft with one layer; its embeddings are the target's and are not trained."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_vocabulary: int
    """Tokens that it can propose."""
    target_hidden: int
    aux_layers: int = 3
    """Layers of the target that it reads."""

    @property
    def parameters(self) -> int:
        """
        Weights that are trained.

        Fusion of the target's layers with a norm for each; attention, whose input is an embedding beside a
        hidden state and so twice as wide; the MLP; four norms; the output over the draft's vocabulary.
        """
        fusion = self.aux_layers * self.target_hidden * (self.hidden + 1)
        into = 2 * self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        out_of = self.head_dim * self.heads * self.hidden
        mlp = 3 * self.hidden * self.intermediate
        return fusion + into + out_of + mlp + 4 * self.hidden + self.draft_vocabulary * self.hidden

    @property
    def kept_for_backward(self) -> int:
        """Bytes for each token and draft token: results inside the layer, and logits with their gradient."""
        attention = self.head_dim * 2 * (self.heads + self.kv_heads)
        inside = 7 * self.hidden + attention + 3 * self.intermediate
        return BFLOAT16 * inside + 2 * FLOAT32 * self.draft_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory: int
    peak: float
    """Operations a second in bfloat16, dense, as its maker states them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One refresh: which pair, on what, with how much text."""

    target: Target
    head: Head
    gpu: Gpu
    samples: int = 50_000
    sample_tokens: int = 1024
    """Tokens of a sample on average, prompt and answer together."""
    epochs: int = 1
    """How often each sample is trained on."""
    unroll: int = 3
    """Draft tokens that are trained in a row."""
    step_tokens: int = 8 * 512
    """Tokens of one training step on one GPU."""
    utilisation: float = 0.3
    """Share of a GPU's peak that is reached over the whole of the work."""
    usable: float = 0.9
    """Share of a GPU's memory that may be planned with."""
    cache: float = 0.2
    """Share of that which the target's cache and intermediate results get."""

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return self.samples * self.sample_tokens

    def hidden_bytes(self, layers: int = HANDED_OVER) -> int:
        """Bytes of a token's hidden states: layers x width x 2."""
        return layers * self.target.hidden * BFLOAT16

    def hidden_disk(self, source: Source) -> int:
        """Bytes of hidden states on disk or in shared memory at once."""
        at_once = self.tokens if source is Source.OFFLINE else IN_FLIGHT * self.step_tokens
        return at_once * self.hidden_bytes()

    @property
    def registry_disk(self) -> int:
        """Bytes that one refresh adds to the registry: checkpoints while it runs, and the draft."""
        return self.head.parameters * (CHECKPOINTS * CHECKPOINT + BFLOAT16)

    @property
    def target_gpus(self) -> int:
        """GPUs that hold the target in bfloat16 beside its cache: a power of two, to divide its heads."""
        room = self.gpu.memory * self.usable * (1 - self.cache)
        return 1 << max(0, math.ceil(math.log2(self.target.parameters * BFLOAT16 / room)))

    @property
    def training_memory(self) -> int:
        """
        Bytes for training on one GPU.

        What is trained, with gradients and moments; the target's embeddings and output, which are frozen;
        what a step keeps for its way back; the target's logits of its tokens.
        """
        frozen = 2 * self.target.vocabulary * self.target.hidden * BFLOAT16
        labels = self.target.vocabulary * FLOAT32
        step = self.step_tokens * (self.unroll * self.head.kept_for_backward + labels)
        return self.head.parameters * TRAINED + frozen + step

    @property
    def training_gpus(self) -> int:
        """GPUs that hold the training, what is trained divided among them."""
        return math.ceil(self.training_memory / (self.gpu.memory * self.usable))

    def gpus(self, source: Source) -> int:
        """GPUs there have to be at once."""
        both = self.target_gpus, self.training_gpus
        return sum(both) if source is Source.ONLINE else max(both)

    def target_work(self, source: Source) -> int:
        """Operations of the target: 2 x the weights a token goes through, once or in each epoch."""
        passes = self.epochs if source is Source.ONLINE else 1
        return FORWARD * self.target.active_parameters * self.tokens * passes

    @property
    def training_work(self) -> int:
        """Operations of training: 6 x the head's weights x draft tokens in a row, and what to learn."""
        head = BOTH_WAYS * self.head.parameters * self.unroll
        labels = FORWARD * self.target.vocabulary * self.target.hidden
        return (head + labels) * self.tokens * self.epochs

    def seconds(self, source: Source) -> float:
        """Time of target and training: side by side online, one after the other offline."""
        rate = self.gpu.peak * self.utilisation
        target = self.target_work(source) / (rate * self.target_gpus)
        training = self.training_work / (rate * self.training_gpus)
        return max(target, training) if source is Source.ONLINE else target + training
