"""
The training loop with its checkpoints: what `python -m appliance.drafts.training` runs.

It can end at any moment: SIGTERM makes it write a checkpoint; after anything else the same job resumes from
the last checkpoint.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from appliance.drafts.training.outcome import TrainingOutcome, write_outcome
from appliance.drafts.training.progress import Point, append_point, drop_after, read_points
from appliance.drafts.training.run_directory import RunDirectory, storage_errors
from appliance.drafts.training.small.files import (
    StoredHead,
    load_checkpoint,
    load_head,
    new_head,
    save_checkpoint,
    save_head,
)
from appliance.drafts.training.small.target import (
    Document,
    FrozenTarget,
    TokenBatch,
    choose_device,
    load_target,
    read_corpus,
)
from appliance.drafts.training.small.trainer import Trainer, collate, concatenate
from appliance.drafts.training.training_job import Job, TrainingSet
from appliance.drafts.training.training_recipe import learning_rate, timed_rate
from appliance.drafts.training.windows import Feed, FeedPosition, plan_epoch
from appliance.errors import DraftRefusedError

CHECKPOINT_STEPS = 200
CHECKPOINT_SECONDS = 60.0
POINTS = 500
"""Maximum lines of progress of a training limited by steps."""
POINT_SECONDS = 2.0
"""Seconds between two lines of progress of a training limited by time."""
MEASUREMENTS = 5
"""Measurements on held-out samples, the final one included."""
MEASURED_BATCHES = 16
"""Maximum batches per measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    step: int
    finished: bool
    """Whether the draft is complete; otherwise the training was stopped."""


class Training:
    def __init__(
        self,
        job: Job,
        given: TrainingSet,
        *,
        report: Callable[[Point], None],
        is_stopped: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._given, self._recipe = job, given, job.recipe
        self._run = RunDirectory(path=Path(job.run))
        self._report, self._is_stopped, self._now = report, is_stopped, now
        self._began = 0.0
        self._run.claim(job, given)
        self._device = choose_device(job.device)
        torch.manual_seed(self._recipe.seed)
        target = load_target(Path(job.target), self._device)
        self._stored = _open_head(job, target)
        sliding = self._stored.head.shape.sliding_window
        if sliding is not None and sliding < self._recipe.window:
            raise DraftRefusedError(
                f"the draft attends to {sliding} tokens only: lower --window {self._recipe.window} to that"
            )
        _refuse_unknown_tokens(given, self._stored.head.shape.vocabulary)
        self._trainer = Trainer(self._stored.head, target, self._recipe, self._device)
        self._texts = given.training
        self._own = max(1, round(self._recipe.batch * (1 - self._recipe.corpus_share)))
        self._documents: list[Document] = []
        if job.corpus is not None and self._own < self._recipe.batch:
            self._documents = read_corpus(Path(job.corpus), Path(job.target))
        self._seen: set[int] = set()
        self._step = 0

    def run(self) -> Ended:
        if self._run.draft.exists():
            return Ended(step=self._recipe.steps or 0, finished=True)
        state = load_checkpoint(self._run.path)
        feed, general = self._feeds(state)
        self._begin(state)
        saved = self._elapsed
        while (done := self._done()) < 1:
            if self._is_stopped():
                self._save(feed, general)
                return Ended(step=self._step, finished=False)
            rate = self._rate()
            batch = self._next_batch(feed, general)
            self._trainer.step(batch, rate)
            self._step += 1
            self._record(self._point(rate), before=done)
            spent = self._elapsed
            if self._step % CHECKPOINT_STEPS == 0 or spent - saved >= CHECKPOINT_SECONDS:
                self._save(feed, general)
                saved = spent
        self._save(feed, general)
        self._finish()
        return Ended(step=self._step, finished=True)

    def _feeds(self, state: dict[str, Any] | None) -> tuple[Feed, Feed | None]:
        recipe, places = self._recipe, {} if state is None else state["places"]

        def feed(texts: Any, batch: int, seed: int, name: str) -> Feed:  # noqa: ANN401 - any sequence of texts
            place = None if name not in places else FeedPosition(**places[name])
            return Feed(texts, batch=batch, window=recipe.window, seed=seed, place=place)

        general = recipe.batch - self._own
        own = feed(self._texts, self._own, recipe.seed, "own")
        if not self._documents:
            return own, None
        return own, feed(self._documents, general, recipe.seed + 1, "general")

    def _begin(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self._trainer.restore(state)
            self._step, self._seen = state["step"], set(state["seen"])
        with storage_errors(self._run.path):
            # Steps after the checkpoint are about to run again.
            drop_after(self._run.progress, self._step)
        self._began = self._now() - (0.0 if state is None else state["elapsed"])

    @property
    def _elapsed(self) -> float:
        """Seconds of training, those of earlier processes included."""
        return self._now() - self._began

    def _next_batch(self, feed: Feed, general: Feed | None) -> TokenBatch:
        windows = feed.next_step()
        self._seen.update(window.text for window in windows)
        batch = collate(self._texts, windows, self._recipe.unroll)
        if general is None:
            return batch
        return concatenate(batch, collate(self._documents, general.next_step(), self._recipe.unroll))

    def _done(self) -> float:
        if self._recipe.steps is not None:
            return self._step / self._recipe.steps
        return self._elapsed / ((self._recipe.minutes or 0) * 60)

    def _rate(self) -> float:
        recipe = self._recipe
        if recipe.steps is not None:
            return learning_rate(self._step, recipe.steps, recipe.rate)
        return timed_rate(self._elapsed, (recipe.minutes or 0) * 60, recipe.rate)

    def _point(self, rate: float) -> Point:
        return Point(
            step=self._step,
            elapsed=self._elapsed,
            done=min(1.0, self._done()),
            loss=self._trainer.loss,
            agreement=self._trainer.agreement,
            rate=rate,
        )

    def _record(self, point: Point, *, before: float) -> None:
        """Report a step; record some of them, and measure held-out samples at intervals."""
        if point.done < 1 and int(before * MEASUREMENTS) < int(point.done * MEASUREMENTS):
            point = self._measured(point)
        self._report(point)
        every = max(1, (self._recipe.steps or 0) // POINTS)
        due = point.step % every == 0 if self._recipe.steps else self._is_time(before, point.done)
        if due or point.held_out is not None:
            with storage_errors(self._run.path):
                append_point(self._run.progress, point)

    def _is_time(self, before: float, done: float) -> bool:
        """Whether a training limited by time has reached its next recorded point."""
        parts = max(1, min(POINTS, int((self._recipe.minutes or 0) * 60 / POINT_SECONDS)))
        return int(done * parts) > int(before * parts)

    def _measured(self, point: Point) -> Point:
        """Add agreement on held-out samples, if there are any."""
        held_out = self._given.held_out
        steps = plan_epoch(
            held_out, batch=self._recipe.batch, window=self._recipe.window, seed=self._recipe.seed, epoch=0
        )
        chosen = steps[:MEASURED_BATCHES]
        if not chosen:
            return point
        score = self._trainer.measure(collate(held_out, step, self._recipe.unroll) for step in chosen)
        return replace(point, held_out=score.agreement, acceptance_length=score.acceptance_length)

    def _save(self, feed: Feed, general: Feed | None) -> None:
        places = {"own": feed} | ({} if general is None else {"general": general})
        save_checkpoint(
            self._run.path,
            {
                **self._trainer.state(),
                "step": self._step,
                "elapsed": self._elapsed,
                "places": {name: asdict(each.place) for name, each in places.items()},
                "seen": sorted(self._seen),
            },
        )

    def _finish(self) -> None:
        point = self._measured(self._point(0.0))
        shape = self._stored.head.shape
        used = tuple(self._texts[number] for number in sorted(self._seen))
        outcome = TrainingOutcome(
            fc_norm=shape.fc_norm,
            norm_output=shape.norm_output,
            norm_before_fc=shape.norm_before_fc,
            aux_layers=shape.aux_layers,
            tool="appliance small backend",
            longest=min(self._recipe.window, max(len(text.token_ids) for text in used)),
            steps=self._step,
            used=used,
            details={"optimizer": "AdamW", "device": self._device, "torch": str(torch.__version__)},
            acceptance_length=point.acceptance_length,
        )
        with self._run.assembled() as directory:
            append_point(self._run.progress, point)
            save_head(self._stored, directory)
            write_outcome(directory, self._job, self._given, outcome, read_points(self._run.progress))


def _refuse_unknown_tokens(given: TrainingSet, vocabulary: int) -> None:
    largest = max((max(sample.token_ids, default=0) for sample in given.samples), default=0)
    if largest >= vocabulary:
        raise DraftRefusedError(
            f"a sample has token {largest}, but the target's vocabulary is {vocabulary}: harvest "
            "again with the target's own tokenizer"
        )


def _open_head(job: Job, target: FrozenTarget) -> StoredHead:
    config = json.loads((Path(job.target) / "config.json").read_text(encoding="utf-8"))
    if job.parent is None:
        return new_head(config, target.output)
    return load_head(Path(job.parent), config, target.output)
