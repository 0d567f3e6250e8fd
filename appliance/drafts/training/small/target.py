"""The frozen target in the training process, its tokenizer, and the device both compute on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from appliance.errors import ConfigurationError, DraftRefusedError


def mixed_precision(device: str) -> torch.autocast:
    """A bfloat16 autocast region, off where bfloat16 is emulated: three times slower than float32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=computes_in_bfloat16(device))


def computes_in_bfloat16(device: str) -> bool:
    return (
        device != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    )


def choose_device(requested: str) -> str:
    """The requested device, or a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        raise ConfigurationError("torch finds no GPU: use --device cpu")
    return "cuda" if requested != "cpu" and has_gpu else "cpu"


DOCUMENT_CHARACTERS = 8000
"""Maximum length of a training document; longer text is split."""


@dataclass(frozen=True, slots=True)
class Document:
    token_ids: list[int]

    @property
    def loss_mask(self) -> list[bool]:
        return [True] * len(self.token_ids)


def read_corpus(file: Path, target: Path) -> list[Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the corpus {file}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigurationError(f"the tokenizer in {target} cannot be loaded: {first}") from error
    pieces = [text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS)]
    documents = [Document(ids) for piece in pieces if (ids := tokenizer(piece)["input_ids"])]
    if not documents:
        raise ConfigurationError(f"the corpus {file} is empty")
    return documents


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Windows of several texts, padded at the end to one length."""

    ids: Tensor
    """[batch, time]."""
    positions: Tensor
    """[batch, time], of each token in its text."""
    mask: Tensor
    """[batch, time], true for tokens to predict; false for padding."""

    def to(self, device: str) -> "TokenBatch":
        return TokenBatch(
            ids=self.ids.to(device), positions=self.positions.to(device), mask=self.mask.to(device)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    captured: list[Tensor]
    """Inputs of the aux layers, [batch, time, target width] each."""
    embeds: Tensor
    """Embeddings of the tokens, [batch, time, width]."""
    logits: Tensor
    """[batch, time, vocabulary]; at t for token t+1."""


class FrozenTarget:
    def __init__(self, model: Any, device: str) -> None:  # noqa: ANN401 - whichever class its config names
        self._model = model.to(device).eval().requires_grad_(requires_grad=False)

    @property
    def output(self) -> Tensor:
        """The output embedding, [vocabulary, width]."""
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight.detach()

    @torch.no_grad()
    def observe(
        self, batch: TokenBatch, layers: tuple[int, ...], embedding: Tensor | None = None
    ) -> Observed:
        """Capture the inputs of `layers`; `embedding`, [vocabulary, width], replaces the target's own."""
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
    dtype = torch.bfloat16 if computes_in_bfloat16(device) else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=dtype)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise DraftRefusedError(f"the target in {directory} cannot be loaded: {first}") from error
    return FrozenTarget(model, device)
