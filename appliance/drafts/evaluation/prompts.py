"""
Chooses the prompts of an evaluation from the held-out part of a data set.

The choice is by a hash of the request id: the same data set, count and context give the same prompts in any
reading order, from all kinds of traffic.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from appliance.drafts.evaluation.arms import Prompt
from appliance.drafts.harvest.sample import TrainingSample

SEED_BYTES = 4
ROUNDS, MIN_IN_ROUND = 8, 2
MAX_ROUNDS, ENOUGH_IN_ROUND = 16, 4


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
