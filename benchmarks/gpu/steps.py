"""
Which step comes next, and what earlier calls have left in the state directory.

A step that is done has a file with its result; a step without one begins again.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.infra.files import write_atomically

Found = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One call of a step."""

    state: Path
    """Directory that every step may leave files in."""
    is_over: Callable[[], bool]
    """Whether a step that can resume has to end now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    name: str
    run: Callable[[Slice], Found | None]
    """Returns what it found; None if it needs a further call."""
    needs: tuple[str, ...] = ()
    """Steps that have to be done before."""


def next_step(steps: Sequence[Step], done: Collection[str], failed: Collection[str]) -> Step | None:
    """The first step that is not done, has not failed in this call, and waits for no other."""
    for step in steps:
        if step.name not in done and step.name not in failed and all(need in done for need in step.needs):
            return step
    return None


class State:
    """Results of steps, and the reasons of those that failed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def results(self, steps: Sequence[Step]) -> dict[str, dict[str, Any]]:
        """By name of the step, in the order of the steps."""
        files = {step.name: self._result(step.name) for step in steps}
        return {name: json.loads(file.read_bytes()) for name, file in files.items() if file.exists()}

    def failures(self, steps: Sequence[Step]) -> dict[str, str]:
        files = {step.name: self._failure(step.name) for step in steps}
        return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}

    def finish(self, step: str, result: Mapping[str, Any]) -> None:
        write_atomically(self._result(step), json.dumps(result, indent=1).encode())
        self._failure(step).unlink(missing_ok=True)

    def fail(self, step: str, reason: str) -> None:
        self._failure(step).write_text(reason, encoding="utf-8")

    def log(self, step: str) -> Path:
        return self.directory / f"{step}.log"

    def _result(self, step: str) -> Path:
        return self.directory / f"{step}.json"

    def _failure(self, step: str) -> Path:
        return self.directory / f"{step}.failed"
