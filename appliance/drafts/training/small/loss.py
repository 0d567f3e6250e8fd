"""
The training loss: cross entropy against the target's own distribution, unrolled.

Only tokens of the mask count.  Step j of row t predicts token t+2+j, so that token's mask decides, and it is
compared with the target's logits at t+1+j.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from appliance.drafts.training.small.head import DraftHead, StepCache
from appliance.drafts.training.small.target import Observed, TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrolled:
    loss: Tensor
    """Weighted sum of the draft tokens' losses; 0 for an empty mask."""
    hits: tuple[int, ...]
    """Per draft token, how often it was the target's first choice."""
    counts: tuple[int, ...]
    """Per draft token, how many were predicted."""
    accepted: int
    """Draft tokens that greedy verification accepts: hits whose predecessors were hits."""

    @property
    def drafts(self) -> int:
        return self.counts[0]


def unrolled_loss(
    head: DraftHead, seen: Observed, batch: TokenBatch, *, unroll: int, decay: float
) -> Unrolled:
    """`batch` has at least `unroll + 2` tokens; `decay` weights each draft token relative to the previous."""
    rows = batch.ids.shape[1] - 1 - unroll
    fed = head.fuse([state[:, :rows] for state in seen.captured])
    cache, loss = StepCache(head.shape.sliding_window), torch.zeros((), device=batch.ids.device)
    unbroken = torch.ones_like(batch.mask[:, :rows])
    hits, counts, accepted = [], [], 0
    for j in range(unroll):
        positions = batch.positions[:, :rows] + j
        output, fed = head.step(fed, seen.embeds[:, 1 + j : 1 + j + rows], positions, cache)
        active = batch.mask[:, 2 + j : 2 + j + rows]
        logits, wanted = head.logits(output[active]), seen.logits[:, 1 + j : 1 + j + rows][active].float()
        count = logits.shape[0]
        counts.append(count)
        hit = torch.zeros_like(active)
        if count:
            known = wanted if head.proposes is None else wanted[:, head.proposes]
            loss = loss + decay**j * functional.cross_entropy(logits, known.softmax(-1))
            guess = logits.argmax(-1)
            guess = guess if head.proposes is None else head.proposes[guess]
            hit[active] = guess == wanted.argmax(-1)
        hits.append(int(hit.sum()))
        unbroken = unbroken & hit
        accepted += int(unbroken.sum())
    return Unrolled(loss=loss, hits=tuple(hits), counts=tuple(counts), accepted=accepted)
