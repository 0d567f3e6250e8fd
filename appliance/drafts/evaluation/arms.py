"""
The arms of an evaluation, what they are asked, and the schedule of their measurements.  Pure.

The speed of a machine drifts, so the drafts are measured in turns.  If two workers fit into memory, both
run, and the drafts alternate round by round, each first every other time.  If not, each turn starts a
worker, and there are three: the draft in service, the candidate, the draft in service.  A steady drift then
affects both equally.

The target alone comes first, once: its answers do not depend on its speed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from appliance.serving.weights import Weights

TEMPERATURE = 0.8
"""Of sampled answers."""


class Arm(StrEnum):
    """One side of the comparison; persisted by these values."""

    TARGET = "target"
    """The target alone: its greedy answers are the reference."""
    INCUMBENT = "incumbent"
    """The target with the draft in service."""
    CANDIDATE = "candidate"
    """The target with the new draft."""


class Mode(StrEnum):
    """How tokens are chosen."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The weights that the worker of an arm serves."""

    target: Weights
    draft: Weights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request's prompt as the model sees it; a tenant's content, never written to disk or log."""

    request_id: str
    template: str
    """Label of the prompt's template (`appliance.serving.template`)."""
    context: str
    """Range of the context's length, such as `0-1k`."""
    token_ids: tuple[int, ...]
    seed: int
    """Of its sampled answers, the same in every arm."""
    salt: str
    """Random hex digits, sealed and erased with the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementStep:
    """One round of prompts, asked of one arm."""

    arm: Arm
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPhase:
    """Steps taken while the workers of these arms run."""

    arms: tuple[Arm, ...]
    steps: tuple[MeasurementStep, ...]

    def without(self, done: Iterable[MeasurementStep]) -> "MeasurementPhase":
        """The remaining steps and the arms that they need."""
        left = tuple(step for step in self.steps if step not in set(done))
        arms = tuple(arm for arm in self.arms if any(step.arm is arm for step in left))
        return MeasurementPhase(arms=arms, steps=left)


def plan_schedule(rounds: int, *, incumbent: bool, together: bool) -> tuple[MeasurementPhase, ...]:
    """Plan all steps; `incumbent`: there is a draft in service; `together`: two workers fit into memory."""
    first = _phase(Arm.TARGET, range(rounds))
    if not incumbent:
        return (first, _phase(Arm.CANDIDATE, range(rounds)))
    if not together:
        half = (rounds + 1) // 2
        turns = [
            _phase(Arm.INCUMBENT, range(half)),
            _phase(Arm.CANDIDATE, range(rounds)),
            _phase(Arm.INCUMBENT, range(half, rounds)),
        ]
        return (first, *(turn for turn in turns if turn.steps))
    pair = (Arm.INCUMBENT, Arm.CANDIDATE)
    steps = tuple(
        MeasurementStep(arm=arm, number=number)
        for number in range(rounds)
        for arm in (pair if number % 2 == 0 else pair[::-1])
    )
    return (first, MeasurementPhase(arms=pair, steps=steps))


def _phase(arm: Arm, numbers: Iterable[int]) -> MeasurementPhase:
    return MeasurementPhase(
        arms=(arm,), steps=tuple(MeasurementStep(arm=arm, number=number) for number in numbers)
    )
