"""Each target has one active draft; an unreadable file is an error."""

import json
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.registry.active_draft import ActiveDraft, read_active_draft, write_active_draft
from appliance.errors import DraftStorageError
from tests.unit.drafts.registry.site import digest
from tests.unit.drafts.test_training_record import DIGESTS, JSON
from tests.unit.sovereignty.bundle.test_bundle_load import killed_at

TARGET = digest(7)
STANDINGS = st.builds(
    ActiveDraft,
    target=st.just(TARGET),
    draft=DIGESTS,
    previous=st.lists(DIGESTS, max_size=3).map(tuple),
    promotion=st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    candidate=DIGESTS,
)


@pytest.fixture
def file(tmp_path):
    """The active-draft file of the target."""
    return tmp_path / "standing" / f"{7:064x}.json"


@given(STANDINGS)
def test_active_draft_round_trips(tmp_path_factory, standing: ActiveDraft):
    """An absent draft in the list of previous ones keeps its place."""
    directory = tmp_path_factory.mktemp("standing")
    write_active_draft(directory, standing)
    assert read_active_draft(directory, TARGET) == standing


def test_without_a_file_the_settings_draft_is_active(tmp_path):
    assert read_active_draft(tmp_path, TARGET) == ActiveDraft(target=TARGET)
    assert list(tmp_path.iterdir()) == []


@given(JSON)
def test_damaged_file_is_an_error(tmp_path_factory, value):
    """It may name another draft."""
    directory = tmp_path_factory.mktemp("standing")
    write_active_draft(directory, ActiveDraft(target=TARGET, draft=digest(1)))
    (file,) = (directory / "standing").iterdir()
    file.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(DraftStorageError, match="is damaged"):
        read_active_draft(directory, TARGET)


def test_truncated_or_foreign_file_is_detected(tmp_path, file):
    write_active_draft(tmp_path, ActiveDraft(target=TARGET, draft=digest(1), previous=(None, digest(2))))
    content = file.read_bytes()
    for end in range(len(content)):
        file.write_bytes(content[:end])
        with pytest.raises(DraftStorageError):
            read_active_draft(tmp_path, TARGET)
    file.write_bytes(content.replace(b"7", b"8"))
    with pytest.raises(DraftStorageError):
        read_active_draft(tmp_path, TARGET)


@pytest.mark.parametrize("target", ["", "sha256:ab", "../../etc/passwd", digest(1).upper()])
def test_invalid_target_digest_is_refused(tmp_path, target):
    with pytest.raises(DraftStorageError, match="not a digest"):
        read_active_draft(tmp_path, target)
    with pytest.raises(DraftStorageError, match="not a digest"):
        write_active_draft(tmp_path, ActiveDraft(target=target))


def test_kill_at_any_point_leaves_the_old_or_new_active_draft(tmp_path):
    """`kill -9` right before each flush and rename in turn."""
    before = ActiveDraft(target=TARGET, draft=digest(1))
    after = ActiveDraft(target=TARGET, draft=digest(2), previous=(digest(1),))
    seen, point = set(), 0
    while True:
        write_active_draft(tmp_path, before)
        status = killed_at(point, lambda: write_active_draft(tmp_path, after))
        found = read_active_draft(tmp_path, TARGET)
        assert found in (before, after)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        seen.add(found.draft)
        point += 1
    assert found == after
    assert seen == {digest(1), digest(2)}


def test_workers_of_another_account_can_read_it_whatever_the_umask(tmp_path, file):
    before = os.umask(0o077)
    try:
        write_active_draft(tmp_path, ActiveDraft(target=TARGET, draft=digest(1)))
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o644
    assert file.parent.stat().st_mode & 0o777 == 0o755


def test_failed_write_leaves_the_previous_active_draft(tmp_path, monkeypatch):
    before = ActiveDraft(target=TARGET, draft=digest(1))
    write_active_draft(tmp_path, before)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DraftStorageError, match="the disk is full") as caught:
            write_active_draft(tmp_path, ActiveDraft(target=TARGET))
    assert "\n" not in str(caught.value)
    assert read_active_draft(tmp_path, TARGET) == before
