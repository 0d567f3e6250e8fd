"""
Results as a file with a line for each, so that a run resumes where it was interrupted; and as tables.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.speculation.load import BenchmarkError

Row = TypeVar("Row")


@dataclass(slots=True)
class Records(Generic[Row]):
    path: Path
    head: Mapping[str, Any]
    """What all rows of a file agree in: plan, pair, machine."""
    parse: Callable[[Mapping[str, Any]], Row]
    rows: list[Row] = field(default_factory=list)

    def load(self) -> None:
        """
        Read what earlier sittings measured; a line that a crash cut off is dropped.

        Raises:
            BenchmarkError: they measured something else.
        """
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.head) + "\n", encoding="utf-8")
            return
        head, *lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if json.loads(head) != json.loads(json.dumps(self.head)):
            message = f"{self.path} was measured with other options: {head.strip()}"
            raise BenchmarkError(message)
        whole = [line for line in lines if line.endswith("\n")]
        self.path.write_text(head + "".join(whole), encoding="utf-8")
        self.rows = [self.parse(json.loads(line)) for line in whole]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")  # type: ignore[call-overload]


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [" | ".join(heading), " | ".join("---" for _name in heading), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]
