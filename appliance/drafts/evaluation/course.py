"""
The order in which the arms of an evaluation are measured.  Pure.

A machine is faster now than in an hour, so what is compared has to be measured by turns.  Where two
workers fit into memory, the drafts take turns round by round, the other one first each time.  Where
they do not, a worker has to be started for each turn, and there are three: the draft in service, the
new one, the draft in service.  A steady drift then weighs as much on one as on the other.

The target alone comes first, and once: what it is asked for does not depend on how fast it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.drafts.evaluation.arms import Arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round of prompts, asked of one arm."""

    arm: Arm
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Steps taken while the workers of these arms run."""

    arms: tuple[Arm, ...]
    steps: tuple[Step, ...]

    def without(self, done: Iterable[Step]) -> "Shift":
        """What is left of it."""
        left = tuple(step for step in self.steps if step not in set(done))
        arms = tuple(arm for arm in self.arms if any(step.arm is arm for step in left))
        return Shift(arms=arms, steps=left)


def plan_course(rounds: int, *, incumbent: bool, together: bool) -> tuple[Shift, ...]:
    """
    Decide who is measured when.

    Args:
        rounds: parts that the prompts were split into.
        incumbent: whether there is a draft in service to compare with.
        together: whether two workers fit into memory.
    """
    first = _shift(Arm.TARGET, range(rounds))
    if not incumbent:
        return (first, _shift(Arm.CANDIDATE, range(rounds)))
    if not together:
        half = (rounds + 1) // 2
        turns = [
            _shift(Arm.INCUMBENT, range(half)),
            _shift(Arm.CANDIDATE, range(rounds)),
            _shift(Arm.INCUMBENT, range(half, rounds)),
        ]
        return (first, *(turn for turn in turns if turn.steps))
    pair = (Arm.INCUMBENT, Arm.CANDIDATE)
    steps = tuple(
        Step(arm=arm, number=number)
        for number in range(rounds)
        for arm in (pair if number % 2 == 0 else pair[::-1])
    )
    return (first, Shift(arms=pair, steps=steps))


def _shift(arm: Arm, numbers: Iterable[int]) -> Shift:
    return Shift(arms=(arm,), steps=tuple(Step(arm=arm, number=number) for number in numbers))
