"""
The learning rate over a training: linear warm-up, then a cosine down to a tenth.
"""

import math

FINE = 100_000
"""Parts that a training of so many minutes is divided into."""


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rate for the zero-based `step` of `steps`."""
    warm_up = max(1, steps // 25)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def timed_rate(elapsed: float, total: float, peak: float) -> float:
    """Rate after `elapsed` of `total` seconds."""
    return learning_rate(min(FINE - 1, int(elapsed / total * FINE)), FINE, peak)
