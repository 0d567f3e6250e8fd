"""
`appliance draft train`: trains a draft on a data set of this site.

It can be stopped or killed at any time; the same command resumes.  Repeating a finished training changes
nothing.
"""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli.common.options import ConfigOption, DataOption, settings_from, wall_clock
from appliance.cli.draft.audit_steps import open_journal
from appliance.drafts.harvest.dataset import Dataset, open_dataset
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.drafts.training.backend import choose_backend
from appliance.drafts.training.head_shape import text_config
from appliance.drafts.training.parent_draft import choose_parent
from appliance.drafts.training.progress import Point, ProgressLine, read_points
from appliance.drafts.training.publish import publish, refuse_erased
from appliance.drafts.training.run_directory import RunDirectory, run_directory
from appliance.drafts.training.speculators.scratch import sweep_scratch
from appliance.drafts.training.speculators.speculators_run import train_with_speculators
from appliance.drafts.training.trainer_process import train
from appliance.drafts.training.training_job import Job, sample_lines
from appliance.drafts.training.training_recipe import STEPS, Backend, TrainingRecipe, default_rate
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.infra.settings import Settings, process_environment
from appliance.serving.devices import detect_hardware
from appliance.serving.weights import Weights, load_weights
from appliance.sovereignty.environment import refuse_egress_variables

_say = partial(typer.echo, err=True)
STOPPED = 130
"""Exit code of a stopped training."""

ScratchOption = Annotated[bool, typer.Option("--from-scratch", help="Train an EAGLE 3.1 head from scratch.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainingRequest:
    """The checked arguments of the command."""

    settings: Settings
    registry: DraftRegistry
    dataset: Dataset
    target: Weights
    job: Job
    run: RunDirectory


def train_draft(
    dataset: Annotated[str, typer.Option(help="Digest of a data set, or a prefix of it.")],
    target: Annotated[
        Path | None, typer.Option(help="Directory of the target; default: worker.model.")
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Draft to start from: a registered one or a directory; default: the draft in service.",
            metavar="DRAFT",
        ),
    ] = None,
    from_scratch: ScratchOption = False,  # noqa: FBT002 - a flag of the command line
    run: Annotated[
        str | None, typer.Option(help="Name of the run; default: derived from its inputs.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help=f"Steps; default: {STEPS}.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training, instead of --steps.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, small or speculators.")] = "auto",
    batch: Annotated[int, typer.Option(help="Windows per step.")] = 8,
    window: Annotated[int, typer.Option(help="Maximum tokens per window.")] = 512,
    unroll: Annotated[int, typer.Option(help="Draft tokens trained in a row.")] = 3,
    decay: Annotated[
        float, typer.Option(help="Weight of a draft token relative to the previous one's.")
    ] = 0.9,
    rate: Annotated[
        float | None, typer.Option(help="Peak learning rate; default: by the width of the draft.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 32,
    corpus: Annotated[Path | None, typer.Option(help="File of general text (UTF-8) to mix in.")] = None,
    corpus_share: Annotated[
        float, typer.Option(help="Share of a step's windows taken from general text.")
    ] = 0.25,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter with speculators and vLLM; default: this one.")
    ] = None,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """
    Train a draft on a data set and register it; it serves no traffic yet.

    By default training starts from the draft in service and keeps its kind; --from-scratch makes EAGLE
    3.1.  After a crash the same command resumes.  Ctrl-C writes a checkpoint and stops.
    """
    if device not in {"auto", "cpu", "cuda"}:
        raise ConfigurationError("--device is auto, cpu or cuda")
    if parent is not None and from_scratch:
        raise ConfigurationError("give --from or --from-scratch, not both")
    refuse_egress_variables(process_environment())
    settings = settings_from(config, data)
    registry = open_registry(settings, wall_clock)
    _say("reading the target's weights")
    weights = load_weights(target or settings.worker.model)
    opened = open_dataset(settings, dataset)
    if opened.manifest.target != weights.digest:
        raise DraftRefusedError(
            f"the data set was harvested for the target {opened.manifest.target}, and {weights.path} is "
            f"{weights.digest}: harvest again, or give the right --target"
        )
    start = None if from_scratch else choose_parent(settings, registry, weights, parent)
    recipe = TrainingRecipe(
        steps=STEPS if steps is None and minutes is None else steps,
        minutes=minutes,
        batch=batch,
        window=window,
        unroll=unroll,
        decay=decay,
        rate=rate or _rate(weights, is_refresh=start is not None),
        seed=seed,
        corpus_share=0.0 if corpus is None else corpus_share,
    )
    job = Job(
        run="",
        target=str(weights.path),
        target_digest=weights.digest,
        parent=None if start is None else str(start.path),
        parent_digest=None if start is None else start.digest,
        dataset=opened.manifest.digest,
        recipe=recipe,
        device=device,
        corpus=None if corpus is None else str(corpus.absolute()),
        corpus_digest=None if corpus is None else _digest(corpus),
    )
    where = run_directory(registry.directory, job.identity, run)
    request = _TrainingRequest(
        settings=settings,
        registry=registry,
        dataset=opened,
        target=weights,
        job=job.in_directory(where.path),
        run=where,
    )
    sweep_scratch(registry.directory)
    chosen = choose_backend(backend, device, weights, detect_hardware())
    with where.locked():
        _train_and_publish(request, chosen, python or Path(sys.executable))


COMMANDS: dict[str, Callable[..., None]] = {"train": train_draft}


def _train_and_publish(request: _TrainingRequest, backend: Backend, python: Path) -> None:
    run = request.run
    run.refuse_changed(request.job.identity)
    if run.published is not None:
        typer.echo(f"{run.published} is already trained by this run; nothing changed")
        return
    if not run.draft.exists():
        _say(f"training with the backend {backend} in {run.path}")
        line = ProgressLine(sys.stderr)
        try:
            finished = _train(request, backend, python, line)
        finally:
            line.close()
        if request.dataset.withheld:
            _say(f"{request.dataset.withheld} samples were excluded: their tenants no longer allow training")
        if not finished:
            _say("stopped with a checkpoint: run the same command to resume")
            sys.exit(STOPPED)
    refuse_erased(run.draft, request.dataset)
    digest = publish(
        run.draft,
        request.target,
        registry=request.registry,
        signer=lambda: site_signer(request.settings),
        journal=open_journal(request.settings),
        context=request.settings.worker.max_model_len,
    )
    run.publish(digest)
    _summarise(run)
    typer.echo(f"report in {run.draft / 'report.html'}")
    typer.echo(f"{digest} is registered; measure it with `appliance draft evaluate`")


def _train(request: _TrainingRequest, backend: Backend, python: Path, line: ProgressLine) -> bool:
    def observe(point: Point) -> None:
        line.show(point, steps=request.job.recipe.steps)

    if backend is Backend.SPECULATORS:
        return train_with_speculators(
            request.job, request.run, sample_lines(request.dataset), python=python,
            environment=process_environment(), say=_say,
        )  # fmt: skip
    return train(
        request.job,
        lambda: sample_lines(request.dataset),
        log=request.run.log,
        environment=process_environment(),
        observe=observe,
    )


def _summarise(run: RunDirectory) -> None:
    """Print acceptance on held-out samples, if it was measured."""
    measured = [point for point in read_points(run.progress) if point.held_out]
    if measured and measured[-1].acceptance_length is not None:
        shares = " ".join(f"{share:.2f}" for share in measured[-1].held_out or ())
        typer.echo(
            f"on held-out samples: agreement {shares}, acceptance length "
            f"{measured[-1].acceptance_length:.2f} with greedy verification"
        )


def _rate(target: Weights, *, is_refresh: bool) -> float:
    width = text_config(target.config).get("hidden_size")
    if not isinstance(width, int) or width < 1:
        raise ConfigurationError(f"{target.path}/config.json has no hidden_size: give --rate")
    return default_rate(width, is_refresh=is_refresh)


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
    except OSError as error:
        raise ConfigurationError(f"cannot read the corpus {file}: {error.strerror}") from error
