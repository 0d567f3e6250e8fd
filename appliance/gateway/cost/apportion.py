"""
Divide whole units so that nothing is lost and nothing is made.
"""

import math
from collections.abc import Sequence


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """
    Divide `total` in proportion to the weights; the parts add up to it exactly.

    Each part is less than one unit from its exact share, whoever weighs nothing gets nothing.

    Args:
        total: units, 0 or more.
        weights: finite, 0 or more, at least one of them more.
    """
    whole = math.fsum(weights)
    last = max(place for place, weight in enumerate(weights) if weight > 0)
    parts, given, weight_so_far = [], 0, 0.0
    for place, weight in enumerate(weights):
        weight_so_far += weight
        if weight > 0:
            edge = total if place == last else max(given, min(total, int(total * (weight_so_far / whole))))
        else:
            edge = given
        parts.append(edge - given)
        given = edge
    return parts
