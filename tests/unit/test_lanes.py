"""Promises of `tests.lanes`: what failed is said last, with why; only what passes alone is excused."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert 1 == 2\n"
FAILS_ONCE = """
from pathlib import Path
def test_fails_once():
    seen = Path("seen")
    again = seen.exists()
    seen.touch()
    assert again
"""
BY_CHANCE = "import pytest\npytestmark = pytest.mark.chance\n" + FAILS_ONCE
SKIPPED_THEN = FAILS_ONCE.replace("    assert again", "    import pytest; again and pytest.skip(); assert 0")
MANY = "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_fails(n): assert n < 0\n"
BESIDE = "beside=nothing"
"""A lane whose marks select no test."""
BROKEN = "import nothing_of_that_name\n"


def lanes(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = chance: of it\n")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.lanes",
            *(name if "=" in name else f"{name}=" for name in names),
            "--paths",
            str(folder),
        ],
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("tests", "code", "last"),
    [
        pytest.param(PASSES, 0, "one: ", id="all passed"),
        pytest.param(FAILS, 1, "FAILED FOR GOOD: ", id="fails again"),
        pytest.param(FAILS_ONCE, 0, "FAILED BESIDE OTHER TESTS (find out why): ", id="fails once"),
        pytest.param(BY_CHANCE, 1, "FAILED FOR GOOD: ", id="failing once is a finding"),
        pytest.param(SKIPPED_THEN, 1, "FAILED FOR GOOD: ", id="skipped when looked at again"),
        pytest.param(MANY, 1, "lane one ended with pytest's exit code 1", id="too many for a second look"),
        pytest.param(BROKEN, 1, "lane beside ended with pytest's exit code 2", id="cannot be collected"),
        pytest.param("", 0, "one: ", id="has no tests"),
    ],
)
def test_what_fails_again_ends_the_run(tmp_path: Path, tests: str, code: int, last: str) -> None:
    (tmp_path / "test_it.py").write_text(tests)
    ended = lanes(tmp_path, "one", BESIDE)
    assert ended.returncode == code, ended.stdout + ended.stderr
    said = [line for line in ended.stdout.splitlines() if not line.startswith((" ", "beside: "))]
    assert said[-1].startswith(last), ended.stdout


def test_what_failed_with_nothing_beside_it_is_not_looked_at_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS_ONCE)
    ended = lanes(tmp_path, "one")
    assert ended.returncode == 1
    assert "FAILED: test_it.py::test_fails_once" in ended.stdout


def test_what_failed_is_said_last_with_why(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PASSES + FAILS)
    ended = lanes(tmp_path, "one", BESIDE)
    assert "FAILED FOR GOOD: test_it.py::test_fails" in ended.stdout
    assert "    E   assert 1 == 2" in ended.stdout.splitlines()[-3:]


def test_lanes_run_side_by_side(tmp_path: Path) -> None:
    meeting = """
import time
from pathlib import Path
def test_meets():
    mine = Path(__import__("uuid").uuid4().hex + ".here")
    mine.touch()
    ends = time.monotonic() + 60
    while len(list(Path().glob("*.here"))) < 2:
        assert time.monotonic() < ends
        time.sleep(0.05)
"""
    (tmp_path / "test_it.py").write_text(meeting)
    ended = lanes(tmp_path, "one", "other")
    assert ended.returncode == 0, ended.stdout
    assert "one: " in ended.stdout
    assert "other: " in ended.stdout
