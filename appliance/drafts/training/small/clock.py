"""
How long a training has gone on, whatever happened in between.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Clock:
    """Time spent training, over all processes that worked at it."""

    now: Callable[[], float]
    before: float = 0.0
    began: float = field(default=0.0)

    def start(self, before: float) -> None:
        """Go on counting from what earlier processes spent."""
        self.before, self.began = before, self.now()

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return self.before + self.now() - self.began
