"""
One evaluation, from the weights that are compared to the report.

It writes only into the report's own directory: neither the registry nor a serving worker changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation import aggregate
from appliance.drafts.evaluation.arms import (
    TEMPERATURE,
    Arm,
    ChosenPrompts,
    MeasurementPhase,
    Served,
    plan_schedule,
    split_rounds,
)
from appliance.drafts.evaluation.equality import epsilon_of
from appliance.drafts.evaluation.evaluation_results import ArmSpeed, Evaluation, EvaluationVerdict, StepResult
from appliance.drafts.evaluation.evaluation_worker import Say, WorkerTemplate
from appliance.drafts.evaluation.runner import EvaluationOptions, EvaluationRunner
from appliance.drafts.evaluation.store import (
    FinishedSteps,
    control_token,
    evaluation_directory,
    evaluation_lock,
)
from appliance.drafts.evaluation.verdict import objections, refusal_reasons
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.registry.active_draft import read_active_draft
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.training_record import parse_record
from appliance.errors import DraftRefusedError
from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import DeviceKind
from appliance.serving.weights import Weights, inspect_weights, load_weights

FORMAT = 1
"""Of what is measured; another number discards finished steps of an earlier version."""
WORK = "work"
NO_DRAFT = "none"
"""As `incumbent`: compare with the target alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The weights of an evaluation; every digest was computed from the bytes that will be served."""

    target: Weights
    candidate: Weights
    incumbent: Weights | None
    """None if the target serves without a draft."""
    objections: tuple[str, ...]
    """Why the candidate must not be loaded; one line each."""

    @property
    def arms(self) -> dict[Arm, Served]:
        arms = {Arm.TARGET: Served(target=self.target)}
        if self.incumbent is not None:
            arms[Arm.INCUMBENT] = Served(target=self.target, draft=self.incumbent)
        return arms | {Arm.CANDIDATE: Served(target=self.target, draft=self.candidate)}


def open_comparison(
    registry: DraftRegistry,
    directory: Path,
    settings: WorkerSettings,
    *,
    candidate: str,
    target: Path | None = None,
    incumbent: str | None = None,
) -> Comparison:
    """
    Load and digest all weights; raises `DraftError`, and `ConfigurationError` if weights cannot be read.

    `directory` is the registry's.  `candidate` and `incumbent` are digests or prefixes; `incumbent` may also
    be `none`, or None for the draft in service.
    """
    weights = load_weights(target or settings.model)
    revision = registry.find(candidate)
    mine = load_weights(registry.weights(revision))
    other = find_incumbent(registry, directory, settings, weights.digest, incumbent)
    if other is not None and other.digest == mine.digest:
        message = f"{mine.digest} is the draft it would be compared with: there is nothing to evaluate"
        raise DraftRefusedError(f"{message}; name another with --incumbent")
    record, _wrong = parse_record(mine.training)
    lint = lint_pair(weights, mine, context=settings.max_model_len)
    found = objections(record, revision.target, weights.digest, lint)
    return Comparison(target=weights, candidate=mine, incumbent=other, objections=found)


def find_incumbent(
    registry: DraftRegistry, directory: Path, settings: WorkerSettings, target: str, name: str | None = None
) -> Weights | None:
    """The draft `name`, or the one in service for the target of this digest; None if it serves alone."""
    if name == NO_DRAFT:
        return None
    draft = read_active_draft(directory, target).draft if name is None else name
    if draft is not None:
        return load_weights(registry.weights(registry.find(draft)))
    if settings.method != "eagle3" or settings.draft is None:
        return None
    inspect_weights(settings.draft)
    return load_weights(settings.draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutData:
    digest: str
    """Of its manifest."""
    chosen: ChosenPrompts
    missing: int
    withheld: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSite:
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
    comparison names, to test the checks.  Raises `DraftRefusedError` if there is no prompt or another process
    evaluates this draft, `DraftStorageError`, `WorkerStartError` and `WorkerFailedError`.
    """
    if comparison.objections:
        header, refused = _header(comparison, data, options, site), EvaluationVerdict.REFUSED
        return Evaluation(**header, verdict=refused, reasons=comparison.objections, compared=0)
    if not data.chosen.prompts:
        raise DraftRefusedError(
            f"data set {data.digest} has no held-out prompt that can be used: harvest more"
        )
    serving = dict(arms or comparison.arms)
    rounds = split_rounds(data.chosen.prompts)
    incumbent = serving.get(Arm.INCUMBENT)
    together = incumbent is not None and site.template.holds(
        site.available_bytes, serving[Arm.CANDIDATE], incumbent
    )
    schedule = plan_schedule(len(rounds), incumbent=incumbent is not None, together=together)
    home = evaluation_directory(site.directory, comparison.candidate.digest)
    with evaluation_lock(home), control_token(home) as (token, token_file):
        runner = EvaluationRunner(
            arms=serving,
            rounds=rounds,
            options=options,
            plan=partial(site.template.plan, token_file=token_file),
            token=token,
            logs=home / "logs",
            finished=FinishedSteps(home / WORK, _depends(data, options, site, serving)),
            say=site.say,
            clock=site.clock,
        )
        results = await runner.run(schedule)
    return _report(comparison, data, options, site, schedule, results)


def forget_work(directory: Path, draft: str) -> None:
    """Delete the finished steps of an evaluation, once its report is saved; raises `DraftStorageError`."""
    home = evaluation_directory(directory, draft)
    with evaluation_lock(home):
        FinishedSteps(home / WORK, {}).clear()


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
    lines = aggregate.lines(evidence)
    gains = {arm: aggregate.gains(results, arm) for arm in evidence.drafting}
    speeds = {arm: aggregate.speed_ratio(gains[arm], None) for arm in evidence.drafting}
    measured = Evaluation(
        **header,
        verdict=EvaluationVerdict.REFUSED,
        reasons=(),
        compared=evidence.compared,
        together=any(len(phase.arms) > 1 for phase in schedule),
        complete=len(results) == sum(len(phase.steps) for phase in schedule),
        lines=lines,
        comparisons=aggregate.length_ratios(evidence),
        speeds=tuple(
            ArmSpeed(arm=arm, gain=gain, paces=aggregate.step_totals(results, arm))
            for arm, gain in speeds.items()
        ),
        speed_ratio=aggregate.speed_ratio(gains[Arm.CANDIDATE], gains.get(Arm.INCUMBENT)),
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
