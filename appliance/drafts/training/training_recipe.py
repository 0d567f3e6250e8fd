"""The hyperparameters of a training, their defaults and the learning-rate schedule."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from appliance.errors import ConfigurationError

STEPS = 1000
DEMO_WIDTH, DEMO_RATE = 256, 2e-3
"""The demo draft's width, and the peak rate it was trained from scratch with."""
TIME_PARTS = 100_000
"""Resolution of the learning-rate schedule of a training limited by time."""
MIN_WINDOW_DRAFTS = 4
"""Minimum window, in multiples of the tokens that one draft spans."""


class Backend(StrEnum):
    SMALL = "small"
    """The built-in loop: one process, no server, with or without a GPU."""
    SPECULATORS = "speculators"
    """The speculators library with a vLLM server for hidden states: large models, GPUs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """Everything about a training but its data and its starting point."""

    steps: int | None = STEPS
    """Optimiser steps; None if `minutes` limits the training."""
    minutes: float | None = None
    """Minutes of training without loading; None if `steps` limits it."""
    batch: int = 8
    """Windows per step."""
    window: int = 512
    """Maximum tokens that target and draft see at once."""
    unroll: int = 3
    """Draft tokens trained in a row (training-time test)."""
    decay: float = 0.9
    """Weight of a draft token's loss relative to the previous one's."""
    rate: float = DEMO_RATE
    """Peak learning rate."""
    seed: int = 32
    corpus_share: float = 0.0
    """Share of a step's windows taken from general text."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigurationError("give --steps or --minutes, not both")
        if (self.steps is not None and self.steps < 1) or (self.minutes is not None and self.minutes <= 0):
            raise ConfigurationError("--steps must be at least 1, --minutes above 0")
        if self.batch < 1 or self.unroll < 1:
            raise ConfigurationError("--batch and --unroll must be at least 1")
        if self.window < MIN_WINDOW_DRAFTS * (self.unroll + 2):
            minimum = MIN_WINDOW_DRAFTS * (self.unroll + 2)
            raise ConfigurationError(
                f"--window {self.window} is too short for --unroll {self.unroll}: the minimum is {minimum}"
            )
        if not (0 < self.decay <= 1 and self.rate > 0 and 0 <= self.corpus_share < 1):
            raise ConfigurationError(
                "--rate must be above 0, --decay above 0 and at most 1, --corpus-share at least 0 and below 1"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(**content)


def default_rate(width: int, *, is_refresh: bool) -> float:
    """Peak learning rate; falls with the width as in published recipes (1e-4 at 4096), half for a refresh."""
    from_nothing = min(DEMO_RATE, DEMO_RATE * DEMO_WIDTH / width)
    return from_nothing / 2 if is_refresh else from_nothing


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rate of the zero-based `step`: linear warm-up, then a cosine down to a tenth of the peak."""
    warm_up = max(1, steps // 25)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def timed_rate(elapsed: float, total: float, peak: float) -> float:
    return learning_rate(min(TIME_PARTS - 1, int(elapsed / total * TIME_PARTS)), TIME_PARTS, peak)
