"""
The draft-token table inside vLLM's scheduler, in the shapes of several versions.

`v1/core/sched/scheduler.py`, `dynamic_sd_lookup`: from 0.26 to 0.32 one number of draft tokens for each batch
size.  An axis by context length has been proposed for later ones (vLLM pull request 48944): there each batch
size gets one number for all contexts, because costs are measured by batch size.  An unknown shape is refused.
A known shape with another meaning is found at the next step, which must use a number of the table.
"""

from typing import Any

Row = int | list[int]


def find_table_problem(lookup: Any) -> str | None:  # noqa: ANN401 - of vLLM's scheduler
    if not isinstance(lookup, list) or len(lookup) < 2:  # noqa: PLR2004 - index 0 is no batch size
        return "the scheduler has no draft-token table to change"
    if all(isinstance(row, int) for row in lookup):
        return None
    rows = [row for row in lookup if isinstance(row, list) and row and all(isinstance(k, int) for k in row)]
    if len(rows) == len(lookup) and len({len(row) for row in rows}) == 1:
        return None
    return "the draft-token table is neither by batch size nor by batch size and context length"


class DraftTokenLookup:
    """Writes into the lists that the scheduler reads: it may hold the rows as well."""

    def __init__(self, lookup: list[Row]) -> None:
        self._lookup = lookup
        self._initial = [row if isinstance(row, int) else list(row) for row in lookup]

    @property
    def largest_batch(self) -> int:
        return len(self._lookup) - 1

    @property
    def choices(self) -> list[int]:
        """Numbers of draft tokens that the engine was started with, and 0."""
        return sorted({0, *(k for row in self._initial[1:] for k in _numbers(row))})

    def initial(self) -> list[int]:
        """By batch size; the largest number of any context."""
        return [max(_numbers(row)) for row in self._initial]

    def allows(self, batch: int, draft_tokens: int) -> bool:
        return draft_tokens in _numbers(self._lookup[batch])

    def write(self, table: list[int]) -> None:
        """`table` is by batch size, from 0 to the largest."""
        for batch, draft_tokens in enumerate(table):
            row = self._lookup[batch]
            if isinstance(row, int):
                self._lookup[batch] = draft_tokens
            else:
                row[:] = [draft_tokens] * len(row)

    def restore(self) -> None:
        for batch, row in enumerate(self._initial):
            written = self._lookup[batch]
            if isinstance(written, int) or isinstance(row, int):
                self._lookup[batch] = row
            else:
                written[:] = row


def _numbers(row: Row) -> list[int]:
    return [row] if isinstance(row, int) else row
