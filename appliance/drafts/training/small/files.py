"""
Draft heads on disk: safetensors and config.json, as vLLM reads them.

A head that was trained before is written with the config, the names and the types it was read with, so
that a refresh changes numbers and nothing else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from appliance.drafts.training.shape import head_shape, new_config
from appliance.drafts.training.small.head import DraftHead
from appliance.errors import DraftRefusedError
from appliance.serving.weights import inspect_weights

PLAIN, SPECULATORS = "midlayer.", "layers.0."
"""What the layer is called in files of the plain and of the speculators format."""
IN_LAYER = (
    ("self_attn.", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ("mlp.", ("gate_proj", "up_proj", "down_proj")),
    ("", ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)
MAP, EMBEDDING, OUTPUT = "d2t", "embed_tokens.weight", "lm_head.weight"


@dataclass(slots=True, kw_only=True)
class StoredHead:
    """A head, and what belongs to its files but is not trained."""

    head: DraftHead
    config: Mapping[str, Any]
    layer: str = PLAIN
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are written as they were read."""
    dtype: torch.dtype = torch.bfloat16
    """What the trained ones are stored as."""


def new_head(target: Mapping[str, Any], output: Tensor) -> StoredHead:
    """
    Make an EAGLE 3.1 head to be trained from nothing.

    Args:
        target: the target's config.json.
        output: the target's own output embedding, [vocabulary, width], which its head starts from.

    Raises:
        DraftRefusedError: the target's config does not say enough, or its output does not fit.
    """
    config = new_config(target)
    head = DraftHead(head_shape(config, target))
    _start_from(head, output)
    return StoredHead(head=head, config=config)


def load_head(directory: Path, target: Mapping[str, Any], output: Tensor) -> StoredHead:
    """
    Read a head to train it further.

    Args:
        directory: its files; `lint_pair` finds no error in them.
        target: the target's config.json.
        output: the target's own output embedding, for a head that has none.

    Raises:
        ConfigurationError: a file is missing or broken.
        DraftRefusedError: it is none that can be trained here.
    """
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
        raise DraftRefusedError(f"{directory} has no {missing[0]}: its copy is incomplete")
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
    """
    Write safetensors and config.json into an existing directory.

    Raises:
        OSError: they cannot be written.
    """
    weights = {
        weight_name(name, stored.layer): value.detach().to("cpu", stored.dtype).contiguous()
        for name, value in stored.head.state_dict().items()
    }
    weights |= {name: tensor.contiguous() for name, tensor in stored.kept.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(dict(stored.config), indent=2, ensure_ascii=False) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def weight_name(parameter: str, layer: str = PLAIN) -> str:
    """What a parameter of the head is called in a file."""
    owner = parameter.split(".", maxsplit=1)[0]
    part = next((part for part, names in IN_LAYER if owner in names), None)
    return parameter if part is None else f"{layer}{part}{parameter}"


def _start_from(head: DraftHead, output: Tensor) -> None:
    """Give the head the target's own output embedding."""
    if tuple(output.shape) != tuple(head.lm_head.weight.shape):
        raise DraftRefusedError(
            f"the target's output embedding is {tuple(output.shape)}, and the draft needs "
            f"{tuple(head.lm_head.weight.shape)}: start from a draft that has its own"
        )
    with torch.no_grad():
        head.lm_head.weight.copy_(output.float())
