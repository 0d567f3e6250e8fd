"""
Carry out the course of an evaluation: start workers, take the steps that are left, keep each result.

Whatever ends it (the last step, the time limit, an error, a signal), no worker is left running, and
what was finished is on the disk.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.evaluation.arms import Arm, Prompt, Served
from appliance.drafts.evaluation.course import Shift, Step
from appliance.drafts.evaluation.measuring import Round, measure, warm_up
from appliance.drafts.evaluation.place import Place
from appliance.drafts.evaluation.results import StepResult
from appliance.drafts.evaluation.work import Work
from appliance.drafts.evaluation.worker import Running, Say, running

MINUTE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much is measured."""

    max_tokens: int
    """Longest answer."""
    draft_tokens: int
    """Most draft tokens a step (K)."""
    seconds_limit: float | None = None
    """Beyond it no further step is begun."""


class Runner:
    """Takes the steps of one evaluation."""

    def __init__(
        self,
        *,
        arms: Mapping[Arm, Served],
        rounds: Sequence[Sequence[Prompt]],
        options: Options,
        place: Place,
        token: str,
        logs: Path,
        work: Work,
        say: Say,
        clock: Callable[[], float],
    ) -> None:
        """
        Prepare; nothing is started before `run`.

        Args:
            arms: what each arm's worker serves.
            rounds: the prompts.
            options: how much is measured.
            place: how workers are started.
            token: secret that their plugins expect.
            logs: directory of their logs.
            work: where finished steps are kept.
            say: told of the progress.
            clock: seconds that never go backwards.
        """
        self._arms = arms
        self._options = options
        self._place = place
        self._token = token
        self._logs = logs
        self._work = work
        self._say = say
        self._clock = clock
        self._rounds: list[Round] = []
        first = 0
        for number, prompts in enumerate(rounds):
            places = tuple(range(first, first + len(prompts)))
            self._rounds.append(Round(number=number, places=places, prompts=tuple(prompts)))
            first += len(prompts)
        self._took: list[float] = []
        self._began = clock()

    async def run(self, course: Sequence[Shift]) -> tuple[StepResult, ...]:
        """
        Take every step that is not finished yet, and return the results of all that are.

        Raises:
            WorkerStartError: a worker does not start.
            WorkerFailedError: a worker failed while it was asked.
            DraftStorageError: a result cannot be kept.
        """
        wanted = [step for shift in course for step in shift.steps]
        done = {result.step: result for result in self._work.open() if result.step in wanted}
        if done:
            self._say(f"{len(done)} of {len(wanted)} steps were finished before, and are kept")
        for shift in course:
            left = shift.without(done)
            if left.steps and not self._is_late():
                await self._take(left, done, len(wanted))
        return tuple(done[step] for step in wanted if step in done)

    async def _take(self, shift: Shift, done: dict[Step, StepResult], wanted: int) -> None:
        async with AsyncExitStack() as stack:
            servers: dict[Arm, Running] = {}
            for arm in shift.arms:
                servers[arm] = await stack.enter_async_context(
                    running(
                        arm,
                        self._place.plan(self._arms[arm]),
                        token=self._token,
                        max_tokens=self._options.max_tokens,
                        logs=self._logs,
                        say=self._say,
                    )
                )
                await warm_up(servers[arm], self._rounds[0].prompts[0])
            for step in shift.steps:
                if self._is_late():
                    return
                began = self._clock()
                result = await measure(
                    servers[step.arm], self._rounds[step.number], draft_tokens=self._options.draft_tokens
                )
                self._work.keep(result)
                done[step] = result
                self._tell(step, self._clock() - began, wanted - len(done))

    def _is_late(self) -> bool:
        limit = self._options.seconds_limit
        return limit is not None and self._clock() - self._began >= limit

    def _tell(self, step: Step, seconds: float, left: int) -> None:
        self._took.append(seconds)
        mean = sum(self._took) / len(self._took)
        what = f"{step.arm}: round {step.number + 1} of {len(self._rounds)} took {seconds:.0f} s"
        self._say(f"{what}; {_time_left(left * mean)}" if left else what)


def _time_left(seconds: float) -> str:
    if seconds < MINUTE:
        return f"about {seconds:.0f} s left, starts of workers not counted"
    return f"about {seconds / MINUTE:.0f} min left, starts of workers not counted"
