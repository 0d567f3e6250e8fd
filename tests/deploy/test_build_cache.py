"""The cache of builds, and leftovers of a killed run."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deploy.build_cache import KEPT_SECONDS, VARIABLE, BuildCache, digest
from tests.deploy.container_engine import ROOT

START = """
import sys
from tests.deploy.build_cache import BuildCache
from tests.deploy.container_engine import container_engine
with BuildCache().scratch() as place, container_engine(place / "data") as engine:
    print(engine.directory, flush=True)
    sys.stdin.read()
"""
STOP_SECONDS = 60


@pytest.fixture
def cache(tmp_path) -> BuildCache:
    return BuildCache(tmp_path / "cache")


class Builder:
    """Builds entries of one file, and counts them."""

    def __init__(self, cache: BuildCache) -> None:
        self.cache = cache
        self.made = 0

    def entry(self, *inputs: str | Path) -> Path:
        return self.cache.entry("kind", inputs, self._make)

    def _make(self, place: Path) -> None:
        self.made += 1
        (place / "file").write_text("content", encoding="utf-8")


def test_an_entry_is_made_once(cache):
    """Other inputs make another."""
    builder = Builder(cache)
    assert builder.entry("x") == builder.entry("x") != builder.entry("y")
    assert builder.made == 2


def test_each_change_of_an_input_is_seen(tmp_path):
    """A text, and of a directory the name and content of each file."""
    file = tmp_path / "a"
    seen = [digest(["x", "y"]), digest(["xy"])]
    file.touch()
    seen.append(digest(["x", tmp_path]))
    file.write_text("content", encoding="utf-8")
    seen.append(digest(["x", tmp_path]))
    file.rename(tmp_path / "b")
    seen.append(digest(["x", tmp_path]))
    (tmp_path / "c").touch()
    seen.append(digest(["x", tmp_path]))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("harm", ["cut", "remove", "add", "remove the record"])
def test_a_damaged_entry_is_made_again(cache, harm):
    """By the number and size of its files."""
    builder = Builder(cache)
    path = builder.entry("x")
    match harm:
        case "cut":
            (path / "file").write_bytes(b"")
        case "remove":
            (path / "file").unlink()
        case "add":
            (path / "other").touch()
        case "remove the record":
            (path / "size.json").unlink()
    assert (builder.entry("x") / "file").read_text(encoding="utf-8") == "content"
    assert builder.made == 2


def test_a_build_that_fails_leaves_no_entry(cache):
    """Neither a part of it."""

    def fail(place: Path) -> None:
        (place / "file").touch()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        cache.entry("kind", ("x",), fail)
    assert [path.name for path in cache.directory.iterdir()] == ["lock"]


def test_an_entry_that_no_run_uses_is_removed(cache):
    """By the time of its last use."""
    builder = Builder(cache)
    first, second = builder.entry("first"), builder.entry("second")
    for path in (first, second):
        seconds = path.stat().st_mtime - KEPT_SECONDS - 1
        os.utime(path, (seconds, seconds))
    builder.entry("first")
    assert first.exists()
    assert not second.exists()


def test_another_run_keeps_its_directory(cache):
    """And loses it when it ends."""
    with cache.scratch() as mine, BuildCache(cache.directory).scratch() as other:
        assert mine != other
        assert mine.exists()
    assert not mine.exists()
    assert not other.exists()


def run_of_an_engine(cache: BuildCache) -> tuple[subprocess.Popen[str], Path]:
    """A process that has an engine until its input ends, and the directory of the engine."""
    environment = {**os.environ, VARIABLE: str(cache.directory)}
    words = [sys.executable, "-c", START]
    process = subprocess.Popen(
        words, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def left_of(process: subprocess.Popen[str], directory: Path) -> list[str]:
    """Processes, networks, mounts and directories."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(path.read_text(encoding="utf-8").replace("\0", " "))
    mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    networks = [path for path in Path("/run/netns").iterdir() if path.name.endswith(f"-{process.pid}")]
    left = [line for line in (*commands, *mounts) if str(directory) in line]
    return [*left, *map(str, networks), *([str(directory)] if directory.exists() else [])]


@pytest.mark.slow
def test_a_killed_run_leaves_no_engine_and_the_next_run_removes_the_rest(engine, cache):
    """Processes end at once; networks, mounts and directories are gone when the next run has an engine."""
    killed, directory = run_of_an_engine(cache)
    killed.kill()
    killed.communicate()
    until = time.monotonic() + STOP_SECONDS
    while any("dockerd" in line for line in left_of(killed, directory)):
        assert time.monotonic() < until
        time.sleep(0.1)
    following, other = run_of_an_engine(cache)
    assert left_of(killed, directory) == []
    assert left_of(following, other)
    following.communicate(timeout=STOP_SECONDS)
    assert following.returncode == 0
    assert left_of(following, other) == []
    assert [path.name for path in cache.directory.iterdir()] == ["lock"]
