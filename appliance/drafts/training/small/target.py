"""
The frozen target in this process: what a draft reads of it and what it should have said.

It is loaded from its directory, apart from whatever serves; the serving worker is never asked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from appliance.drafts.training.small.precision import computes_in_bfloat16
from appliance.errors import DraftRefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Windows of several texts, padded at their ends to one length."""

    ids: Tensor
    """[batch, time]."""
    positions: Tensor
    """[batch, time], of each token in its text."""
    mask: Tensor
    """[batch, time], true for tokens to be predicted; false for padding."""

    def to(self, device: str) -> "Batch":
        """Return a copy on a device."""
        return Batch(ids=self.ids.to(device), positions=self.positions.to(device), mask=self.mask.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the target made of a batch."""

    captured: list[Tensor]
    """Inputs of the aux layers, [batch, time, target width] each."""
    embeds: Tensor
    """Embeddings of the tokens, [batch, time, width]."""
    logits: Tensor
    """[batch, time, vocabulary]; at t for token t+1."""


class FrozenTarget:
    """A target that is read from, never trained."""

    def __init__(self, model: Any, device: str) -> None:  # noqa: ANN401 - whichever class its config names
        self._model = model.to(device).eval().requires_grad_(requires_grad=False)

    @property
    def output(self) -> Tensor:
        """Its output embedding, [vocabulary, width]."""
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight.detach()

    @torch.no_grad()
    def observe(self, batch: Batch, layers: tuple[int, ...], embedding: Tensor | None = None) -> Observed:
        """
        Run it over a batch.

        Args:
            batch: on the target's device.
            layers: those whose inputs are wanted.
            embedding: of tokens, [vocabulary, width], where it is not to be the target's own.
        """
        seen = self._model(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=False, output_hidden_states=True
        )
        if embedding is None:
            embeds = self._model.get_input_embeddings()(batch.ids)
        else:
            embeds = torch.nn.functional.embedding(batch.ids, embedding)
        # hidden_states[n] is what layer n is given: 0 is the embedding of the tokens.
        captured = [seen.hidden_states[layer] for layer in layers]
        return Observed(captured=captured, embeds=embeds, logits=seen.logits)


def load_target(directory: Path, device: str) -> FrozenTarget:
    """
    Load a target's weights from its directory, in bfloat16 where the device computes in it.

    Raises:
        DraftRefusedError: transformers cannot load it.
    """
    dtype = torch.bfloat16 if computes_in_bfloat16(device) else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=dtype)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise DraftRefusedError(f"the target in {directory} cannot be loaded: {first}") from error
    return FrozenTarget(model, device)
