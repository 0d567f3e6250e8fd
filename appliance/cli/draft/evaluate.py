"""
`appliance draft evaluate`: a new draft against the one in service, on prompts it was not trained on.

It starts workers of its own and ends them, also on Ctrl-C; the serving worker is not touched, but
shares the machine.  Run again after it was stopped, it goes on with what was not finished.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from appliance.app.worker import engine_version
from appliance.audit.entry import JSON, format_decimal
from appliance.audit.registry import EntryType
from appliance.cli.common.options import ConfigOption, DataOption, settings_from
from appliance.cli.draft.journal import open_journal
from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.contest import Contest, open_contest
from appliance.drafts.evaluation.evaluating import Data, Site, evaluate, forget_work
from appliance.drafts.evaluation.intervals import Interval
from appliance.drafts.evaluation.page import render_page
from appliance.drafts.evaluation.place import available_memory, context_of
from appliance.drafts.evaluation.prompts import choose_prompts
from appliance.drafts.evaluation.report import Evaluation, Verdict, kind_name
from appliance.drafts.evaluation.runner import Options
from appliance.drafts.evaluation.store import save_evaluation
from appliance.drafts.harvest.dataset import open_dataset
from appliance.drafts.harvest.tokenizer import digest_tokenizer
from appliance.drafts.registry.opening import open_registry
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings, process_environment
from appliance.serving.devices import choose_device, look
from appliance.sovereignty.environment import refuse_ways_out

MEMINFO = Path("/proc/meminfo")
REASON_CHARACTERS = 1000
"""Of the reasons, in the audit log; the report has all of them."""
STOPPED_BY_SIGNAL = 130

CandidateArgument = Annotated[
    str, typer.Argument(help="Digest of a registered draft, or how it begins.", metavar="CANDIDATE")
]
DatasetOption = Annotated[str, typer.Option("--dataset", help="Digest of a data set, or how it begins.")]
TargetOption = Annotated[
    Path | None, typer.Option("--target", help="Directory of the target; default: the one in the settings.")
]
IncumbentOption = Annotated[
    str | None,
    typer.Option(
        "--incumbent", help="Draft to compare with, or `none`; default: the one in service.", metavar="DRAFT"
    ),
]
PromptsOption = Annotated[int, typer.Option("--prompts", min=1, help="Most prompts to ask.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
LimitOption = Annotated[
    float | None,
    typer.Option(
        "--seconds-limit", min=1, help="Begin no further round after so long; the same command goes on."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def evaluate_draft(
    candidate: CandidateArgument,
    dataset: DatasetOption,
    target: TargetOption = None,
    incumbent: IncumbentOption = None,
    prompts: PromptsOption = 64,
    max_tokens: TokensOption = 128,
    seconds_limit: LimitOption = None,
    as_json: JsonOption = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Measure a draft against the one in service on held-out prompts, and say whether it may be tried.

    It runs vLLM with the target alone, with the draft in service and with the candidate, greedily and
    sampled. The exit code is 0 for a draft that passed, 1 for one that was refused.
    """
    refuse_ways_out(process_environment())
    settings = settings_from(config, data)
    directory = locate(settings).drafts
    say = partial(typer.echo, err=True)
    registry = open_registry(settings, time.time)  # noqa: TID251 - a command is a composition root
    say("reading the weights")
    contest = open_contest(
        registry, directory, settings.worker, candidate=candidate, target=target, incumbent=incumbent
    )
    asked = _read_prompts(settings, contest, dataset, prompts, max_tokens)
    options = Options(
        max_tokens=max_tokens, draft_tokens=settings.worker.draft_tokens, seconds_limit=seconds_limit
    )
    evaluation = _run(contest, asked, options, _site(settings, directory, say))
    # The report counts only once the audit log knows of it: promotion reads the report.
    open_journal(settings)(EntryType.DRAFT_EVALUATED, _entry(evaluation))
    path = save_evaluation(directory, evaluation, render_page(evaluation))
    if evaluation.complete or contest.objections:
        forget_work(directory, contest.candidate.digest)
    if as_json:
        typer.echo(evaluation.encode().decode())
    else:
        _show(evaluation, path)
    sys.exit(0 if evaluation.verdict is Verdict.PASSED else 1)


COMMANDS: dict[str, Callable[..., None]] = {"evaluate": evaluate_draft}
"""By name below `appliance draft`."""


def _read_prompts(settings: Settings, contest: Contest, name: str, count: int, max_tokens: int) -> Data:
    dataset = open_dataset(settings, name)
    room = context_of(settings.worker, contest.target) - max_tokens
    if room < 1:
        message = f"--max-tokens {max_tokens} leaves no room for a prompt in the context"
        raise ConfigurationError(f"{message}: choose fewer")
    if dataset.manifest.tokenizer != digest_tokenizer(contest.target.path):
        # The same numbers would be other words to this target.
        message = f"data set {dataset.manifest.digest} was made with another tokenizer than this target's"
        raise DraftRefusedError(f"{message}: harvest again with it")
    if contest.objections:
        # Nothing will be asked, so no content is read.
        chosen = choose_prompts((), count=count, room=room)
        return Data(digest=dataset.manifest.digest, chosen=chosen, missing=0)
    chosen = choose_prompts(dataset.read(held_out=True), count=count, room=room)
    return Data(
        digest=dataset.manifest.digest,
        chosen=chosen,
        missing=dataset.missing,
        withheld=dataset.withheld,
    )


def _site(settings: Settings, directory: Path, say: Callable[[str], None]) -> Site:
    return Site(
        directory=directory,
        settings=settings.worker,
        device=choose_device(settings.worker.device, look()),
        python=sys.executable,
        environment=process_environment(),
        engine=engine_version(),
        available_bytes=available_memory(MEMINFO.read_text(encoding="utf-8")),
        margin=settings.drafts.trial_margin,
        say=say,
        clock=time.monotonic,
        wall_clock=time.time,  # noqa: TID251 - a command is a composition root
    )


def _run(contest: Contest, data: Data, options: Options, site: Site) -> Evaluation:
    """Evaluate until it is done or a signal comes; either way no worker is left."""
    try:
        return asyncio.run(_until_signal(contest, data, options, site))
    except asyncio.CancelledError:
        site.say("stopped; no worker is left. The same command goes on where it was")
        sys.exit(STOPPED_BY_SIGNAL)


async def _until_signal(contest: Contest, data: Data, options: Options, site: Site) -> Evaluation:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 - it is what runs this
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await evaluate(contest, data, options, site)


def _entry(evaluation: Evaluation) -> dict[str, JSON | None]:
    mine = evaluation.acceptance_length(Arm.CANDIDATE)
    other = evaluation.acceptance_length(Arm.INCUMBENT)
    measured = bool(evaluation.equalities)
    return {
        "draft": evaluation.draft,
        "previous_draft": evaluation.incumbent or "none",
        "verdict": str(evaluation.verdict),
        "evaluation": evaluation.digest.removeprefix("sha256:"),
        "reason": "; ".join(evaluation.reasons)[:REASON_CHARACTERS] or None,
        "acceptance_length": _decimal(mine),
        "previous_acceptance_length": _decimal(other),
        "speed_ratio": _decimal(evaluation.speed_ratio),
        "mismatches": evaluation.mismatches if measured else None,
    }


def _decimal(interval: Interval | None) -> str | None:
    return None if interval is None else format_decimal(interval.value)


def _show(evaluation: Evaluation, path: Path) -> None:
    for line in evaluation.lines:
        length = line.acceptance_length
        typer.echo(
            f"{line.arm:<10} {kind_name(line.aspect, line.value):<24} acceptance length {length.value:.2f} "
            f"({length.low:.2f} to {length.high:.2f}), {line.requests} requests"
        )
    for name, ratio in (("acceptance", evaluation.acceptance_ratio), ("speed", evaluation.speed_ratio)):
        if ratio is not None:
            typer.echo(f"{name:<10} {ratio.value:.3f} times ({ratio.low:.3f} to {ratio.high:.3f})")
    for each in evaluation.equalities:
        typer.echo(
            f"{each.arm:<10} {each.same} of {each.compared} greedy answers are the target's own, "
            f"{each.ties} part at a tie, {each.mismatches} differ"
        )
    for reason in evaluation.reasons:
        typer.echo(f"reason     {reason}")
    typer.echo(f"verdict    {evaluation.verdict}")
    typer.echo(f"report     {path}")
