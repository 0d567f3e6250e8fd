"""
One evaluation, from who is compared to the report.

Nothing but the report's own directory is written: neither the registry nor what serves is touched.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation import speed, summary
from appliance.drafts.evaluation.arms import TEMPERATURE, Arm, Served
from appliance.drafts.evaluation.contest import Contest
from appliance.drafts.evaluation.course import Shift, plan_course
from appliance.drafts.evaluation.equality import epsilon_of
from appliance.drafts.evaluation.place import Place
from appliance.drafts.evaluation.prompts import Chosen, split_rounds
from appliance.drafts.evaluation.report import Aspect, Evaluation, Speed, Verdict
from appliance.drafts.evaluation.results import StepResult
from appliance.drafts.evaluation.runner import Options, Runner
from appliance.drafts.evaluation.store import evaluation_directory
from appliance.drafts.evaluation.verdict import Measured, judge
from appliance.drafts.evaluation.work import Work, alone, storing
from appliance.drafts.evaluation.worker import Say
from appliance.errors import DraftRefusedError
from appliance.infra.files import write_private
from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import Device, DeviceKind

FORMAT = 1
"""Of what is measured; another number makes finished steps of an earlier version useless."""
WORK, LOGS, TOKEN = "work", "logs", "control.token"
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The held-out part of a data set."""

    digest: str
    """Of its manifest."""
    chosen: Chosen
    missing: int
    """Held-out samples that had been erased."""
    withheld: int = 0
    """Held-out samples whose tenants do not allow it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an evaluation runs, and what it is told by."""

    directory: Path
    """Of the registry."""
    settings: WorkerSettings
    device: Device
    python: str
    environment: Mapping[str, str]
    engine: str
    available_bytes: int
    """Memory of this machine that is free for use."""
    margin: float
    say: Say
    clock: Callable[[], float]
    """Seconds that never go backwards."""
    wall_clock: Callable[[], float]
    """Unix time."""


async def evaluate(
    contest: Contest,
    data: Data,
    options: Options,
    site: Site,
    *,
    arms: Mapping[Arm, Served] | None = None,
) -> Evaluation:
    """
    Measure and judge; the report is returned, not saved.

    A candidate that may not be loaded is refused without starting anything.

    Args:
        contest: who is compared.
        data: what is asked.
        options: how much of it.
        site: where.
        arms: what each arm's worker serves instead of what the contest says, for tests of the checks.

    Raises:
        DraftRefusedError: there is no prompt, or another process evaluates this draft.
        DraftStorageError: the work cannot be kept.
        WorkerStartError: a worker does not start.
        WorkerFailedError: a worker failed.
    """
    if contest.objections:
        return _refused(contest, data, options, site)
    if not data.chosen.prompts:
        message = f"data set {data.digest} has no held-out prompt that can be used: harvest more"
        raise DraftRefusedError(message)
    place = evaluation_directory(site.directory, contest.candidate.digest)
    serving = dict(arms or contest.arms)
    with alone(place):
        work = Work(place / WORK, _depends(data, options, site, serving))
        course, results = await _measure(serving, data, options, site, place, work)
    return _report(contest, data, options, site, course, results)


def forget_work(directory: Path, draft: str) -> None:
    """
    Drop what an evaluation had finished, once its report is saved.

    Raises:
        DraftStorageError: it cannot be removed.
    """
    place = evaluation_directory(directory, draft)
    with alone(place):
        Work(place / WORK, {}).clear()


async def _measure(
    arms: Mapping[Arm, Served], data: Data, options: Options, site: Site, place: Path, work: Work
) -> tuple[tuple[Shift, ...], tuple[StepResult, ...]]:
    token, token_file = secrets.token_hex(TOKEN_BYTES), place / TOKEN
    where = _place(site, token_file)
    rounds = split_rounds(data.chosen.prompts)
    incumbent = arms.get(Arm.INCUMBENT)
    together = incumbent is not None and where.holds_two(arms[Arm.CANDIDATE], incumbent, site.available_bytes)
    course = plan_course(len(rounds), incumbent=incumbent is not None, together=together)
    with storing(token_file):
        write_private(token_file, token + "\n")
    try:
        runner = Runner(
            arms=arms,
            rounds=rounds,
            options=options,
            place=where,
            token=token,
            logs=place / LOGS,
            work=work,
            say=site.say,
            clock=site.clock,
        )
        return course, await runner.run(course)
    finally:
        token_file.unlink(missing_ok=True)


def _place(site: Site, token_file: Path) -> Place:
    return Place(
        settings=site.settings,
        device=site.device,
        python=site.python,
        environment=site.environment,
        token_file=token_file,
    )


def _depends(data: Data, options: Options, site: Site, arms: Mapping[Arm, Served]) -> dict[str, Any]:
    """Everything the results of a step depend on; the prompts by their ids and the data set's digest."""
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
        "worker": site.settings.model_dump(mode="json", exclude={"model", "draft", "host", "port"}),
        "device": [str(site.device.kind), site.device.count, site.device.bfloat16],
        "engine": site.engine,
    }


def _report(
    contest: Contest,
    data: Data,
    options: Options,
    site: Site,
    course: tuple[Shift, ...],
    results: tuple[StepResult, ...],
) -> Evaluation:
    arms = list(contest.arms)
    rounds = split_rounds(data.chosen.prompts)
    ordered = [prompt for each in rounds for prompt in each]
    evidence = summary.gather(results, arms, ordered, options.draft_tokens)
    blank = _blank(contest, data, options, site)
    equalities, differences = summary.equalities(evidence, blank["epsilon"])
    found, compared = summary.lines(evidence), summary.comparisons(evidence)
    gains = {arm: speed.gains(results, arm) for arm in evidence.drafting}
    ratio = speed.speed_ratio(gains[Arm.CANDIDATE], gains.get(Arm.INCUMBENT))
    complete = len(results) == sum(len(shift.steps) for shift in course)
    verdict, reasons = judge(
        Measured(
            complete=complete,
            compared=evidence.compared,
            has_incumbent=contest.incumbent is not None,
            acceptance=next((each.ratio for each in compared if each.aspect is Aspect.ALL), None),
            speed=ratio,
            speed_problem=next((result.problem for result in results if result.problem), ""),
            equalities=equalities,
            margin=site.margin,
        )
    )
    return Evaluation(
        **blank,
        verdict=verdict,
        reasons=reasons,
        compared=evidence.compared,
        together=any(len(shift.arms) > 1 for shift in course),
        complete=complete,
        lines=found,
        comparisons=compared,
        speeds=tuple(
            Speed(
                arm=arm,
                gain=speed.speed_ratio(gains[arm], None),
                paces=speed.total(results, arm),
            )
            for arm in evidence.drafting
        ),
        speed_ratio=ratio,
        equalities=equalities,
        differences=differences,
        expected=summary.expected(found),
    )


def _refused(contest: Contest, data: Data, options: Options, site: Site) -> Evaluation:
    blank = _blank(contest, data, options, site)
    return Evaluation(**blank, verdict=Verdict.REFUSED, reasons=contest.objections, compared=0)


def _blank(contest: Contest, data: Data, options: Options, site: Site) -> dict[str, Any]:
    """What a report says before anything is measured."""
    dtype = _place(site, site.directory).dtype(contest.target)
    now = datetime.fromtimestamp(site.wall_clock(), UTC)
    gpus = f"{site.device.count} GPU{'' if site.device.count == 1 else 's'}"
    return {
        "draft": contest.candidate.digest,
        "incumbent": contest.incumbent.digest if contest.incumbent is not None else None,
        "target": contest.target.digest,
        "dataset": data.digest,
        "made": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "engine": site.engine,
        "device": "cpu" if site.device.kind is DeviceKind.CPU else gpus,
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
