"""
One step of an evaluation: a round of prompts, asked of one arm's worker.

The target alone is asked greedily, with the likeliest tokens at each position.  An arm with a draft is asked
greedily one at a time, then sampled several at a time, and then some of both again with drafting switched
off.  Two processes of one program may differ in speed by a tenth for their whole life, so the gain of a draft
is measured within one process, within about a minute, and only gains are compared.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from appliance.drafts.evaluation.arms import Arm, Mode, Prompt
from appliance.drafts.evaluation.asking import Completion, ask_all
from appliance.drafts.evaluation.equality import near_tokens, trail_of
from appliance.drafts.evaluation.evaluation_worker import EvaluationWorker
from appliance.drafts.evaluation.results import PromptResult, StepResult, StepTotals
from appliance.errors import WorkerFailedError
from appliance.gateway.cost.saving import since
from appliance.serving.plugin_client import SpeculationCommand
from appliance.speculation.values import EngineReading, Reason, SpeculationMode

AT_ONCE = 4
"""Concurrent sampled requests."""
NEAR = 1.0
"""Alternatives to the target's tokens are kept if less likely by at most this (log probability)."""
WARM_UP_TOKENS = 16
WARM_UP_PROMPT = 8
PLUGIN_SECONDS = 30.0
ATTEMPTS, PAUSE_SECONDS = 4, 2.0
"""Of requests to the plugin: on a busy machine the engine may answer too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRound:
    number: int
    places: tuple[int, ...]
    """Index of each among all prompts."""
    prompts: tuple[Prompt, ...]


async def warm_up(worker: EvaluationWorker, prompt: Prompt) -> None:
    """Send short requests, so that one-time work is done before measuring; may raise `WorkerFailedError`."""
    short = replace(prompt, token_ids=prompt.token_ids[:WARM_UP_PROMPT])
    for mode in Mode:
        await worker.client.ask(short, mode, max_tokens=WARM_UP_TOKENS)


async def measure(worker: EvaluationWorker, asked: PromptRound, *, draft_tokens: int) -> StepResult:
    """
    Measure one step with at most `draft_tokens` (K) per draft.

    Raises:
        WorkerFailedError: the worker failed, or its answer is not what vLLM answers.
    """
    if worker.arm is Arm.TARGET:
        own = await ask_all(
            partial(worker.client.ask, mode=Mode.GREEDY, likeliest=True), asked.prompts, at_once=1
        )
        return StepResult(arm=worker.arm, number=asked.number, answered=_results(Mode.GREEDY, asked, own))
    before, problem = await _set_draft_tokens(worker, draft_tokens)
    greedy = await _ask(worker, Mode.GREEDY, asked.prompts)
    sampled = await _ask(worker, Mode.SAMPLED, asked.prompts)
    answered = (*_results(Mode.GREEDY, asked, greedy), *_results(Mode.SAMPLED, asked, sampled))
    if problem:
        return StepResult(arm=worker.arm, number=asked.number, answered=answered, problem=problem)
    paces = _paces(before, await _read(worker))
    before, problem = await _set_draft_tokens(worker, 0)
    if not problem:
        # As many at once as with drafts: steps are compared within their batch bucket.
        some = max((len(asked.prompts) + 1) // 2, min(AT_ONCE, len(asked.prompts)))
        await _ask(worker, Mode.GREEDY, asked.prompts[: max(1, some // 2)])
        await _ask(worker, Mode.SAMPLED, asked.prompts[:some])
        paces += _paces(before, await _read(worker))
    return StepResult(arm=worker.arm, number=asked.number, answered=answered, paces=paces, problem=problem)


async def _ask(worker: EvaluationWorker, mode: Mode, prompts: tuple[Prompt, ...]) -> list[Completion]:
    at_once = 1 if mode is Mode.GREEDY else AT_ONCE
    return await ask_all(partial(worker.client.ask, mode=mode), prompts, at_once=at_once)


def _results(mode: Mode, asked: PromptRound, answers: list[Completion]) -> tuple[PromptResult, ...]:
    return tuple(
        PromptResult(
            prompt=place,
            mode=mode,
            tokens=len(answer.token_ids),
            drafts=answer.drafts,
            draft_tokens=answer.draft_tokens,
            accepted=answer.accepted,
            accepted_at=answer.accepted_at,
            trail=trail_of(prompt, answer.token_ids) if mode is Mode.GREEDY else (),
            near=near_tokens(prompt, answer.token_ids, answer.choices, epsilon=NEAR)
            if answer.choices
            else (),
        )
        for place, prompt, answer in zip(asked.places, asked.prompts, answers, strict=True)
    )


async def _set_draft_tokens(worker: EvaluationWorker, draft_tokens: int) -> tuple[EngineReading, str]:
    """Set the number of draft tokens for all batches; return the reading then, and why it cannot be set."""
    reading = await _read(worker)
    if reading.controllable and draft_tokens in reading.choices:
        command = SpeculationCommand(
            table=((1, reading.largest_batch, draft_tokens),),
            mode=SpeculationMode.SPECULATIVE if draft_tokens else SpeculationMode.TARGET_ONLY,
            reason=Reason.OPERATOR_OVERRIDE,
        )
        apply = partial(worker.speculation.apply, worker.worker, command, PLUGIN_SECONDS)
        reading = await _with_retries(apply)
    if not reading.controllable:
        return reading, "; ".join(reading.problems) or "the worker's speculation cannot be controlled"
    if draft_tokens not in reading.choices:
        return reading, f"the worker cannot draft {draft_tokens} tokens"
    return reading, ""


async def _read(worker: EvaluationWorker) -> EngineReading:
    return await _with_retries(partial(worker.speculation.read, worker.worker, PLUGIN_SECONDS))


async def _with_retries(ask: Callable[[], Awaitable[EngineReading]]) -> EngineReading:
    """Retry requests to the plugin, which are idempotent."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await ask()
        except WorkerFailedError:
            await asyncio.sleep(PAUSE_SECONDS)
    return await ask()


def _paces(before: EngineReading, after: EngineReading) -> tuple[StepTotals, ...]:
    """Differences of two readings; raises `WorkerFailedError` if the engine restarted between them."""
    if before.epoch != after.epoch:
        raise WorkerFailedError("the worker restarted during the measurement: see its log")
    counted = since(after.steps, before.steps)
    return tuple(
        StepTotals(
            batch=batch,
            draft_tokens=draft_tokens,
            steps=cell.steps,
            seconds=cell.seconds,
            requests=cell.requests,
            tokens=cell.tokens,
        )
        for (batch, draft_tokens), cell in sorted(counted.items())
    )
