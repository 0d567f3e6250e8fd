"""
How a draft is trained: the numbers an operator may choose, and what they are unless chosen.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from appliance.errors import ConfigurationError

STEPS = 1000
"""Steps of a run of which neither steps nor minutes were said."""
USUAL_WIDTH, USUAL_RATE = 256, 2e-3
"""Peak rate that the demo draft was trained with from nothing, and its width."""
FEWEST_ROOM = 4
"""A window has at least so many times the tokens that one draft reaches over."""


class Backend(StrEnum):
    """What carries a training out."""

    SMALL = "small"
    """The loop of ours: one process, no server, a GPU or none."""
    SPECULATORS = "speculators"
    """The library, beside a vLLM server that hands out hidden states: large models, GPUs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training, but for its data and what it starts from."""

    steps: int | None = STEPS
    """Optimiser steps; None where time decides."""
    minutes: float | None = None
    """Minutes of training, loading not counted; None where steps decide."""
    batch: int = 8
    """Windows of one step."""
    window: int = 512
    """Most tokens that target and draft see at once."""
    unroll: int = 3
    """Draft tokens that are trained in a row (training-time test)."""
    decay: float = 0.9
    """How much a draft token's loss counts against that of the one before it."""
    rate: float = USUAL_RATE
    """Highest learning rate."""
    seed: int = 32
    corpus_share: float = 0.0
    """Share of a step's windows that come from general text."""

    def __post_init__(self) -> None:
        """Refuse what makes no training; raises ConfigurationError."""
        if (self.steps is None) == (self.minutes is None):
            raise ConfigurationError("say --steps or --minutes, not both")
        if (self.steps is not None and self.steps < 1) or (self.minutes is not None and self.minutes <= 0):
            raise ConfigurationError("a training takes at least one step, and more than 0 minutes")
        if self.batch < 1 or self.unroll < 1:
            raise ConfigurationError("--batch and --unroll are at least 1")
        if self.window < FEWEST_ROOM * (self.unroll + 2):
            fewest = FEWEST_ROOM * (self.unroll + 2)
            raise ConfigurationError(
                f"--window {self.window} is too short to draft {self.unroll} tokens in: say at least {fewest}"
            )
        if not (0 < self.decay <= 1 and self.rate > 0 and 0 <= self.corpus_share < 1):
            raise ConfigurationError(
                "--rate is above 0, --decay above 0 and at most 1, --corpus-share at least 0 and below 1"
            )

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read it back; raises TypeError for a field that is unknown."""
        return cls(**content)


def usual_rate(width: int, *, is_refresh: bool) -> float:
    """
    Highest learning rate for a head `width` wide.

    It falls with the width, as that of published recipes does (1e-4 at a width of 4096), and a draft that
    has learnt already gets half of it.
    """
    from_nothing = min(USUAL_RATE, USUAL_RATE * USUAL_WIDTH / width)
    return from_nothing / 2 if is_refresh else from_nothing
