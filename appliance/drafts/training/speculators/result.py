"""
What the library left becomes the draft of a run, with a training record.
"""

import json
import shutil
from pathlib import Path

from appliance.drafts.lint.shape import read_shape
from appliance.drafts.training.job import Given, Job
from appliance.drafts.training.outcome import Flags, Outcome, write_outcome
from appliance.drafts.training.run_directory import RunDirectory, storage_error
from appliance.drafts.training.shape import head_layers
from appliance.drafts.training.speculators.convert import speculators_config
from appliance.drafts.training.speculators.plan import VERSION
from appliance.errors import DraftRefusedError
from appliance.infra.files import sync_directory, sync_files
from appliance.serving.weights import Weights, inspect_weights

TOOL = f"speculators {VERSION}"


def take_over(job: Job, run: RunDirectory, given: Given, target: Weights) -> None:
    """Put the library's last checkpoint beside a training record, and move both to their place at once."""
    last = last_checkpoint(run.path / "checkpoints")
    config = speculators_config(inspect_weights(last).config, target)
    shape = read_shape(config)
    outcome = Outcome(
        flags=Flags(
            fc_norm=shape.flag("fc_norm"),
            norm_output=shape.flag("norm_output"),
            norm_before_fc=shape.norm_before_fc,
            aux_layers=head_layers(config, target.config),
        ),
        tool=TOOL,
        longest=min(job.recipe.window, max(len(sample.token_ids) for sample in given.training)),
        steps=job.recipe.steps or 0,
        used=given.training,
        details={"optimizer": "AdamW", "checkpoint": last.name},
    )
    try:
        shutil.rmtree(run.partial, ignore_errors=True)
        run.partial.mkdir(mode=0o700)
        text = json.dumps(config, indent=2) + "\n"
        (run.partial / "config.json").write_text(text, encoding="utf-8")
        shutil.copyfile(last / "model.safetensors", run.partial / "model.safetensors")
        write_outcome(run.partial, job, given, outcome, ())
        sync_files(run.partial)
        run.partial.rename(run.draft)
        sync_directory(run.path)
    except OSError as error:
        raise storage_error(run.path, error) from error


def last_checkpoint(directory: Path) -> Path:
    """
    The newest checkpoint the library left: the directory with the highest number.

    Raises:
        DraftRefusedError: there is none.
    """
    found = [path for path in directory.glob("*") if path.name.isdecimal() and not path.is_symlink()]
    whole = [path for path in found if (path / "model.safetensors").exists()]
    if not whole:
        raise DraftRefusedError(f"speculators left no checkpoint in {directory}: train longer")
    return max(whole, key=lambda path: int(path.name))
