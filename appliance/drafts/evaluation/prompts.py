"""
Choose the prompts of an evaluation from the held-out part of a data set.

The same data set, number and context give the same prompts, whatever the order it is read in: the
choice goes by a hash of the request's id, so no kind of traffic comes first.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from appliance.drafts.evaluation.arms import Prompt
from appliance.drafts.harvest.sample import Sample

SEED_BYTES = 4
FEW_ROUNDS, LEAST_IN_ROUND = 8, 2
MOST_ROUNDS, ENOUGH_IN_ROUND = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The prompts, in the order they are asked."""

    prompts: tuple[Prompt, ...]
    unusable: int
    """Held-out samples without a prompt or an answer, or too long for the context."""


def choose_prompts(samples: Iterable[Sample], *, count: int, room: int) -> Chosen:
    """
    Choose prompts.

    Args:
        samples: held-out samples, in any order.
        count: most prompts to choose.
        room: longest prompt in tokens, so that the answer still fits the context.
    """
    unusable = 0

    def usable() -> Iterator[tuple[bytes, str, Prompt]]:
        nonlocal unusable
        for sample in samples:
            prompt = prompt_of(sample)
            if prompt is None or len(prompt.token_ids) > room:
                unusable += 1
            else:
                yield _order(sample.request_id), sample.request_id, prompt

    # Held are `count` prompts at a time, however large the data set is.
    chosen = heapq.nsmallest(count, usable(), key=lambda item: item[:2])
    return Chosen(prompts=tuple(prompt for _order, _id, prompt in chosen), unusable=unusable)


def prompt_of(sample: Sample) -> Prompt | None:
    """The part of a sample before the first token of an answer; None where there is none, or no answer."""
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
    The prompts in rounds of nearly the same size, two prompts or more in each.

    The shorter a round, the less a machine changes within it, and the more rounds there are to tell how
    much they differ; but below four prompts a round has no larger batches.
    """
    count = len(prompts)
    few, many = min(FEW_ROUNDS, count // LEAST_IN_ROUND), min(MOST_ROUNDS, count // ENOUGH_IN_ROUND)
    rounds = max(1, few, many)
    return tuple(prompts[number::rounds] for number in range(rounds))


def _order(request_id: str) -> bytes:
    return hashlib.sha256(f"evaluation {request_id}".encode()).digest()
