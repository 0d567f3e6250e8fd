"""
One step of an evaluation: a round of prompts, asked of one arm's worker.

The target alone is asked greedily, with the likeliest tokens at each position.  An arm with a draft is
asked greedily one at a time, then for samples several at a time, and then for some of both once more
with drafting switched off.  Two processes of one program may differ in speed by a tenth for as long as
they live, so what a draft gains is measured within one process, within a minute or so, and only these
gains are compared with each other.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from appliance.drafts.evaluation.arms import Arm, Mode, Prompt
from appliance.drafts.evaluation.asking import Completion, ask_all
from appliance.drafts.evaluation.results import Answered, Pace, StepResult
from appliance.drafts.evaluation.trail import near_tokens, trail_of
from appliance.drafts.evaluation.worker import Running
from appliance.errors import WorkerFailedError
from appliance.gateway.cost.saving import since
from appliance.serving.plugin_client import Steer
from appliance.speculation.values import EngineReading, Reason, SpeculationMode

AT_ONCE = 4
"""Samples asked for together."""
NEAR = 1.0
"""Tokens beside the target's own answer that are less likely by more than this (logarithm) are not kept."""
WARM_UP_TOKENS = 16
WARM_UP_PROMPT = 8
PLUGIN_SECONDS = 30.0
TRIES, PAUSE_SECONDS = 4, 2.0
"""Of questions to the plugin: the engine of a machine that is busy elsewhere may be too slow for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Some of the prompts."""

    number: int
    places: tuple[int, ...]
    """Where each of them stands among all prompts."""
    prompts: tuple[Prompt, ...]


async def warm_up(server: Running, prompt: Prompt) -> None:
    """
    Have a worker answer something short, so that what it does only once is done.

    Raises:
        WorkerFailedError: it did not answer.
    """
    short = replace(prompt, token_ids=prompt.token_ids[:WARM_UP_PROMPT])
    for mode in Mode:
        await server.asker.ask(short, mode, max_tokens=WARM_UP_TOKENS)


async def measure(server: Running, turn: Round, *, draft_tokens: int) -> StepResult:
    """
    Take one step.

    Args:
        server: the arm's worker.
        turn: what is asked.
        draft_tokens: most draft tokens a step (K).

    Raises:
        WorkerFailedError: the worker failed, or answered something else than it should.
    """
    if server.arm is Arm.TARGET:
        return StepResult(arm=server.arm, number=turn.number, answered=await _own_answers(server, turn))
    before, problem = await _choose(server, draft_tokens)
    greedy = await _ask(server, Mode.GREEDY, turn.prompts)
    sampled = await _ask(server, Mode.SAMPLED, turn.prompts)
    answered = (*_drafted(Mode.GREEDY, turn, greedy), *_drafted(Mode.SAMPLED, turn, sampled))
    if problem:
        return StepResult(arm=server.arm, number=turn.number, answered=answered, problem=problem)
    paces = _paces(before, await _read(server))
    before, problem = await _choose(server, 0)
    if not problem:
        # As many at once as with drafts: steps are compared with steps of the same batch bucket.
        some = max((len(turn.prompts) + 1) // 2, min(AT_ONCE, len(turn.prompts)))
        await _ask(server, Mode.GREEDY, turn.prompts[: max(1, some // 2)])
        await _ask(server, Mode.SAMPLED, turn.prompts[:some])
        paces += _paces(before, await _read(server))
    return StepResult(arm=server.arm, number=turn.number, answered=answered, paces=paces, problem=problem)


async def _own_answers(server: Running, turn: Round) -> tuple[Answered, ...]:
    ask = partial(server.asker.ask, mode=Mode.GREEDY, likeliest=True)
    answers = await ask_all(ask, turn.prompts, at_once=1)
    return tuple(
        Answered(
            prompt=place,
            mode=Mode.GREEDY,
            tokens=len(answer.token_ids),
            trail=trail_of(prompt, answer.token_ids),
            near=near_tokens(prompt, answer.token_ids, answer.choices, epsilon=NEAR),
        )
        for place, prompt, answer in zip(turn.places, turn.prompts, answers, strict=True)
    )


async def _ask(server: Running, mode: Mode, prompts: tuple[Prompt, ...]) -> list[Completion]:
    at_once = 1 if mode is Mode.GREEDY else AT_ONCE
    return await ask_all(partial(server.asker.ask, mode=mode), prompts, at_once=at_once)


def _drafted(mode: Mode, turn: Round, answers: list[Completion]) -> tuple[Answered, ...]:
    return tuple(
        Answered(
            prompt=place,
            mode=mode,
            tokens=len(answer.token_ids),
            drafts=answer.drafts,
            draft_tokens=answer.draft_tokens,
            accepted=answer.accepted,
            accepted_at=answer.accepted_at,
            trail=trail_of(prompt, answer.token_ids) if mode is Mode.GREEDY else (),
        )
        for place, prompt, answer in zip(turn.places, turn.prompts, answers, strict=True)
    )


async def _choose(server: Running, draft_tokens: int) -> tuple[EngineReading, str]:
    """Have every batch drafted so many tokens for; the reading at that moment, and why it cannot be."""
    reading = await _read(server)
    if reading.controllable and draft_tokens in reading.choices:
        steer = Steer(
            table=((1, reading.largest_batch, draft_tokens),),
            mode=SpeculationMode.SPECULATIVE if draft_tokens else SpeculationMode.TARGET_ONLY,
            reason=Reason.OPERATOR_OVERRIDE,
        )
        steering = partial(server.speculation.steer, server.worker, steer, PLUGIN_SECONDS)
        reading = await _patiently(steering)
    if not reading.controllable:
        return reading, "; ".join(reading.problems) or "the worker's speculation cannot be controlled"
    if draft_tokens not in reading.choices:
        return reading, f"the worker cannot draft {draft_tokens} tokens"
    return reading, ""


async def _read(server: Running) -> EngineReading:
    return await _patiently(partial(server.speculation.read, server.worker, PLUGIN_SECONDS))


async def _patiently(ask: Callable[[], Awaitable[EngineReading]]) -> EngineReading:
    """Ask again where the plugin did not answer; asking twice changes nothing."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except WorkerFailedError:
            await asyncio.sleep(PAUSE_SECONDS)
    return await ask()


def _paces(before: EngineReading, after: EngineReading) -> tuple[Pace, ...]:
    """
    What was counted between two readings of one engine.

    Raises:
        WorkerFailedError: they are of two engines.
    """
    if before.epoch != after.epoch:
        message = "the worker was started again while it was measured; its log says why"
        raise WorkerFailedError(message)
    counted = since(after.steps, before.steps)
    return tuple(
        Pace(
            batch=batch,
            draft_tokens=draft_tokens,
            steps=cell.steps,
            seconds=cell.seconds,
            requests=cell.requests,
            tokens=cell.tokens,
        )
        for (batch, draft_tokens), cell in sorted(counted.items())
    )
