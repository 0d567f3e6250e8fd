"""
The optimiser loop.

Steps are deterministic: the same head, data and recipe on the same machine give the same weights, bit for
bit, however often the training was interrupted.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from appliance.drafts.training.small.head import DraftHead
from appliance.drafts.training.small.loss import Unrolled, unrolled_loss
from appliance.drafts.training.small.target import FrozenTarget, TokenBatch, mixed_precision
from appliance.drafts.training.training_recipe import TrainingRecipe
from appliance.drafts.training.windows import Text, TextWindow
from appliance.errors import DraftRefusedError

BETAS = (0.9, 0.95)
LARGEST_GRADIENT = 1.0
SMOOTH = 0.95
"""Weight of the past in a smoothed number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScore:
    agreement: tuple[float, ...]
    """Per draft token, the share of agreement with the target's first choice."""
    acceptance_length: float
    """Mean tokens per draft with the bonus token, with greedy verification."""
    drafts: int


class Trainer:
    def __init__(self, head: DraftHead, target: FrozenTarget, recipe: TrainingRecipe, device: str) -> None:
        head.to_device(device)
        head.train()
        self.head, self._target, self._recipe, self._device = head, target, recipe, device
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.rate, betas=BETAS)
        self._agreement: list[float] = []
        self._loss: float | None = None

    @property
    def loss(self) -> float:
        """Smoothed; 0 before the first step."""
        return self._loss or 0.0

    @property
    def agreement(self) -> tuple[float, ...]:
        """Smoothed share of agreement per draft token with the target's first choice."""
        return tuple(self._agreement)

    def step(self, batch: TokenBatch, rate: float) -> Unrolled:
        """Train on one batch; raises DraftRefusedError if the gradient is not finite: the head is lost."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        result = self._unroll(batch)
        self._optimizer.zero_grad(set_to_none=True)
        if any(result.counts):
            result.loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), LARGEST_GRADIENT)
            if not math.isfinite(float(norm)):
                raise DraftRefusedError("the training diverged: choose a lower --rate and another --run")
            self._optimizer.step()
            self._smooth(result)
        return result

    def measure(self, batches: Iterable[TokenBatch]) -> HeldOutScore:
        hits, counts = [0] * self._recipe.unroll, [0] * self._recipe.unroll
        accepted = drafts = 0
        self.head.eval()
        with torch.no_grad():
            for batch in batches:
                result = self._unroll(batch)
                hits = [sum(pair) for pair in zip(hits, result.hits, strict=True)]
                counts = [sum(pair) for pair in zip(counts, result.counts, strict=True)]
                accepted, drafts = accepted + result.accepted, drafts + result.drafts
        self.head.train()
        return HeldOutScore(
            agreement=tuple(hit / max(1, count) for hit, count in zip(hits, counts, strict=True)),
            acceptance_length=1 + accepted / max(1, drafts),
            drafts=drafts,
        )

    def state(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "agreement": self._agreement,
            "loss": self._loss,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self._agreement, self._loss = list(state["agreement"]), state["loss"]

    def _unroll(self, batch: TokenBatch) -> Unrolled:
        batch = batch.to(self._device)
        with mixed_precision(self._device):
            seen = self._target.observe(batch, self.head.shape.aux_layers, self.head.embedding)
            return unrolled_loss(self.head, seen, batch, unroll=self._recipe.unroll, decay=self._recipe.decay)

    def _smooth(self, result: Unrolled) -> None:
        now = [hit / max(1, count) for hit, count in zip(result.hits, result.counts, strict=True)]
        loss = result.loss.item()
        if self._loss is None:
            self._loss, self._agreement = loss, now
            return
        self._loss = SMOOTH * self._loss + (1 - SMOOTH) * loss
        self._agreement = [
            SMOOTH * was + (1 - SMOOTH) * new for was, new in zip(self._agreement, now, strict=True)
        ]


def collate(texts: Sequence[Text], windows: Sequence[TextWindow], unroll: int) -> TokenBatch:
    """
    Stack windows, padded to the longest and by the tokens that its last draft spans.

    Without the extra padding the last tokens of a text would not be trained as first draft tokens.  Padding
    follows all tokens, so neither target nor head attends to it.
    """
    time = max(3, *(window.length for window in windows)) + unroll - 1
    ids = torch.zeros(len(windows), time, dtype=torch.long)
    mask = torch.zeros(len(windows), time, dtype=torch.bool)
    starts = torch.tensor([window.start for window in windows], dtype=torch.long)
    for row, window in enumerate(windows):
        text = texts[window.text]
        ids[row, : window.length] = torch.tensor(text.token_ids[window.start : window.stop])
        seen = torch.tensor(text.loss_mask[window.start : window.stop], dtype=torch.bool)
        seen[: max(0, window.first - window.start)] = False
        mask[row, : window.length] = seen
    return TokenBatch(ids=ids, positions=starts[:, None] + torch.arange(time), mask=mask)


def plain_batch(ids: torch.Tensor) -> TokenBatch:
    """A batch of whole windows [batch, time] with positions from 0."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return TokenBatch(ids=ids, positions=positions, mask=torch.ones_like(ids, dtype=torch.bool))


def concatenate(one: TokenBatch, other: TokenBatch) -> TokenBatch:
    time = max(one.ids.shape[1], other.ids.shape[1])
    both = [_padded(batch, time) for batch in (one, other)]
    return TokenBatch(
        ids=torch.cat([batch.ids for batch in both]),
        positions=torch.cat([batch.positions for batch in both]),
        mask=torch.cat([batch.mask for batch in both]),
    )


def _padded(batch: TokenBatch, time: int) -> TokenBatch:
    more = time - batch.ids.shape[1]
    return TokenBatch(
        ids=torch.nn.functional.pad(batch.ids, (0, more)),
        positions=batch.positions[:, :1] + torch.arange(time),
        mask=torch.nn.functional.pad(batch.mask, (0, more)),
    )
