"""
A trainer's files: draft heads as vLLM reads them (safetensors and config.json), and checkpoints.

A refreshed head keeps the config, the names and the types it was read with: only numbers change.
Checkpoints hold weights, optimiser state and the position in the data; never the data.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from appliance.drafts.training.head_shape import head_shape, new_config
from appliance.drafts.training.small.head import DraftHead
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.infra.files import sync_directory, sync_file
from appliance.serving.weights import inspect_weights

PLAIN, SPECULATORS = "midlayer.", "layers.0."
"""The layer's prefix in files of the plain and of the speculators format."""
IN_LAYER = (
    ("self_attn.", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ("mlp.", ("gate_proj", "up_proj", "down_proj")),
    ("", ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)
MAP, EMBEDDING, OUTPUT = "d2t", "embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True, kw_only=True)
class StoredHead:
    """A head and the untrained part of its files."""

    head: DraftHead
    config: Mapping[str, Any]
    layer: str = PLAIN
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Tensors written as they were read."""
    dtype: torch.dtype = torch.bfloat16
    """Type of the trained tensors in the file."""


def new_head(target: Mapping[str, Any], output: Tensor) -> StoredHead:
    """An untrained EAGLE 3.1 head; it starts from the target's output embedding, [vocabulary, width]."""
    config = new_config(target)
    head = DraftHead(head_shape(config, target))
    _start_from(head, output)
    return StoredHead(head=head, config=config)


def load_head(directory: Path, target: Mapping[str, Any], output: Tensor) -> StoredHead:
    """Read a head without lint errors; `output`, the target's output embedding, is for one that has none."""
    config = inspect_weights(directory).config
    head = DraftHead(head_shape(config, target))
    stored: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= load_file(file)
    layer = SPECULATORS if any(name.startswith(SPECULATORS) for name in stored) else PLAIN
    if OUTPUT not in stored:
        _start_from(head, output)
        stored[OUTPUT] = head.lm_head.weight.detach().clone()
    names = {name: weight_name(name, layer) for name in head.state_dict()}
    if missing := sorted(name for name in names.values() if name not in stored):
        raise DraftRefusedError(f"{directory} has no {missing[0]}: copy it again")
    try:
        head.load_state_dict({name: stored[named].float() for name, named in names.items()})
    except RuntimeError as error:
        message = (
            f"the tensors in {directory} do not have the sizes of its config.json: run appliance draft lint"
        )
        raise DraftRefusedError(message) from error
    kept = {name: tensor for name, tensor in stored.items() if name not in set(names.values())}
    if MAP in kept:
        head.proposes = torch.arange(head.shape.drafted) + kept[MAP].long()
    if EMBEDDING in kept:
        head.embedding = kept[EMBEDDING].float()
    dtype = stored["fc.weight"].dtype
    return StoredHead(head=head, config=config, layer=layer, kept=kept, dtype=dtype)


def save_head(stored: StoredHead, directory: Path) -> None:
    weights = {
        weight_name(name, stored.layer): value.detach().to("cpu", stored.dtype).contiguous()
        for name, value in stored.head.state_dict().items()
    }
    weights |= {name: tensor.contiguous() for name, tensor in stored.kept.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(dict(stored.config), indent=2, ensure_ascii=False) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def weight_name(parameter: str, layer: str = PLAIN) -> str:
    owner = parameter.split(".", maxsplit=1)[0]
    part = next((part for part, names in IN_LAYER if owner in names), None)
    return parameter if part is None else f"{layer}{part}{parameter}"


def _start_from(head: DraftHead, output: Tensor) -> None:
    if tuple(output.shape) != tuple(head.lm_head.weight.shape):
        raise DraftRefusedError(
            f"the target's output embedding is {tuple(output.shape)}, and the draft needs "
            f"{tuple(head.lm_head.weight.shape)}: start from a draft with its own output"
        )
    with torch.no_grad():
        head.lm_head.weight.copy_(output.float())


CHECKPOINT, CHECKPOINT_FORMAT = "checkpoint.pt", 1


def save_checkpoint(directory: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint; after a crash or DraftStorageError the previous one is untouched."""
    partial = directory / f".{CHECKPOINT}"
    try:
        with partial.open("wb") as file:
            torch.save({"format": CHECKPOINT_FORMAT, **state}, file)
            sync_file(file)
        partial.replace(directory / CHECKPOINT)
        sync_directory(directory)
    except (OSError, RuntimeError) as error:
        raise DraftStorageError(f"cannot write a checkpoint into {directory}: {error}") from error


def load_checkpoint(directory: Path) -> dict[str, Any] | None:
    """None if there is none yet; DraftStorageError if it cannot be read, or another version wrote it."""
    path = directory / CHECKPOINT
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        message = f"{path} cannot be read: remove {directory} to start the training over"
        raise DraftStorageError(message) from error
    if not isinstance(state, dict) or state.get("format") != CHECKPOINT_FORMAT:
        raise DraftStorageError(f"{path} was written by another version: remove {directory} to start over")
    return state
