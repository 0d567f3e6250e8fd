"""
One evaluation, from the weights that are compared to the report.

It writes only into the report's own directory: neither the registry nor a serving worker changes.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation import aggregate, speed
from appliance.drafts.evaluation.arms import TEMPERATURE, Arm, MeasurementPhase, Served, plan_schedule
from appliance.drafts.evaluation.comparison import Comparison
from appliance.drafts.evaluation.equality import epsilon_of
from appliance.drafts.evaluation.evaluation_worker import Say, WorkerTemplate
from appliance.drafts.evaluation.prompts import ChosenPrompts, split_rounds
from appliance.drafts.evaluation.results import (
    ArmSpeed,
    Evaluation,
    EvaluationVerdict,
    StepResult,
)
from appliance.drafts.evaluation.runner import EvaluationOptions, EvaluationRunner
from appliance.drafts.evaluation.store import (
    FinishedSteps,
    evaluation_directory,
    evaluation_lock,
    storage_errors,
)
from appliance.drafts.evaluation.verdict import refusal_reasons
from appliance.errors import DraftRefusedError
from appliance.infra.files import write_private
from appliance.serving.devices import DeviceKind

FORMAT = 1
"""Of what is measured; another number discards finished steps of an earlier version."""
WORK, LOGS, TOKEN = "work", "logs", "control.token"
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutData:
    """The held-out part of a data set."""

    digest: str
    """Of its manifest."""
    chosen: ChosenPrompts
    missing: int
    """Samples that were erased."""
    withheld: int = 0
    """Samples whose tenants withdrew their consent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSite:
    """The machine, directory and settings of an evaluation."""

    directory: Path
    """Of the registry."""
    template: WorkerTemplate
    engine: str
    available_bytes: int
    """Of memory."""
    margin: float
    say: Say
    clock: Callable[[], float]
    """Monotonic seconds."""
    wall_clock: Callable[[], float]
    """Unix seconds."""


async def evaluate(
    comparison: Comparison,
    data: HeldOutData,
    options: EvaluationOptions,
    site: EvaluationSite,
    *,
    arms: Mapping[Arm, Served] | None = None,
) -> Evaluation:
    """
    Measure and judge; return the report without saving it.

    A candidate with objections is refused without starting a worker.  `arms` replaces the weights that the
    comparison names, to test the checks.

    Raises:
        DraftRefusedError: there is no prompt, or another process evaluates this draft.
        DraftStorageError: finished steps cannot be written.
        WorkerStartError: a worker does not start.
        WorkerFailedError: a worker failed.
    """
    if comparison.objections:
        return Evaluation(
            **_header(comparison, data, options, site),
            verdict=EvaluationVerdict.REFUSED,
            reasons=comparison.objections,
            compared=0,
        )
    if not data.chosen.prompts:
        message = f"data set {data.digest} has no held-out prompt that can be used: harvest more"
        raise DraftRefusedError(message)
    home = evaluation_directory(site.directory, comparison.candidate.digest)
    serving = dict(arms or comparison.arms)
    with evaluation_lock(home):
        finished = FinishedSteps(home / WORK, _depends(data, options, site, serving))
        schedule, results = await _measure(serving, data, options, site, home, finished)
    return _report(comparison, data, options, site, schedule, results)


def forget_work(directory: Path, draft: str) -> None:
    """
    Delete the finished steps of an evaluation, once its report is saved.

    Raises:
        DraftStorageError: they cannot be deleted.
    """
    home = evaluation_directory(directory, draft)
    with evaluation_lock(home):
        FinishedSteps(home / WORK, {}).clear()


async def _measure(
    arms: Mapping[Arm, Served],
    data: HeldOutData,
    options: EvaluationOptions,
    site: EvaluationSite,
    home: Path,
    finished: FinishedSteps,
) -> tuple[tuple[MeasurementPhase, ...], tuple[StepResult, ...]]:
    token, token_file = secrets.token_hex(TOKEN_BYTES), home / TOKEN
    rounds = split_rounds(data.chosen.prompts)
    incumbent = arms.get(Arm.INCUMBENT)
    together = incumbent is not None and site.template.holds_two(
        arms[Arm.CANDIDATE], incumbent, site.available_bytes
    )
    schedule = plan_schedule(len(rounds), incumbent=incumbent is not None, together=together)
    with storage_errors(token_file):
        write_private(token_file, token + "\n")
    try:
        runner = EvaluationRunner(
            arms=arms,
            rounds=rounds,
            options=options,
            plan=partial(site.template.plan, token_file=token_file),
            token=token,
            logs=home / LOGS,
            finished=finished,
            say=site.say,
            clock=site.clock,
        )
        return schedule, await runner.run(schedule)
    finally:
        token_file.unlink(missing_ok=True)


def _depends(
    data: HeldOutData, options: EvaluationOptions, site: EvaluationSite, arms: Mapping[Arm, Served]
) -> dict[str, Any]:
    """Everything the result of a step depends on; prompts by their ids and the data set's digest."""
    template = site.template
    return {
        "format": FORMAT,
        "arms": {
            str(arm): [served.target.digest, served.draft.digest if served.draft else None]
            for arm, served in arms.items()
        },
        "dataset": data.digest,
        "prompts": [prompt.request_id for prompt in data.chosen.prompts],
        "max_tokens": options.max_tokens,
        "draft_tokens": options.draft_tokens,
        "temperature": TEMPERATURE,
        "worker": template.settings.model_dump(mode="json", exclude={"model", "draft", "host", "port"}),
        "device": [str(template.device.kind), template.device.count, template.device.bfloat16],
        "engine": site.engine,
    }


def _report(
    comparison: Comparison,
    data: HeldOutData,
    options: EvaluationOptions,
    site: EvaluationSite,
    schedule: tuple[MeasurementPhase, ...],
    results: tuple[StepResult, ...],
) -> Evaluation:
    prompts = [prompt for each in split_rounds(data.chosen.prompts) for prompt in each]
    evidence = aggregate.gather(results, list(comparison.arms), prompts, options.draft_tokens)
    header = _header(comparison, data, options, site)
    equalities, differences = aggregate.equalities(evidence, header["epsilon"])
    lines, ratios = aggregate.lines(evidence), aggregate.length_ratios(evidence)
    gains = {arm: speed.gains(results, arm) for arm in evidence.drafting}
    speed_ratio = speed.speed_ratio(gains[Arm.CANDIDATE], gains.get(Arm.INCUMBENT))
    complete = len(results) == sum(len(phase.steps) for phase in schedule)
    measured = Evaluation(
        **header,
        verdict=EvaluationVerdict.REFUSED,
        reasons=(),
        compared=evidence.compared,
        together=any(len(phase.arms) > 1 for phase in schedule),
        complete=complete,
        lines=lines,
        comparisons=ratios,
        speeds=tuple(
            ArmSpeed(arm=arm, gain=speed.speed_ratio(gains[arm], None), paces=speed.step_totals(results, arm))
            for arm in evidence.drafting
        ),
        speed_ratio=speed_ratio,
        equalities=equalities,
        differences=differences,
        expected=aggregate.expected(lines),
    )
    problem = next((result.problem for result in results if result.problem), "")
    reasons = refusal_reasons(measured, problem)
    verdict = EvaluationVerdict.REFUSED if reasons else EvaluationVerdict.PASSED
    return measured.model_copy(update={"verdict": verdict, "reasons": reasons})


def _header(
    comparison: Comparison, data: HeldOutData, options: EvaluationOptions, site: EvaluationSite
) -> dict[str, Any]:
    """The fields of a report that need no measurement."""
    dtype, device = site.template.dtype(comparison.target), site.template.device
    now = datetime.fromtimestamp(site.wall_clock(), UTC)
    gpus = f"{device.count} GPU{'' if device.count == 1 else 's'}"
    return {
        "draft": comparison.candidate.digest,
        "incumbent": comparison.incumbent.digest if comparison.incumbent is not None else None,
        "target": comparison.target.digest,
        "dataset": data.digest,
        "made": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "engine": site.engine,
        "device": "cpu" if device.kind is DeviceKind.CPU else gpus,
        "dtype": dtype,
        "draft_tokens": options.draft_tokens,
        "max_tokens": options.max_tokens,
        "margin": site.margin,
        "epsilon": epsilon_of(dtype),
        "prompts": len(data.chosen.prompts),
        "missing": data.missing,
        "withheld": data.withheld,
        "unusable": data.chosen.unusable,
    }
