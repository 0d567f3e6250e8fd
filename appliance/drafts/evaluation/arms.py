"""
The words of an evaluation: who is compared, and how they are asked.
"""

from dataclasses import dataclass
from enum import StrEnum

from appliance.serving.weights import Weights


class Arm(StrEnum):
    """One side of the comparison."""

    TARGET = "target"
    """The target alone: what greedy answers have to be."""
    INCUMBENT = "incumbent"
    """The target with the draft in service."""
    CANDIDATE = "candidate"
    """The target with the new draft."""


class Mode(StrEnum):
    """How answers are chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


TEMPERATURE = 0.8
"""Of sampled answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The weights that the worker of one arm is started with."""

    target: Weights
    draft: Weights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What was asked once, as the model sees it; content of a tenant, never written anywhere."""

    request_id: str
    template: str
    """Label of the prompt's template, as `appliance.serving.template` makes them."""
    context: str
    """Range of the context's length, such as `0-1k`."""
    token_ids: tuple[int, ...]
    seed: int
    """Of its sampled answers, the same in every arm."""
    salt: str
    """Random hex digits that are stored with the content, and sealed and erased with it."""
