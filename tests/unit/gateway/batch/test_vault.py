"""The bytes of files: complete, private, encrypted if required, and absent once removed."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.errors import ConfigurationError, StorageUnavailableError
from appliance.gateway.batch.batch import FilePurpose as Use
from appliance.gateway.batch.batch import StoredFile, clean_filename
from appliance.gateway.batch.pieces import PIECE_BYTES
from appliance.gateway.batch.vault import FileVault
from tests.clock import Clock

SECRET = b"an unmistakable secret\n"


@pytest.fixture
def clock():
    return Clock(1_800_000_000.0)


@pytest.fixture
def keys(tmp_path, clock):
    return PayloadKeys(tmp_path / "keys", master_key=None, key_days=7, clock=clock, random_bytes=os.urandom)


@pytest.fixture
def vault(tmp_path, clock, keys):
    return open_vault(tmp_path, clock, keys)


def open_vault(tmp_path, clock, keys, gateway="one", keep_free=0, former=None):
    return FileVault(
        tmp_path / "files",
        gateway,
        keys,
        former=former,
        keep_free_bytes=keep_free,
        clock=clock,
        random_bytes=os.urandom,
    )


def store(vault, content, *, sealed=False, step=10_000, publish=True):
    place = vault.new_place("acme", sealed=sealed)
    writer = vault.write(place)
    for start in range(0, len(content), step):
        writer.write(content[start : start + step])
    writer.finish()
    if publish:
        vault.publish(f"file-{place.ulid}")
    return StoredFile(
        file_id=f"file-{place.ulid}",
        tenant="acme",
        gateway=vault.gateway,
        filename="x.jsonl",
        purpose=Use.BATCH,
        size=writer.size,
        sealed=sealed,
        created_at=1,
        expires_at=2,
    )


def path_of(tmp_path, stored) -> Path:
    return tmp_path / "files" / stored.gateway / stored.file_id


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5])
def test_file_is_read_back_as_written(vault, sealed, size):
    content = os.urandom(size)
    assert b"".join(vault.read(store(vault, content, sealed=sealed))) == content


def test_sealed_file_is_encrypted_with_mode_0600(tmp_path, vault):
    stored = store(vault, SECRET, sealed=True)
    path = path_of(tmp_path, stored)
    assert SECRET[:10] not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert store(vault, SECRET, sealed=True).ulid != stored.ulid


def test_pieces_can_be_neither_swapped_nor_cut_off_nor_moved_to_another_file(tmp_path, vault):
    """Each is bound to its place, and the total size is known."""
    stored, other = (store(vault, os.urandom(2 * PIECE_BYTES), sealed=True) for _ in range(2))
    path = path_of(tmp_path, stored)
    written = path.read_bytes()
    half = len(written) // 2
    for altered in (
        written[half:] + written[:half],
        written[:half],
        path_of(tmp_path, other).read_bytes()[:half] + written[half:],
        written[:-1] + bytes([written[-1] ^ 1]),
    ):
        path.write_bytes(altered)
        with pytest.raises(StorageUnavailableError, match="damaged"):
            list(vault.read(stored))


def test_a_removed_file_is_gone_with_its_key(tmp_path, vault, keys):
    """A copy of the bytes cannot be decrypted; a second removal is no error."""
    stored = store(vault, SECRET, sealed=True)
    path = path_of(tmp_path, stored)
    copy = path.read_bytes()
    assert [name.purpose for name in keys.names("acme")] == [Purpose.FILE]
    vault.remove("acme", stored.file_id)
    vault.remove("acme", stored.file_id)
    assert keys.names() == []
    path.write_bytes(copy)
    with pytest.raises(StorageUnavailableError, match="erased"):
        list(vault.read(stored))


def test_aborted_upload_leaves_no_files(tmp_path, vault, keys):
    """Discarded, or partly written at a crash: the next start removes it with its key."""
    writer = vault.write(vault.new_place("acme", sealed=False))
    writer.write(SECRET)
    writer.discard()
    assert list((tmp_path / "files" / "one").iterdir()) == []
    left = vault.write(vault.new_place("acme", sealed=True))
    left.write(SECRET * PIECE_BYTES)
    kept = store(vault, SECRET)
    vault.sweep(frozenset({kept.file_id}), frozenset())
    assert [path.name for path in (tmp_path / "files" / "one").iterdir()] == [kept.file_id]
    assert keys.names() == []
    left.discard()


def test_draft_with_a_row_is_published_after_a_crash(tmp_path, vault):
    stored = store(vault, SECRET, publish=False)
    assert not path_of(tmp_path, stored).exists()
    assert vault.has_bytes(stored)
    assert b"".join(vault.read(stored)) == SECRET
    vault.sweep(frozenset({stored.file_id}), frozenset())
    assert path_of(tmp_path, stored).exists()
    assert b"".join(vault.read(stored)) == SECRET


def test_wrong_database_removes_no_published_file(tmp_path, clock, keys, vault):
    """The database may be the wrong one or an old backup: only drafts are removed."""
    other = open_vault(tmp_path, clock, keys, "two")
    theirs, mine = store(other, SECRET), store(vault, SECRET, sealed=True)
    draft = store(other, SECRET, publish=False)
    (tmp_path / "files" / "one" / "batch_open").write_text("results")
    (tmp_path / "files" / "one" / "batch_ended").write_text("results")
    vault.sweep(frozenset(), frozenset({"batch_ended"}))
    left = {path.name for path in (tmp_path / "files").rglob("*") if path.is_file()}
    assert left == {theirs.file_id, mine.file_id, f".{draft.file_id}", "batch_open"}
    assert b"".join(vault.read(mine)) == SECRET


def test_gateways_that_share_the_directory_read_each_others_files(tmp_path, clock, keys, vault):
    """One without the directory says that another gateway has them."""
    stored = store(vault, SECRET)
    assert b"".join(open_vault(tmp_path, clock, keys, "two").read(stored)) == SECRET
    apart = open_vault(tmp_path / "elsewhere", clock, keys, "two")
    assert not apart.has_bytes(stored)
    with pytest.raises(StorageUnavailableError, match="ask the gateway"):
        list(apart.read(stored))


def test_file_stops_growing_where_the_disk_keeps_its_reserve(tmp_path, clock, keys, monkeypatch):
    """The disk is filled by others while the file is written."""
    free = [10 * PIECE_BYTES]
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=free[0]))
    vault = open_vault(tmp_path, clock, keys, keep_free=2 * PIECE_BYTES)
    vault.check_room(8 * PIECE_BYTES)
    with pytest.raises(StorageUnavailableError, match="nearly full"):
        vault.check_room(8 * PIECE_BYTES + 1)
    writer = vault.write(vault.new_place("acme", sealed=False))
    writer.write(bytes(PIECE_BYTES))
    free[0] = 3 * PIECE_BYTES - 1
    with pytest.raises(StorageUnavailableError, match="nearly full"):
        writer.write(bytes(PIECE_BYTES))
    writer.discard()
    assert list((tmp_path / "files" / "one").iterdir()) == []


def test_files_of_a_former_directory_are_found_and_removed_where_they_are(tmp_path, clock, keys):
    """An installation gets a directory of files of its own: files, drafts and results of before stay."""
    older = open_vault(tmp_path / "data", clock, keys)
    kept, removed = store(older, SECRET), store(older, SECRET, sealed=True)
    drafted, lost = store(older, SECRET, publish=False), store(older, SECRET, publish=False)
    former = tmp_path / "data" / "files"
    (former / "one" / "batch_open").write_bytes(b"")
    vault = open_vault(tmp_path, clock, keys, former=former)
    vault.sweep(frozenset({kept.file_id, removed.file_id, drafted.file_id}), frozenset())
    for stored in (kept, removed, drafted):
        assert vault.has_bytes(stored)
        assert b"".join(vault.read(stored)) == SECRET
    assert not vault.has_bytes(lost)
    vault.remove("acme", removed.file_id)
    assert keys.names() == []
    added = store(vault, SECRET)
    assert {path.name for path in (tmp_path / "files" / "one").iterdir()} == {added.file_id}
    assert {path.name for path in (former / "one").iterdir()} == {
        kept.file_id,
        drafted.file_id,
        "batch_open",
    }
    vault.remove("acme", "batch_open")
    assert not (former / "one" / "batch_open").exists()


def test_unusable_directory_refuses_the_start(tmp_path, clock, keys):
    (tmp_path / "files").write_text("a file")
    with pytest.raises(ConfigurationError, match=r"batch\.directory"):
        open_vault(tmp_path, clock, keys)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a.jsonl", "a.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\y.txt", "y.txt"),
        ("", "file"),
        ("\x00\n", "file"),
    ],
)
def test_client_file_name_is_never_a_path(given, kept):
    assert clean_filename(given) == kept
    assert len(clean_filename("x" * 1000)) == 255
