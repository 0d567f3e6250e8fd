"""
Measures drafting methods one after the other, each on a worker of its own.

However it ends (done, error, signal), no worker keeps running.  A method that cannot be measured is reported
with its reason, and the others are measured.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from appliance.drafts.comparison.asked import ComparedRequest, ComparisonPlan, MethodCandidate
from appliance.drafts.comparison.figures import MethodFigures, RoundMeasurement, summarise
from appliance.drafts.evaluation.arms import Served
from appliance.drafts.evaluation.asking import ask_all
from appliance.drafts.evaluation.evaluating import EvaluationSite
from appliance.drafts.evaluation.evaluation_worker import (
    EvaluationWorker,
    WorkerTemplate,
    run_worker,
    worker_settings,
)
from appliance.drafts.evaluation.store import control_token, evaluation_lock
from appliance.drafts.lint.lint import refuse_errors
from appliance.drafts.lint.methods import lint_settings
from appliance.errors import ConfigurationError, DraftError, WorkerFailedError, WorkerStartError
from appliance.infra.settings import METHODS_WITH_DRAFT
from appliance.serving.usage import count_of, object_of
from appliance.serving.weights import Weights, inspect_weights

HOME = "comparison"
"""Below the registry's directory: the token and the logs of the workers."""
FindDraft = Callable[[], Weights | None]
"""Finds the draft in service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRunner:
    plan: ComparisonPlan
    target: Weights
    find_draft: FindDraft
    site: EvaluationSite

    async def compare(self, candidates: Sequence[MethodCandidate]) -> tuple[MethodFigures, ...]:
        """Measure all candidates; raises `DraftRefusedError` if another process does, `DraftStorageError`."""
        home = self.site.directory / HOME
        with evaluation_lock(home), control_token(home) as (token, token_file):
            run = partial(self._measure, token=token, token_file=token_file, logs=home / "logs")
            return tuple([await run(candidate) for candidate in candidates])

    async def _measure(
        self, candidate: MethodCandidate, *, token: str, token_file: Path, logs: Path
    ) -> MethodFigures:
        draft = None if candidate.draft is None else str(candidate.draft)
        try:
            served = self._load(candidate)
            draft = None if served.draft is None else str(served.draft.path)
            launch = self.site.template.plan(served, token_file)
            self.site.say(f"{candidate.name}: starting a worker")
            async with run_worker(
                candidate.method,
                launch,
                token=token,
                max_tokens=self.plan.max_tokens,
                logs=logs,
                say=self.site.say,
            ) as worker:
                cells = summarise(await self._measure_rounds(candidate.method, worker))
            return MethodFigures(method=candidate.method, draft=draft, cells=cells)
        except (ConfigurationError, DraftError, WorkerStartError, WorkerFailedError) as error:
            problem = " ".join(str(error).split())
            self.site.say(f"{candidate.name}: not measured: {problem}")
            return MethodFigures(method=candidate.method, draft=draft, problem=problem)

    def _load(self, candidate: MethodCandidate) -> Served:
        """The weights of a method; raises ConfigurationError or `DraftError` if it cannot be served."""
        draft = None
        if candidate.method in METHODS_WITH_DRAFT:
            draft = self.find_draft() if candidate.draft is None else inspect_weights(candidate.draft)
            if draft is None:
                raise ConfigurationError("no draft is in service: name one with --method METHOD=DIRECTORY")
        served = Served(target=self.target, draft=draft, method=candidate.method)
        template: WorkerTemplate = self.site.template
        settings = worker_settings(template.settings, served, template.largest_batch)
        refuse_errors(lint_settings(settings, self.target, draft), (draft or self.target).path)
        if not template.holds(self.site.available_bytes, served):
            raise ConfigurationError(
                "there is not enough free memory for its worker: stop the serving one first"
            )
        return served

    async def _measure_rounds(self, name: str, worker: EvaluationWorker) -> list[RoundMeasurement]:
        reading, problem = await worker.set_draft_tokens(self.site.template.settings.draft_tokens)
        if problem:
            raise WorkerFailedError(problem)
        # One-time work is done, and a request that is refused is found, before anything is measured.
        largest = max(self.plan.concurrency)
        await self._ask(worker, self.plan.requests, largest, f"{name} warm-up")
        measured: list[RoundMeasurement] = []
        began = self.site.clock()
        for number, requests in enumerate(self.plan.split()):
            for concurrency, order in self.plan.order(f"{name} {number}", reading.choices):
                for draft_tokens in order:
                    before, problem = await worker.set_draft_tokens(draft_tokens)
                    if problem:
                        raise WorkerFailedError(problem)
                    salt = f"{name} {number} {concurrency} {draft_tokens}"
                    start = self.site.clock()
                    tokens = await self._ask(worker, requests, concurrency, salt)
                    seconds = self.site.clock() - start
                    counted = (await worker.read_since(before)).drafting.since(before.drafting)
                    if counted is None or not tokens:
                        raise WorkerFailedError(
                            "the worker counted no tokens, or its counters went backwards"
                        )
                    measured.append(
                        RoundMeasurement(
                            round=number,
                            concurrency=concurrency,
                            draft_tokens=draft_tokens,
                            tokens=tokens,
                            seconds=seconds,
                            drafts=counted.drafts,
                            accepted_tokens=counted.accepted_tokens,
                        )
                    )
            left = (self.site.clock() - began) / (number + 1) * (self.plan.rounds - number - 1)
            self.site.say(f"{name}: round {number + 1} of {self.plan.rounds} done; about {left:.0f} s left")
        return measured

    async def _ask(
        self, worker: EvaluationWorker, requests: Sequence[ComparedRequest], at_once: int, salt: str
    ) -> int:
        """Ask all requests; return the tokens of the answers."""

        async def ask(request: ComparedRequest) -> int:
            client = worker.client
            body = request.body_with(model=client.model, max_tokens=client.max_tokens, salt=salt)
            try:
                reply = json.loads(await client.post(request.path, body))
            except WorkerFailedError as error:
                raise WorkerFailedError(f"line {request.line} of the prompts: {error}") from error
            except ValueError as error:
                raise WorkerFailedError("the worker's answer is not JSON") from error
            return count_of(object_of(object_of(reply).get("usage")).get("completion_tokens")) or 0

        return sum(await ask_all(ask, requests, at_once=at_once))
