"""
Runs the schedule of an evaluation: starts workers, measures the steps that are left, stores each result.

However it ends (last step, time limit, error, signal), no worker keeps running, and every finished step is on
disk.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.evaluation.arms import Arm, MeasurementPhase, MeasurementStep, Prompt, Served
from appliance.drafts.evaluation.evaluation_worker import EvaluationWorker, Say, run_worker
from appliance.drafts.evaluation.measuring import PromptRound, measure, warm_up
from appliance.drafts.evaluation.results import StepResult
from appliance.drafts.evaluation.store import FinishedSteps
from appliance.serving.launch import LaunchPlan

MINUTE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    max_tokens: int
    """Maximum length of an answer."""
    draft_tokens: int
    """Maximum draft tokens per step (K)."""
    seconds_limit: float | None = None
    """Start no new step after this time."""


class EvaluationRunner:
    def __init__(
        self,
        *,
        arms: Mapping[Arm, Served],
        rounds: Sequence[Sequence[Prompt]],
        options: EvaluationOptions,
        plan: Callable[[Served], LaunchPlan],
        token: str,
        logs: Path,
        finished: FinishedSteps,
        say: Say,
        clock: Callable[[], float],
    ) -> None:
        self._arms = arms
        self._options = options
        self._plan = plan
        self._token = token
        """Control token that the workers' plugins expect."""
        self._logs = logs
        """Directory of the workers' logs."""
        self._finished = finished
        self._say = say
        self._clock = clock
        """Monotonic seconds."""
        self._rounds: list[PromptRound] = []
        first = 0
        for number, prompts in enumerate(rounds):
            places = tuple(range(first, first + len(prompts)))
            self._rounds.append(PromptRound(number=number, places=places, prompts=tuple(prompts)))
            first += len(prompts)
        self._took: list[float] = []
        self._began = clock()

    async def run(self, schedule: Sequence[MeasurementPhase]) -> tuple[StepResult, ...]:
        """
        Measure the steps that are not finished; return all finished ones.

        Raises:
            WorkerStartError: a worker does not start.
            WorkerFailedError: a worker failed.
            DraftStorageError: a result cannot be written.
        """
        steps = [step for phase in schedule for step in phase.steps]
        done = {result.step: result for result in self._finished.open() if result.step in steps}
        if done:
            self._say(f"{len(done)} of {len(steps)} steps were finished before, and are kept")
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
                        self._plan(self._arms[arm]),
                        token=self._token,
                        max_tokens=self._options.max_tokens,
                        logs=self._logs,
                        say=self._say,
                    )
                )
                await warm_up(workers[arm], self._rounds[0].prompts[0])
            for step in phase.steps:
                if self._is_late():
                    return
                began = self._clock()
                result = await measure(
                    workers[step.arm], self._rounds[step.number], draft_tokens=self._options.draft_tokens
                )
                self._finished.keep(result)
                done[step] = result
                self._report(step, self._clock() - began, steps - len(done))

    def _is_late(self) -> bool:
        limit = self._options.seconds_limit
        return limit is not None and self._clock() - self._began >= limit

    def _report(self, step: MeasurementStep, seconds: float, left: int) -> None:
        self._took.append(seconds)
        mean = sum(self._took) / len(self._took)
        line = f"{step.arm}: round {step.number + 1} of {len(self._rounds)} took {seconds:.0f} s"
        self._say(f"{line}; {_time_left(left * mean)}" if left else line)


def _time_left(seconds: float) -> str:
    if seconds < MINUTE:
        return f"about {seconds:.0f} s left, not counting worker starts"
    return f"about {seconds / MINUTE:.0f} min left, not counting worker starts"
