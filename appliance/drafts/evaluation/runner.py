"""
Runs the schedule of an evaluation: starts workers, measures the steps that are left, stores each result.

However it ends (last step, time limit, error, signal), no worker keeps running, and every finished step is on
disk.

A step is a round of prompts, asked of one arm's worker.  The target alone is asked greedily, with the
likeliest tokens at each position.  An arm with a draft is asked greedily one at a time, then sampled several
at a time, and then some of both again with drafting switched off.  Two processes of one program may differ in
speed by a tenth for their whole life, so the gain of a draft is measured within one process, within about a
minute, and only gains are compared.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from appliance.drafts.evaluation.arms import Arm, MeasurementPhase, MeasurementStep, Mode, Prompt, Served
from appliance.drafts.evaluation.asking import Completion, ask_all
from appliance.drafts.evaluation.equality import near_tokens, trail_of
from appliance.drafts.evaluation.evaluation_results import PromptResult, StepResult, StepTotals
from appliance.drafts.evaluation.evaluation_worker import EvaluationWorker, Say, run_worker
from appliance.drafts.evaluation.store import FinishedSteps
from appliance.gateway.cost.saving import since
from appliance.serving.launch import LaunchPlan
from appliance.speculation.values import EngineReading

MINUTE = 60
AT_ONCE = 4
"""Concurrent sampled requests."""
NEAR = 1.0
"""Alternatives to the target's tokens are kept if less likely by at most this (log probability)."""
WARM_UP_TOKENS = 16
WARM_UP_PROMPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    max_tokens: int
    draft_tokens: int
    """Maximum draft tokens per step (K)."""
    seconds_limit: float | None = None
    """Start no new step after this time."""


@dataclass(kw_only=True)
class EvaluationRunner:
    arms: Mapping[Arm, Served]
    rounds: Sequence[tuple[Prompt, ...]]
    options: EvaluationOptions
    plan: Callable[[Served], LaunchPlan]
    token: str
    """Control token that the workers' plugins expect."""
    logs: Path
    finished: FinishedSteps
    say: Say
    clock: Callable[[], float]
    """Monotonic seconds."""
    _took: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock()

    async def run(self, schedule: Sequence[MeasurementPhase]) -> tuple[StepResult, ...]:
        """Measure the steps that are not finished; return all finished ones."""
        steps = [step for phase in schedule for step in phase.steps]
        done = {result.step: result for result in self.finished.open() if result.step in steps}
        if done:
            self.say(f"{len(done)} of {len(steps)} steps were finished before, and are kept")
        for phase in schedule:
            left = phase.without(done)
            if left.steps and not self._is_late():
                await self._run_phase(left, done, len(steps))
        return tuple(done[step] for step in steps if step in done)

    async def _run_phase(
        self, phase: MeasurementPhase, done: dict[MeasurementStep, StepResult], steps: int
    ) -> None:
        async with AsyncExitStack() as stack:
            workers: dict[Arm, EvaluationWorker] = {}
            for arm in phase.arms:
                workers[arm] = await stack.enter_async_context(
                    run_worker(
                        arm,
                        self.plan(self.arms[arm]),
                        token=self.token,
                        max_tokens=self.options.max_tokens,
                        logs=self.logs,
                        say=self.say,
                    )
                )
                await warm_up(workers[arm], self.rounds[0][0])
            for step in phase.steps:
                if self._is_late():
                    return
                began = self.clock()
                first = sum(map(len, self.rounds[: step.number]))
                asked = PromptRound(number=step.number, first=first, prompts=self.rounds[step.number])
                result = await measure(
                    step.arm, workers[step.arm], asked, draft_tokens=self.options.draft_tokens
                )
                self.finished.keep(result)
                done[step] = result
                self._report(step, self.clock() - began, steps - len(done))

    def _is_late(self) -> bool:
        limit = self.options.seconds_limit
        return limit is not None and self.clock() - self._began >= limit

    def _report(self, step: MeasurementStep, seconds: float, left: int) -> None:
        self._took.append(seconds)
        line = f"{step.arm}: round {step.number + 1} of {len(self.rounds)} took {seconds:.0f} s"
        if left:
            wait = left * sum(self._took) / len(self._took)
            time = f"{wait:.0f} s" if wait < MINUTE else f"{wait / MINUTE:.0f} min"
            line += f"; about {time} left, not counting worker starts"
        self.say(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRound:
    number: int
    first: int
    """Index of the first one among all prompts."""
    prompts: tuple[Prompt, ...]


async def warm_up(worker: EvaluationWorker, prompt: Prompt) -> None:
    """Send short requests, so that one-time work is done before measuring."""
    short = replace(prompt, token_ids=prompt.token_ids[:WARM_UP_PROMPT])
    for mode in Mode:
        await worker.client.ask(short, mode, max_tokens=WARM_UP_TOKENS)


async def measure(arm: Arm, worker: EvaluationWorker, asked: PromptRound, *, draft_tokens: int) -> StepResult:
    """Measure one step with at most `draft_tokens` (K) per draft; may raise `WorkerFailedError`."""
    if arm is Arm.TARGET:
        own = await ask_all(
            partial(worker.client.ask, mode=Mode.GREEDY, likeliest=True), asked.prompts, at_once=1
        )
        return StepResult(arm=arm, number=asked.number, answered=_results(Mode.GREEDY, asked, own))
    before, problem = await worker.set_draft_tokens(draft_tokens)
    greedy = await _ask(worker, Mode.GREEDY, asked.prompts)
    sampled = await _ask(worker, Mode.SAMPLED, asked.prompts)
    answered = (*_results(Mode.GREEDY, asked, greedy), *_results(Mode.SAMPLED, asked, sampled))
    if problem:
        return StepResult(arm=arm, number=asked.number, answered=answered, problem=problem)
    paces = _paces(before, await worker.read_since(before))
    before, problem = await worker.set_draft_tokens(0)
    if not problem:
        # As many at once as with drafts: steps are compared within their batch bucket.
        some = max((len(asked.prompts) + 1) // 2, min(AT_ONCE, len(asked.prompts)))
        await _ask(worker, Mode.GREEDY, asked.prompts[: max(1, some // 2)])
        await _ask(worker, Mode.SAMPLED, asked.prompts[:some])
        paces += _paces(before, await worker.read_since(before))
    return StepResult(arm=arm, number=asked.number, answered=answered, paces=paces, problem=problem)


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
        for place, (prompt, answer) in enumerate(zip(asked.prompts, answers, strict=True), asked.first)
    )


def _paces(before: EngineReading, after: EngineReading) -> tuple[StepTotals, ...]:
    return StepTotals.by_kind(since(after.steps, before.steps))
