"""Training progress: `progress.jsonl` for programs, one line for people."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TextIO

CLEAR_LINE = "\r\x1b[K"
PLAIN_PARTS = 20
"""Maximum lines if the output is not a terminal."""
SECONDS_PER_MINUTE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    step: int
    elapsed: float
    """Seconds of training so far."""
    done: float
    """Share of the training, 0 to 1."""
    loss: float
    agreement: tuple[float, ...]
    """Smoothed share, per draft token, of agreement with the target's first choice on training samples."""
    rate: float
    held_out: tuple[float, ...] | None = None
    """Agreement on held-out samples, if measured at this step."""
    acceptance_length: float | None = None
    """Mean tokens per draft on held-out samples with greedy verification."""

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        held_out = content.get("held_out")
        fields = {
            "agreement": tuple(content["agreement"]),
            "held_out": None if held_out is None else tuple(held_out),
        }
        return cls(**{**content, **fields})

    @property
    def left(self) -> float | None:
        """Estimated seconds left; None before the first step."""
        return self.elapsed / self.done * (1 - self.done) if self.done > 0 else None


def append_point(path: Path, point: Point) -> None:
    """Append a line; raises OSError.  A crash may lose or tear it; `read_points` skips torn lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(point.to_json(), separators=(",", ":")) + "\n")


def read_points(path: Path) -> list[Point]:
    """Every whole line, in order; a later line replaces one of the same step."""
    points: dict[int, Point] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            point = Point.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue
        points[point.step] = point
    return list(points.values())


def drop_after(path: Path, step: int) -> None:
    """Drop the lines after a step: training resumes from there and writes them again."""
    kept = [point for point in read_points(path) if point.step <= step]
    text = "".join(json.dumps(point.to_json(), separators=(",", ":")) + "\n" for point in kept)
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


class ProgressLine:
    """One line, rewritten on a terminal and printed at intervals elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._shown = -1
        self._open = False

    def show(self, point: Point, *, steps: int | None) -> None:
        part = int(point.done * PLAIN_PARTS)
        line = describe(point, steps=steps)
        if self._terminal:
            self._stream.write(f"{CLEAR_LINE}{line}")
            self._open = True
        elif part != self._shown:
            self._shown = part
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
        self._open = False


def describe(point: Point, *, steps: int | None) -> str:
    where = f"step {point.step}" if steps is None else f"step {point.step}/{steps}"
    agreement = " ".join(f"{share:.2f}" for share in point.agreement)
    left = "" if point.left is None else f", {_span(point.left)} left"
    return f"{where}, loss {point.loss:.3f}, agreement {agreement}{left}"


def _span(seconds: float) -> str:
    if seconds < SECONDS_PER_MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / SECONDS_PER_MINUTE:.1f} min"
