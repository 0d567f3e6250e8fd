"""
The learning rate both trainings use: linear warm-up, then a cosine down to a tenth.
"""

import math


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rate for the zero-based `step` of `steps`."""
    warm_up = max(1, steps // 25)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
