"""
A draft is registered whole or not at all, however an import ends.
"""

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.drafts.registry.revision import Revision
from appliance.errors import DraftStorageError
from appliance.sovereignty.bundle.placing import room
from tests.unit.drafts.lint.builder import eagle31
from tests.unit.drafts.registry.site import Site, snapshot
from tests.unit.sovereignty.bundle.test_bundle_load import EFFECTS, in_a_child, killed_at

MADE = ("mkdir", "fsync", "replace", "rename", "chmod")
"""Calls that fail when a disk does."""


def is_whole(site: Site, revision: Revision) -> bool:
    """Whether a draft is registered, and then with all that belongs to it."""
    found = site.registry.survey()
    assert found[1] == (), "half a draft is called one"
    if revision.digest not in {each.digest for each in found[0]}:
        return False
    site.registry.weights(site.registry.find(revision.digest))
    return True


def leftovers(site: Site) -> list[Path]:
    return list(site.directory.rglob("*.partial*"))


@pytest.fixture
def settled(site: Site) -> Site:
    """A site with a draft, and the sources of two more."""
    site.add(site.draft("first"))
    for name in ("second", "third"):
        site.draft(name)
    return site


def source_of(site: Site, name: str) -> Path:
    return site.place / "made" / name / "draft"


def test_kill_at_any_point_leaves_the_registry_intact_and_resumable(settled: Site):
    """`kill -9` before every flush, rename and change of mode in turn."""
    site = settled
    (first,) = site.registry.revisions()
    saved = site.place / "saved"
    shutil.copytree(site.directory, saved)
    expected = site.add(source_of(site, "second"))
    point, came_through = 0, []
    while True:
        shutil.rmtree(site.directory)
        shutil.copytree(saved, site.directory)
        status = killed_at(point, lambda: site.add(source_of(site, "second")))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        came_through.append(is_whole(site, expected))
        assert is_whole(site, first)
        # Another draft that comes first removes the leftovers; the same one continues with them.
        if point % 2:
            third = site.add(source_of(site, "third"))
            assert is_whole(site, third)
            assert leftovers(site) == []
        assert site.add(source_of(site, "second")).digest == expected.digest
        assert is_whole(site, expected)
        assert leftovers(site) == []
        point += 1
    assert is_whole(site, expected)
    assert came_through.count(False) > 10
    # What comes after the rename is only its flush.
    assert came_through == sorted(came_through)


def test_killed_at_any_point_a_first_draft_can_be_added_again(site: Site):
    """Even if the registry's directory does not exist yet."""
    source = site.draft()
    expected = site.add(source)
    point = 0
    while True:
        shutil.rmtree(site.directory)
        if killed_at(point, lambda: site.add(source)) == 0:
            break
        is_whole(site, expected)
        site.add(source)
        assert is_whole(site, expected)
        assert leftovers(site) == []
        point += 1
    assert point > 10


def test_what_was_copied_before_a_kill_is_not_copied_again(site: Site):
    """Weights may be gigabytes: complete files are kept."""
    source = site.draft()
    expected = site.add(source)
    shutil.rmtree(site.directory)
    point = 0
    while killed_at(point, lambda: site.add(source)) != 0:
        staged = site.directory / "revisions" / f".{expected.hex}.partial" / "weights" / "model.safetensors"
        if staged.exists():
            break
        shutil.rmtree(site.directory, ignore_errors=True)
        point += 1
    inode = staged.stat().st_ino
    revision = site.add(source)
    assert (site.registry.weights(revision) / "model.safetensors").stat().st_ino == inode


def test_killed_repair_can_be_repeated(site: Site):
    """The draft stays unusable until it is repaired."""
    source = site.draft()
    revision = site.add(source)
    weights = site.registry.weights(revision)
    saved, point = site.place / "saved", 0
    for path in weights.iterdir():
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1])
    shutil.copytree(site.directory, saved)
    while True:
        shutil.rmtree(site.directory)
        shutil.copytree(saved, site.directory)
        if killed_at(point, lambda: site.add(source)) == 0:
            break
        assert site.registry.find(revision.hex) == revision
        assert site.add(source) == revision
        assert site.registry.weights(revision) == weights
        assert leftovers(site) == []
        point += 1
    assert point > 3


def failing(monkeypatch: pytest.MonkeyPatch, point: int) -> list[str]:
    """Have the n-th call that changes the disk fail; the calls made so far."""
    made: list[str] = []

    def broken(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            made.append(name)
            if len(made) - 1 == point:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
            return call(*arguments, **options)

        return called

    for name in MADE:
        monkeypatch.setattr(os, name, broken(name, getattr(os, name)))
    return made


def what_is_said(act: Callable[[], object]) -> str | None:
    """The one line with which something was not done; None where it was."""
    try:
        act()
    except DraftStorageError as error:
        (line,) = str(error).splitlines()
        return line
    return None


def test_disk_failure_at_any_point_leaves_the_registry_intact(settled: Site, monkeypatch):
    """With a one-line error; it works once there is space."""
    site = settled
    (first,) = site.registry.revisions()
    before = snapshot(site.directory)
    saved = site.place / "saved"
    shutil.copytree(site.directory, saved)
    point, refused = 0, 0
    while True:
        with monkeypatch.context() as patch:
            made = failing(patch, point)
            said = what_is_said(lambda: site.add(source_of(site, "second")))
        if point >= len(made):
            break
        assert said is None or said.count("the disk is full") == 1, said
        refused += said is not None
        assert is_whole(site, first)
        visible = {name: found for name, found in snapshot(site.directory).items() if ".partial" not in name}
        if len(site.registry.revisions()) == 1:
            assert {name: found[1:] for name, found in visible.items()} == {
                name: found[1:] for name, found in before.items()
            }
        added = site.add(source_of(site, "second"))
        assert is_whole(site, added)
        assert leftovers(site) == []
        shutil.rmtree(site.directory)
        shutil.copytree(saved, site.directory)
        point += 1
    assert said is None
    assert refused > 10


def test_full_disk_is_reported_as_full(site: Site):
    """With a real kernel limit on file size, in its own process."""
    large = eagle31()
    large.files["vocab.json"] = {"padding": "x" * 200_000}
    source = site.draft(draft=large)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(DraftStorageError, match=r"the disk is full .*nothing was registered"):
            site.add(source)

    assert in_a_child(limited) == 0
    assert site.registry.revisions() == ()
    revision = site.add(source)
    assert is_whole(site, revision)


def test_disk_space_is_checked_before_writing(site: Site, monkeypatch):
    """Weights larger than the disk leave nothing behind."""
    source = site.draft()
    with monkeypatch.context() as patch:
        patch.setattr(
            "appliance.sovereignty.bundle.placing.room",
            lambda placements: [(place, needed, needed - 1) for place, needed, _free in room(placements)],
        )
        with pytest.raises(DraftStorageError, match=r"free 1 more"):
            site.add(source)
    assert site.registry.revisions() == ()


def wait_for(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def start(act: Callable[[], object]) -> int:
    """Run a function in a process of its own; its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return child


def test_two_processes_that_add_the_same_draft_register_it_once(site: Site):
    source = site.draft()
    for _ in range(10):
        shutil.rmtree(site.directory, ignore_errors=True)
        children = [start(lambda: site.add(source)) for _ in range(2)]
        assert wait_for(children) == [0, 0]
        (revision,) = site.registry.revisions()
        assert is_whole(site, revision)
        assert leftovers(site) == []


def test_processes_that_add_different_drafts_wait_for_each_other(site: Site):
    sources = [site.draft(f"draft-{number}") for number in range(4)]
    children = [start(lambda source=source: site.add(source)) for source in sources]
    assert wait_for(children) == [0, 0, 0, 0]
    revisions = site.registry.revisions()
    assert len(revisions) == 4
    assert all(is_whole(site, revision) for revision in revisions)
    assert leftovers(site) == []


def test_readers_see_a_whole_draft_or_none(site: Site):
    source = site.draft()
    expected = site.add(source)
    for _ in range(5):
        shutil.rmtree(site.directory)
        child = start(lambda: site.add(source))
        ended = 0
        while not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
            is_whole(site, expected)
        assert os.waitstatus_to_exitcode(status) == 0
        assert is_whole(site, expected)


def test_harness_kills_before_durable_steps():
    assert {"fsync", "rename", "replace"} <= set(EFFECTS)
