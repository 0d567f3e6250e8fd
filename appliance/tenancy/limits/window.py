"""
The last minute, in slots of a second.

What was used at a moment is counted in that second's slot, and the slot until all of it is a minute
past.  So whatever minute one looks at, what was used in it was counted all through its end: no two
neighbouring minutes can be drawn so that more fits into one than the limit allows.
"""

from collections.abc import Mapping

SECONDS = 60
"""Length of the window."""


def slot_at(now: float) -> int:
    """The slot that `now` falls into."""
    return int(now // 1)


def is_past(slot: int, now: float) -> bool:
    """Whether nothing of a slot counts any more."""
    return slot + 1 + SECONDS <= now


def seconds_until_free(slots: Mapping[int, int], units: int, now: float) -> float:
    """Time until so many units have left the window; until all have, where there are fewer."""
    seconds = 0.0
    for slot in sorted(slots):
        if units <= 0:
            break
        units -= slots[slot]
        seconds = slot + 1 + SECONDS - now
    return max(0.0, seconds)
