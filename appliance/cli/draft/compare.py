"""
`appliance draft compare`: measures drafting methods and numbers of draft tokens on a site's own prompts.

It starts its own workers and ends them, also on Ctrl-C; a serving worker is unchanged but shares the machine.
Nothing is changed, so nothing is recorded in the audit log.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.draft.evaluate import evaluation_site, run_until_signal
from appliance.drafts.comparison.asked import ComparisonPlan, choose_candidates, parse_requests
from appliance.drafts.comparison.comparing import MethodRunner
from appliance.drafts.comparison.figures import MethodComparison, recommend
from appliance.drafts.comparison.rendering import render_comparison
from appliance.drafts.evaluation.evaluating import EvaluationSite, find_incumbent
from appliance.drafts.evaluation.evaluation_worker import LARGEST_BATCH
from appliance.drafts.registry.site_registry import open_registry
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import locate
from appliance.infra.settings import Settings, process_environment
from appliance.serving.weights import Weights, digest_weights, inspect_weights
from appliance.sovereignty.environment import refuse_egress_variables


def compare_methods(
    prompts: Annotated[
        Path, typer.Argument(help="Prompts: a request body, or a line of a batch, on each line (JSON).")
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to measure, repeatable; default: that of the settings, ngram, suffix and mtp.",
            metavar="METHOD[=DRAFT]",
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at the same time, repeatable; default: 1 and 8."),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Maximum draft tokens per step; default: worker.draft_tokens."),
    ] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Maximum number of prompts.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=5, help="Rounds; every number of draft tokens is measured once in each.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - a flag of the command line
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Measure drafting methods on your own prompts, and recommend settings.

    Runs vLLM with one method after the other, at each number of draft tokens. The exit code is 1 if no method
    could be measured.
    """
    refuse_egress_variables(process_environment())
    settings = settings_from(config, data, worker={"draft_tokens": draft_tokens})
    candidates = choose_candidates(method or (), settings.worker)
    plan = ComparisonPlan(
        requests=parse_requests(_read(prompts), most=max_prompts),
        rounds=rounds,
        concurrency=tuple(sorted(set(concurrency or (1, 8)))),
        max_tokens=max_tokens,
    )
    plan.check(settings.worker)
    site = _site(settings, plan)
    target = inspect_weights(settings.worker.model)
    find_draft = partial(_draft_in_service, settings, target, site.directory)
    runner = MethodRunner(plan=plan, target=target, find_draft=find_draft, site=site)
    stopped = partial(site.say, "stopped; no worker is left")
    methods = run_until_signal(partial(runner.compare, candidates), stopped)
    found = MethodComparison(
        engine=site.engine,
        target=str(target.path),
        prompts=len(plan.requests),
        rounds=rounds,
        max_tokens=max_tokens,
        methods=methods,
        recommendation=recommend(methods),
    )
    typer.echo(found.encode().decode() if as_json else render_comparison(found))
    sys.exit(0 if found.recommendation is not None else 1)


COMMANDS: dict[str, Callable[..., None]] = {"compare": compare_methods}
"""By name below `appliance draft`."""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read as UTF-8: {type(error).__name__}") from error


def _site(settings: Settings, plan: ComparisonPlan) -> EvaluationSite:
    site = evaluation_site(settings, locate(settings).drafts, partial(typer.echo, err=True))
    largest = max(LARGEST_BATCH, *plan.concurrency)
    return replace(site, template=replace(site.template, largest_batch=largest))


def _draft_in_service(settings: Settings, target: Weights, directory: Path) -> Weights | None:
    if settings.worker.method != "eagle3":
        return None if settings.worker.draft is None else inspect_weights(settings.worker.draft)
    registry = open_registry(settings, wall_clock)
    return find_incumbent(registry, directory, settings.worker, digest_weights(target.path))
