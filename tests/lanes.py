"""Run tests in lanes, side by side: python -m tests.lanes NAME=MARKS ... [--with ARGUMENTS] --paths PATH ...

Each lane is one pytest over the tests its marks select; every line it prints begins with the lane's name.
What failed is said last, where it is found: the name of each test and the first lines of why.

Tests share the cores of a small machine, so one that waits for something with a time limit can fail because
of what ran beside it.  A few tests (`SECOND_LOOK_AT`) that failed are therefore run once more with nothing
beside them.  One that fails again fails the run.  One that passes does not, but is named last as a failure
that was seen: its cause wants to be found.

A lane by itself had nothing beside it: what fails there fails the run at once.

Tests marked `chance` look for what goes wrong once in many tries, so passing the next time says nothing: they
are not looked at again, and their failure fails the run.
"""

import argparse
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree import ElementTree as ET

CACHE = Path(".pytest_cache")
SECOND_LOOK_AT = 10
CHANCE = "chance"
TESTS_FAILED, NO_TESTS = 1, 5
SHOWN_LINES, SHOWN_WIDTH = 6, 200


@dataclass(frozen=True)
class Failure:
    """One test that failed, and the first lines of what it said."""

    test: str
    why: tuple[str, ...]


class Lane:
    """One pytest, with a cache and a report of its own."""

    def __init__(self, name: str, marks: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._cache = CACHE / f"lane-{name}"
        shutil.rmtree(self._cache, ignore_errors=True)
        self._cache.mkdir(parents=True)
        self._marks = marks
        self._arguments = [*arguments, "-o", f"cache_dir={self._cache}"]

    def run(self) -> tuple[int, list[Failure]]:
        """Run it: pytest's exit code, and what failed."""
        report = self._cache / "report.xml"
        return self._pytest(self._marks, report, []), failures_in(report)

    def look_again(self, seen: Sequence[Failure]) -> list[Failure]:
        """Run once more what failed of it: what is left of `seen`, and what failed again."""
        report = self._cache / "again.xml"
        marks = f"({self._marks}) and not {CHANCE}" if self._marks else f"not {CHANCE}"
        only = ["--last-failed", "--last-failed-no-failures=none", "--numprocesses=0"]
        code = self._pytest(marks, report, only)
        tried = tests_in(report) if code in {0, TESTS_FAILED} else set()
        return [failure for failure in seen if failure.test not in tried] + failures_in(report)

    def _pytest(self, marks: str, report: Path, also: Sequence[str]) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *self._arguments, "-m", marks, *also, f"--junitxml={report}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        _pass_on(process.stdout, self.name)
        return process.wait()


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _pass_on(lines: IO[str], name: str) -> None:
    for line in lines:
        _print(f"{name}: {line.rstrip()}")


def failures_in(report: Path) -> list[Failure]:
    """What a JUnit report says failed; nothing where there is no report: pytest's exit code then says why."""
    if not report.exists():
        return []
    found = []
    for case in ET.parse(report).getroot().iter("testcase"):
        for said in (*case.findall("failure"), *case.findall("error")):
            lines = [line for line in (said.text or said.get("message") or "").splitlines() if line.strip()]
            why = [line for line in lines if line.startswith("E ")] + lines[-1:]
            found.append(Failure(_name(case), tuple(line[:SHOWN_WIDTH] for line in why[:SHOWN_LINES])))
    return found


def tests_in(report: Path) -> set[str]:
    """Every test that a JUnit report says was run, not skipped."""
    cases = ET.parse(report).getroot().iter("testcase") if report.exists() else ()
    return {_name(case) for case in cases if case.find("skipped") is None}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def say(failures: Sequence[Failure], what: str) -> None:
    """Print each of `failures`, under `what` became of it."""
    for failure in failures:
        _print(f"{what}: {failure.test}")
        for line in failure.why:
            _print(f"    {line}")


def run(lanes: Sequence[Lane]) -> int:
    """Run the lanes side by side, then once more what failed: the exit code."""
    results: dict[str, tuple[int, list[Failure]]] = {}

    def ride(lane: Lane) -> None:
        results[lane.name] = lane.run()

    threads = [threading.Thread(target=ride, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    failed = [lane for lane in lanes if results[lane.name][0] not in (0, NO_TESTS)]
    seen = [failure for lane in failed for failure in results[lane.name][1]]
    if not failed:
        return 0
    # A lane that failed and names no test failed otherwise.
    are_named = all(results[lane.name][0] == TESTS_FAILED and results[lane.name][1] for lane in failed)
    if len(lanes) == 1 or len(seen) > SECOND_LOOK_AT or not are_named:
        say(seen, "FAILED")
        for lane in failed:
            _print(f"lane {lane.name} ended with pytest's exit code {results[lane.name][0]}")
        return 1
    left = [failure for lane in failed for failure in lane.look_again(results[lane.name][1])]
    say(seen, "FAILED BESIDE OTHER TESTS (find out why)")
    say(left, "FAILED FOR GOOD")
    return int(bool(left))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lanes", description="Run tests in lanes, side by side."
    )
    parser.add_argument("lanes", nargs="+", metavar="NAME=MARKS", help="a lane and which tests are its own")
    parser.add_argument("--paths", nargs="+", required=True, help="where the tests are")
    parser.add_argument("--with", dest="also", default="", help="what else pytest is told")
    given = parser.parse_args(arguments)
    named = [lane.partition("=") for lane in given.lanes]
    return run([Lane(name, marks, [*given.paths, *given.also.split()]) for name, _, marks in named])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
