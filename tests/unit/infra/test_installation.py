"""What a first start creates; a second one changes nothing."""

import errno
import os
import stat
from pathlib import Path

import pytest

from appliance.errors import ConfigurationError
from appliance.infra.data_directory import Installation, load_control_token, locate, prepare
from appliance.infra.settings import AuditSettings, DataSettings, Settings


def located(directory: Path) -> Installation:
    """The paths when only the directory is set."""
    return locate(Settings(data=DataSettings(directory=directory)))


def start(installation: Installation) -> None:
    """Prepare with a fake signing key."""
    prepare(installation, create_signing_key=lambda path: path.write_text("key made just now"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """An installation that does not exist yet."""
    return located(tmp_path / "var" / "data")


def test_first_start_creates_the_files_it_needs(installation: Installation):
    """Directory, signing key, control token and a place for logs."""
    start(installation)
    assert installation.directory.is_dir()
    assert installation.logs.is_dir()
    assert installation.signing_key.read_text() == "key made just now"
    assert len(bytes.fromhex(load_control_token(installation))) == 32


def test_a_second_start_changes_nothing(installation: Installation):
    start(installation)
    before = contents(installation.directory)
    start(installation)
    assert contents(installation.directory) == before


def test_every_installation_has_keys_of_its_own(tmp_path: Path):
    """There is no default token."""
    for name in ("a", "b"):
        start(located(tmp_path / name))
    tokens = {load_control_token(located(tmp_path / name)) for name in ("a", "b")}
    assert len(tokens) == 2


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_secrets(installation: Installation, umask: int):
    """0700 for directories, 0600 for files, with any umask."""
    before = os.umask(umask)
    try:
        start(installation)
    finally:
        os.umask(before)
    assert (mode(installation.directory), mode(installation.logs)) == (0o700, 0o700)
    assert mode(installation.control_token) == 0o600


def test_nothing_is_left_behind_by_the_check_for_writing(installation: Installation):
    """No probe and no temporary file."""
    start(installation)
    names = {path.name for path in installation.directory.iterdir()}
    assert names == {"audit.key", "control.token", "logs", "worker"}


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path):
    """One line that names the directory and the option."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="--data") as caught:
        start(located(tmp_path / "file" / "data"))
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_the_directory_is_a_configuration_error(tmp_path: Path):
    """The file is not changed."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError):
        start(located(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_directory_that_cannot_be_written_is_a_configuration_error():
    """Read-only directories are noticed before anything is started."""
    # Not even root can create a file there.
    with pytest.raises(ConfigurationError, match="cannot be written to"):
        start(located(Path("/proc/self")))


def test_the_message_says_who_owns_the_directory_and_how_to_give_it_to_this_user(tmp_path: Path, monkeypatch):
    """A hostPath volume that the kubelet made belongs to root, whatever fsGroup says."""

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    monkeypatch.setattr(os, "getegid", lambda: 10001)
    owner = tmp_path.stat().st_uid
    with pytest.raises(ConfigurationError) as caught:
        start(located(tmp_path))
    for part in (f"belongs to user {owner}", f"chown 10001:10001 {tmp_path}", "fsGroup", "hostPath"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_older_data_directory_gets_a_control_token(installation: Installation):
    """Only the token is created; later starts keep it."""
    start(installation)
    installation.control_token.unlink()
    before = contents(installation.directory)
    start(installation)
    token = load_control_token(installation)
    start(installation)
    assert load_control_token(installation) == token
    assert set(contents(installation.directory)) - set(before) == {str(installation.control_token)}


def test_a_token_of_the_operators_is_used_as_it_is(tmp_path: Path):
    """Machines that share workers share the file; the appliance never writes it, and uses the first line."""
    elsewhere = tmp_path / "secrets" / "token"
    elsewhere.parent.mkdir()
    elsewhere.write_text("  a random word\n the one before\n")
    data = DataSettings(directory=tmp_path / "data", control_token_file=elsewhere)
    installation = locate(Settings(data=data))
    start(installation)
    assert load_control_token(installation) == "a random word"
    assert elsewhere.read_text() == "  a random word\n the one before\n"
    assert not (tmp_path / "data" / "control.token").exists()


def test_a_token_that_should_be_elsewhere_is_not_made_up(tmp_path: Path):
    """A new one would not fit the workers of other machines; the error says where to copy it from."""
    data = DataSettings(directory=tmp_path / "data", control_token_file=tmp_path / "token")
    with pytest.raises(ConfigurationError, match=r"token does not exist: copy it from") as caught:
        start(locate(Settings(data=data)))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "token").exists()


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_an_empty_token_stops_the_start(installation: Installation, content: bytes):
    """It would admit every caller."""
    start(installation)
    installation.control_token.write_bytes(content)
    with pytest.raises(
        ConfigurationError, match=r"control.token is empty: put a random word in it"
    ) as caught:
        load_control_token(installation)
    assert "\n" not in str(caught.value)


def test_a_token_that_cannot_be_read_stops_the_start(installation: Installation):
    """One line that names the file, whether it is missing or no text."""
    with pytest.raises(ConfigurationError, match=r"cannot read the control token .*control.token"):
        load_control_token(installation)
    start(installation)
    installation.control_token.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"cannot read the control token") as caught:
        load_control_token(installation)
    assert "\n" not in str(caught.value)


def test_locating_touches_nothing(tmp_path: Path):
    """`locate` only computes."""
    located(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_paths_follow_the_settings(tmp_path: Path):
    """Database and signing key can live elsewhere."""
    audit = AuditSettings(database_url="postgresql://db/audit", signing_key_file=tmp_path / "k.pem")
    installation = locate(Settings(data=DataSettings(directory=tmp_path), audit=audit))
    assert (installation.database_url, installation.signing_key) == (
        "postgresql://db/audit",
        tmp_path / "k.pem",
    )


def test_a_relative_directory_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A process that changes its working directory later still finds its files."""
    monkeypatch.chdir(tmp_path)
    installation = located(Path("data"))
    assert installation.directory == tmp_path / "data"
    assert installation.database_url == f"sqlite:///{tmp_path / 'data' / 'audit.db'}"
