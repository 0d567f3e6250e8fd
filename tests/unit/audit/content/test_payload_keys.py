"""Made once, read by their owner, gone when destroyed."""

import base64
import random
from pathlib import Path

import pytest

from appliance.audit.content.payload_keys import (
    DAY_MS,
    PayloadKeys,
    Purpose,
    load_master_key,
)
from appliance.errors import AuditKeyError
from tests.fake_engine import FakeClock

RANDOM = random.Random(11)
MASTER = RANDOM.randbytes(32)


@pytest.fixture
def clock() -> FakeClock:
    clock = FakeClock()
    clock.now = 1_800_000_000.0
    return clock


@pytest.fixture
def open_keys(tmp_path: Path, clock: FakeClock):
    def open_keys(master_key: bytes | None = None) -> PayloadKeys:
        return PayloadKeys(
            tmp_path / "keys", master_key=master_key, key_days=7, clock=clock, random_bytes=RANDOM.randbytes
        )

    return open_keys


@pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])
def test_a_key_is_made_once_and_read_back_by_the_next_process(open_keys, master_key):
    """The same key for the same tenant and purpose; another for any other."""
    keys = open_keys(master_key)
    made = keys.current("acme", Purpose.WRAPPING)
    assert keys.current("acme", Purpose.WRAPPING) == made
    assert open_keys(master_key).current("acme", Purpose.WRAPPING) == made
    others = [keys.current("acme", Purpose.COMMITMENT), keys.current("b.c-d_1", Purpose.WRAPPING)]
    assert len({made.key, *(other.key for other in others)}) == 3
    assert [name.tenant for name in keys.names(purpose=Purpose.WRAPPING)] == ["acme", "b.c-d_1"]


def test_tenants_with_a_common_prefix_are_distinguished(open_keys):
    """`a` is not `a.b`."""
    keys = open_keys()
    keys.current("a.b", Purpose.WRAPPING)
    assert keys.names("a") == []
    assert len(keys.names("a.b")) == 1


def test_a_key_that_has_served_its_time_is_followed_by_another(open_keys, clock):
    """The old one still opens what it wrapped."""
    keys = open_keys()
    first = keys.current("acme", Purpose.WRAPPING)
    clock.advance(7 * DAY_MS / 1000 - 1)
    assert keys.current("acme", Purpose.WRAPPING) == first
    clock.advance(2)
    second = keys.current("acme", Purpose.WRAPPING)
    assert second.key_id != first.key_id
    assert keys.read(keys.find(first.key_id, Purpose.WRAPPING)) == first
    assert open_keys().current("acme", Purpose.WRAPPING) == second


def test_a_retired_key_opens_and_wraps_nothing_new(open_keys):
    """Between the first step of its destruction and the last."""
    keys = open_keys()
    first = keys.current("acme", Purpose.WRAPPING)
    retired = keys.retire(keys.find(first.key_id, Purpose.WRAPPING))
    assert keys.retire(retired) == retired
    assert keys.current("acme", Purpose.WRAPPING).key_id != first.key_id
    assert keys.read(keys.find(first.key_id, Purpose.WRAPPING)) == first


def test_a_destroyed_key_is_gone_for_every_process(open_keys, tmp_path):
    """A user of the key detects it and creates another; destroying it again does no harm."""
    keys, other = open_keys(), open_keys()
    first = keys.current("acme", Purpose.WRAPPING)
    assert other.current("acme", Purpose.WRAPPING) == first
    name = keys.find(first.key_id, Purpose.WRAPPING)
    keys.destroy(name)
    keys.destroy(name)
    assert keys.find(first.key_id, Purpose.WRAPPING) is None
    assert other.current("acme", Purpose.WRAPPING).key_id != first.key_id
    content = base64.b64encode(first.key)
    assert all(content not in path.read_bytes() for path in (tmp_path / "keys").iterdir())


def test_a_key_whose_destruction_was_cut_short_opens_nothing_and_is_destroyed_later(
    open_keys, tmp_path, monkeypatch
):
    """Between overwriting and deleting: the error does not advise a restore."""
    keys = open_keys()
    keys.current("acme", Purpose.WRAPPING)
    (name,) = keys.names()

    def die(*_arguments: object) -> None:
        raise KeyboardInterrupt

    assert not keys.is_overwritten(name)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            keys.destroy(name)
    again = open_keys()
    assert again.is_overwritten(name)
    with pytest.raises(AuditKeyError, match="was destroyed"):
        again.read(name)
    again.destroy(name)
    assert not list((tmp_path / "keys").iterdir())


def test_a_key_file_holds_no_key_in_clear_under_a_master_key(open_keys, tmp_path):
    """And opens with that master key only, under its own name only."""
    keys = open_keys(MASTER)
    made = keys.current("acme", Purpose.WRAPPING)
    (path,) = (tmp_path / "keys").iterdir()
    assert base64.b64encode(made.key) not in path.read_bytes()
    (name,) = keys.names()
    with pytest.raises(AuditKeyError, match="payload_master_key_file"):
        open_keys().read(name)
    with pytest.raises(AuditKeyError, match="does not decrypt"):
        open_keys(RANDOM.randbytes(32)).read(name)
    path.rename(path.with_name(path.name.replace("wrapping", "commitment")))
    (moved,) = keys.names()
    with pytest.raises(AuditKeyError, match="does not decrypt"):
        keys.read(moved)


@pytest.mark.parametrize(
    "content", ["", "plain", "plain !!", "plain AAAA", "other " + "A" * 44, "encrypted AAAA"]
)
def test_a_damaged_key_file_is_refused(open_keys, tmp_path, content):
    """With one line that names the file."""
    keys = open_keys(MASTER)
    keys.current("acme", Purpose.WRAPPING)
    (path,) = (tmp_path / "keys").iterdir()
    path.write_text(content)
    with pytest.raises(AuditKeyError, match=path.name):
        keys.read(keys.names()[0])


def test_a_key_that_others_may_read_is_refused(open_keys, tmp_path):
    """The file as well as the directory."""
    keys = open_keys()
    keys.current("acme", Purpose.WRAPPING)
    (path,) = (tmp_path / "keys").iterdir()
    path.chmod(0o640)
    with pytest.raises(AuditKeyError, match="chmod 600"):
        keys.read(keys.names()[0])
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(AuditKeyError, match="chmod 700"):
        open_keys()


def test_other_files_in_the_key_directory_are_ignored(open_keys, tmp_path):
    """Partial files of a crash, and files of other programs."""
    keys = open_keys()
    for name in (".acme.0123.wrapping", "README", "acme.wrapping", "acme.01J.wrapping"):
        (tmp_path / "keys" / name).write_text("x")
    assert keys.names() == []


def test_the_master_key_is_32_bytes_that_only_the_owner_reads(tmp_path):
    """Anything else is refused with what to do."""
    path = tmp_path / "master"
    with pytest.raises(AuditKeyError, match="No such file"):
        load_master_key(path)
    path.write_text(base64.b64encode(MASTER).decode() + "\n")
    path.chmod(0o644)
    with pytest.raises(AuditKeyError, match="chmod 600"):
        load_master_key(path)
    path.chmod(0o600)
    assert load_master_key(path) == MASTER
    for wrong in ("", "x y", base64.b64encode(MASTER[:16]).decode()):
        path.write_text(wrong)
        with pytest.raises(AuditKeyError, match="32 random bytes"):
            load_master_key(path)
