"""
`appliance draft evaluate`: compares a new draft with the one in service on held-out prompts.

It starts its own workers and ends them, also on Ctrl-C; a serving worker is unchanged but shares the machine.
Run again, a stopped evaluation resumes.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from appliance.audit.entry import JSON, format_decimal
from appliance.audit.entry_types import EntryType
from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.draft.audit_steps import open_journal
from appliance.drafts.evaluation.arms import Arm, choose_prompts
from appliance.drafts.evaluation.evaluating import (
    Comparison,
    EvaluationSite,
    HeldOutData,
    evaluate,
    forget_work,
    open_comparison,
)
from appliance.drafts.evaluation.evaluation_page import render_page
from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict, kind_name
from appliance.drafts.evaluation.evaluation_worker import WorkerTemplate, available_memory, context_of
from appliance.drafts.evaluation.intervals import ConfidenceInterval
from appliance.drafts.evaluation.runner import EvaluationOptions
from appliance.drafts.evaluation.store import save_evaluation
from appliance.drafts.harvest.dataset import open_dataset
from appliance.drafts.harvest.tokenizer import digest_tokenizer
from appliance.drafts.registry.site_registry import open_registry
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings, process_environment
from appliance.serving.devices import choose_device, detect_hardware
from appliance.serving.launch import engine_version
from appliance.sovereignty.environment import refuse_egress_variables

MEMINFO = Path("/proc/meminfo")
REASON_CHARACTERS = 1000
"""Maximum in the audit log; the report has all reasons."""
STOPPED_BY_SIGNAL = 130
Result = TypeVar("Result")


def evaluate_draft(
    candidate: Annotated[
        str, typer.Argument(help="Digest of a registered draft, or a prefix.", metavar="CANDIDATE")
    ],
    dataset: Annotated[str, typer.Option(help="Digest of a data set, or a prefix.")],
    target: Annotated[
        Path | None, typer.Option(help="Directory of the target; default: worker.model.")
    ] = None,
    incumbent: Annotated[
        str | None,
        typer.Option(
            help="Draft to compare with, or `none`; default: the draft in service.", metavar="DRAFT"
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Maximum number of prompts.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")] = 128,
    seconds_limit: Annotated[
        float | None,
        typer.Option(min=1, help="Start no new round after this time. Run the command again to continue."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Compare a draft with the one in service on held-out prompts, and decide whether it may be tried.

    Runs vLLM with the target alone, with the draft in service and with the candidate, greedy and sampled.
    The exit code is 0 if the draft passed, 1 if it was refused.
    """
    refuse_egress_variables(process_environment())
    settings = settings_from(config, data)
    directory = locate(settings).drafts
    say = partial(typer.echo, err=True)
    registry = open_registry(settings, wall_clock)
    say("reading the weights")
    comparison = open_comparison(
        registry, directory, settings.worker, candidate=candidate, target=target, incumbent=incumbent
    )
    asked = _read_prompts(settings, comparison, dataset, prompts, max_tokens)
    options = EvaluationOptions(
        max_tokens=max_tokens, draft_tokens=settings.worker.draft_tokens, seconds_limit=seconds_limit
    )
    site = evaluation_site(settings, directory, say)
    stopped = partial(say, "stopped; no worker is left. Run the command again to continue")
    evaluation = run_until_signal(partial(evaluate, comparison, asked, options, site), stopped)
    # The audit log records the verdict before the report exists: promotion relies on the report.
    open_journal(settings)(EntryType.DRAFT_EVALUATED, _entry(evaluation))
    path = save_evaluation(directory, evaluation, render_page(evaluation))
    if evaluation.complete or comparison.objections:
        forget_work(directory, comparison.candidate.digest)
    if as_json:
        typer.echo(evaluation.encode().decode())
    else:
        _show(evaluation, path)
    sys.exit(0 if evaluation.verdict is EvaluationVerdict.PASSED else 1)


COMMANDS: dict[str, Callable[..., None]] = {"evaluate": evaluate_draft}
"""By name below `appliance draft`."""


def _read_prompts(
    settings: Settings, comparison: Comparison, name: str, count: int, max_tokens: int
) -> HeldOutData:
    dataset = open_dataset(settings, name)
    room = context_of(settings.worker, comparison.target) - max_tokens
    if room < 1:
        message = f"--max-tokens {max_tokens} leaves no room for a prompt in the context"
        raise ConfigurationError(f"{message}: choose fewer")
    if dataset.manifest.tokenizer != digest_tokenizer(comparison.target.path):
        # The same token ids mean other text to this target.
        message = f"data set {dataset.manifest.digest} was made with another tokenizer than this target's"
        raise DraftRefusedError(f"{message}: harvest again with it")
    if comparison.objections:
        # No prompt will be sent, so no content is read.
        chosen = choose_prompts((), count=count, room=room)
        return HeldOutData(digest=dataset.manifest.digest, chosen=chosen, missing=0)
    chosen = choose_prompts(dataset.read(held_out=True), count=count, room=room)
    return HeldOutData(
        digest=dataset.manifest.digest,
        chosen=chosen,
        missing=dataset.missing,
        withheld=dataset.withheld,
    )


def evaluation_site(settings: Settings, directory: Path, say: Callable[[str], None]) -> EvaluationSite:
    return EvaluationSite(
        directory=directory,
        template=WorkerTemplate(
            settings=settings.worker,
            device=choose_device(settings.worker.device, detect_hardware()),
            python=sys.executable,
            environment=process_environment(),
        ),
        engine=engine_version(),
        available_bytes=available_memory(MEMINFO.read_text(encoding="utf-8")),
        margin=settings.drafts.trial_margin,
        say=say,
        clock=time.monotonic,
        wall_clock=wall_clock,
    )


def run_until_signal(work: Callable[[], Awaitable[Result]], stopped: Callable[[], None]) -> Result:
    """Measure until done or until a signal, which ends the program; no worker keeps running."""

    async def until_signal() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 - this coroutine runs in it
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await work()

    try:
        return asyncio.run(until_signal())
    except asyncio.CancelledError:
        stopped()
        sys.exit(STOPPED_BY_SIGNAL)


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


def _decimal(interval: ConfidenceInterval | None) -> str | None:
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
            f"{each.arm:<10} {each.same} of {each.compared} greedy answers are equal to the target's, "
            f"{each.ties} differ after a tie, {each.mismatches} differ"
        )
    for reason in evaluation.reasons:
        typer.echo(f"reason     {reason}")
    typer.echo(f"verdict    {evaluation.verdict}")
    typer.echo(f"report     {path}")
