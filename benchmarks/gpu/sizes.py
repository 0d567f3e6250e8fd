"""
What the steps train and measure: on a GPU, and with `--tiny` on two CPU cores in minutes.
"""

from dataclasses import dataclass

from benchmarks.speculation.verdicts import LEAST_PAIRS
from demo.training.draft import DraftRecipe
from demo.training.on_policy import OnPolicyRecipe
from demo.training.target import TargetRecipe, TargetSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of random weights, whose steps are timed."""

    name: str
    size: TargetSize
    depths: tuple[int, ...]
    """Layers that are served; costs of other depths follow from two of them, since layers cost the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    device: str
    """`worker.device` of every worker."""
    target: TargetSize
    target_recipe: TargetRecipe
    draft_recipe: DraftRecipe
    shapes: tuple[Shape, ...]
    concurrency: tuple[int, ...]
    serves_demo: bool
    """Whether the committed demo pair is served: a pair that was trained for seconds accepts nothing."""
    measured_seconds: float
    """Time for each concurrency and number of draft tokens of a step's cost."""
    tokens: int
    """Length of each answer."""
    pairs: int
    """Paired segments at each concurrency."""
    learn_seconds: float
    """Time of the monitor with each concurrency before its first pair of a sitting."""
    documents: int | None = None
    """Files of the standard library to train on; None: all."""
    draft_tokens: int = 3
    acceptance_length: float = 2.5
    """Synthetic, where weights are random."""

    @property
    def largest_batch(self) -> int:
        """Of a worker; room for all concurrent requests, and for every K in its draft-token table."""
        return max(*self.concurrency, 2 * self.draft_tokens)


LLAMA_8B = TargetSize(layers=32, width=4096, inner=14336, heads=32, kv_heads=8, vocabulary=128256)
LLAMA_70B = TargetSize(layers=80, width=8192, inner=28672, heads=64, kv_heads=8, vocabulary=128256)
FULL = Sizes(
    device="gpu",
    target=TargetSize(layers=16, width=1024, inner=2816, heads=16, kv_heads=4, vocabulary=8192),
    target_recipe=TargetRecipe(steps=700, batch=32, window=512, peak_rate=5e-4),
    draft_recipe=DraftRecipe(
        steps=600, batch=32, peak_rates=(5e-4, 2.5e-4), on_policy=OnPolicyRecipe(rounds=4, batch=512)
    ),
    # Half of the memory of an 80 GB GPU holds 20 layers of the larger shape.
    shapes=(
        Shape(name="8b", size=LLAMA_8B, depths=(32,)),
        Shape(name="70b", size=LLAMA_70B, depths=(10, 20)),
    ),
    concurrency=(1, 4, 16, 64, 256),
    serves_demo=False,
    measured_seconds=2.0,
    tokens=256,
    pairs=LEAST_PAIRS,
    learn_seconds=6.0,
)
SMALL = TargetSize(layers=6, width=64, inner=176, heads=2, kv_heads=1, vocabulary=512)
TINY = Sizes(
    device="cpu",
    target=SMALL,
    target_recipe=TargetRecipe(steps=30, batch=4, window=64),
    draft_recipe=DraftRecipe(steps=10, batch=4, on_policy=OnPolicyRecipe(rounds=1, batch=4)),
    shapes=(Shape(name="tiny", size=SMALL, depths=(6,)),),
    concurrency=(1, 4),
    serves_demo=True,
    measured_seconds=1.0,
    tokens=32,
    pairs=2,
    learn_seconds=5.0,
    documents=30,
)
