"""
The arms of an evaluation, what they are asked, and the schedule of their measurements.  Pure.

The speed of a machine drifts, so the drafts are measured in turns.  If two workers fit into memory, both
run, and the drafts alternate round by round, each first every other time.  If not, each turn starts a
worker, and there are three: the draft in service, the candidate, the draft in service.  A steady drift then
affects both equally.

The target alone comes first, once: its answers do not depend on its speed.

Prompts are chosen from the held-out part of a data set by a hash of the request id: the same data set, count
and context give the same prompts in any reading order, from all kinds of traffic.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from appliance.drafts.harvest.sample import TrainingSample
from appliance.serving.weights import Weights

TEMPERATURE = 0.8
"""Of sampled answers."""
SEED_BYTES = 4
ROUNDS, MIN_IN_ROUND = 8, 2
MAX_ROUNDS, ENOUGH_IN_ROUND = 16, 4


class Arm(StrEnum):
    """One side of the comparison; persisted by these values."""

    TARGET = "target"
    """The target alone: its greedy answers are the reference."""
    INCUMBENT = "incumbent"
    CANDIDATE = "candidate"


class Mode(StrEnum):
    GREEDY = "greedy"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    target: Weights
    draft: Weights | None = None
    method: str | None = None
    """As `worker.method`; None for `eagle3` with a draft, and `none` without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request's prompt as the model sees it; a tenant's content, never written to disk or log."""

    request_id: str
    template: str
    """Its label (`appliance.serving.template`)."""
    context: str
    """Range of the context's length, such as `0-1k`."""
    token_ids: tuple[int, ...]
    seed: int
    """Of its sampled answers, the same in every arm."""
    salt: str
    """Random hex digits, sealed and erased with the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementStep:
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
    steps = tuple(MeasurementStep(arm=arm, number=number) for number in numbers)
    return MeasurementPhase(arms=(arm,), steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPrompts:
    prompts: tuple[Prompt, ...]
    """In the order in which they are asked."""
    unusable: int
    """Held-out samples without a prompt or an answer, or too long for the context."""


def choose_prompts(samples: Iterable[TrainingSample], *, count: int, room: int) -> ChosenPrompts:
    """Choose at most `count` prompts of at most `room` tokens."""
    unusable = 0

    def usable() -> Iterator[tuple[bytes, str, Prompt]]:
        nonlocal unusable
        for sample in samples:
            prompt = prompt_of(sample)
            if prompt is None or len(prompt.token_ids) > room:
                unusable += 1
            else:
                yield _order(sample.request_id), sample.request_id, prompt

    # Keeps `count` prompts in memory, however large the data set is.
    chosen = heapq.nsmallest(count, usable(), key=lambda item: item[:2])
    return ChosenPrompts(prompts=tuple(prompt for _order, _id, prompt in chosen), unusable=unusable)


def prompt_of(sample: TrainingSample) -> Prompt | None:
    """The part of a sample before its first answer token; None if it has none, or no answer."""
    if True not in sample.loss_mask or not sample.prompt:
        return None
    return Prompt(
        request_id=sample.request_id,
        template=sample.template,
        context=sample.context,
        token_ids=sample.prompt,
        seed=int.from_bytes(_order(sample.request_id)[-SEED_BYTES:]),
        salt=sample.salt,
    )


def split_rounds(prompts: tuple[Prompt, ...]) -> tuple[tuple[Prompt, ...], ...]:
    """
    Split the prompts into rounds of nearly equal size, with at least two prompts each.

    Short rounds limit the machine's drift within one and give more observations; below four prompts a round
    has no larger batches.
    """
    count = len(prompts)
    few, many = min(ROUNDS, count // MIN_IN_ROUND), min(MAX_ROUNDS, count // ENOUGH_IN_ROUND)
    rounds = max(1, few, many)
    return tuple(prompts[number::rounds] for number in range(rounds))


def _order(request_id: str) -> bytes:
    return hashlib.sha256(f"evaluation {request_id}".encode()).digest()
