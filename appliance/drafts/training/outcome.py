"""The files a finished training adds to the weights: `training.json`, `used.txt`, `report.html`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.drafts.training.progress import Point
from appliance.drafts.training.run_directory import used_lines
from appliance.drafts.training.training_job import Job, JobSample, TrainingSet
from appliance.drafts.training.training_report import render_page
from appliance.serving.weights import TRAINING_RECORD

USED = "used.txt"
REPORT = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    fc_norm: bool
    norm_output: bool
    norm_before_fc: bool
    aux_layers: tuple[int, ...]
    tool: str
    """Name and version."""
    longest: int
    """Maximum tokens it saw at once."""
    steps: int
    used: tuple[JobSample, ...]
    details: Mapping[str, Any]
    """Other members of the recipe."""
    acceptance_length: float | None = None
    """On held-out samples with greedy verification; None if not measured."""


def training_record(job: Job, given: TrainingSet, outcome: TrainingOutcome) -> dict[str, Any]:
    used = "".join(used_lines(outcome.used))
    record: dict[str, Any] = {
        "fc_norm": outcome.fc_norm,
        "norm_output": outcome.norm_output,
        "norm_before_fc": outcome.norm_before_fc,
        "aux_layers": list(outcome.aux_layers),
        "trained_context": outcome.longest,
        "target": job.target_digest,
        "parent": job.parent_digest,
        "dataset": job.dataset,
        "used": hashlib.sha256(used.encode()).hexdigest(),
        "samples": len(outcome.used),
        "missing": given.missing,
        "recipe": {
            "tool": outcome.tool,
            **{name: value for name, value in job.recipe.to_json().items() if value is not None},
            "steps": outcome.steps,
            **({} if job.corpus_digest is None else {"corpus": job.corpus_digest}),
            **outcome.details,
        },
    }
    if outcome.acceptance_length is not None:
        expected = {
            "acceptance_length": round(outcome.acceptance_length, 3),
            "draft_tokens": job.recipe.unroll,
        }
        record["expected"] = {"all": expected}
        record["recipe"]["expected_from"] = "agreement with the target's first choice on held-out samples"
    return {name: value for name, value in record.items() if value is not None}


def write_outcome(
    directory: Path, job: Job, given: TrainingSet, outcome: TrainingOutcome, points: Sequence[Point]
) -> None:
    record = training_record(job, given, outcome)
    (directory / TRAINING_RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (directory / USED).write_text("".join(used_lines(outcome.used)), encoding="utf-8")
    facts: dict[str, Any] = {
        "Target": job.target_digest,
        "Started from": job.parent_digest or "nothing",
        "Data set": job.dataset,
        "Training samples": f"{len(outcome.used)}, and {given.missing} of the data set were erased",
        "Held-out samples": len(given.held_out),
        "Steps": outcome.steps,
        "Tool": outcome.tool,
    }
    if outcome.acceptance_length is not None:
        facts["Expected acceptance length"] = (
            f"{outcome.acceptance_length:.2f} with {job.recipe.unroll} draft tokens, verified greedily"
        )
    page = render_page("Training of a draft", facts, points)
    (directory / REPORT).write_text(page, encoding="utf-8")
