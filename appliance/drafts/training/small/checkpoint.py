"""
Checkpoints of a training: whole or absent, whatever happens while one is written.

They hold weights, the optimiser, and where in the data the training stands; never the data.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from appliance.audit.keys import sync_directory
from appliance.errors import DraftStorageError

FORMAT = 1
NAME = "checkpoint.pt"


def save_checkpoint(directory: Path, state: dict[str, Any]) -> None:
    """
    Replace the checkpoint in a run's directory.

    A crash before the last line leaves the one before, from which the run goes on a little earlier.

    Raises:
        DraftStorageError: it cannot be written; the one before is untouched.
    """
    partial = directory / f".{NAME}"
    try:
        with partial.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(directory / NAME)
        sync_directory(directory)
    except (OSError, RuntimeError) as error:
        raise DraftStorageError(f"cannot write a checkpoint into {directory}: {error}") from error


def load_checkpoint(directory: Path) -> dict[str, Any] | None:
    """
    Read the checkpoint of a run; None where it has none yet.

    Raises:
        DraftStorageError: it cannot be read, or another version wrote it.
    """
    path = directory / NAME
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        message = f"{path} cannot be read: remove {directory} to begin the training anew"
        raise DraftStorageError(message) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DraftStorageError(f"{path} was written by another version: remove {directory} to begin anew")
    return state
