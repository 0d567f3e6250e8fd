"""The check of the settings file and secret files."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.cli.preflight.check import CheckResult, Inquiry
from appliance.cli.preflight.secret_files import SeenFile, check_files, judge_secrets, judge_settings_file
from appliance.infra.settings import load_settings


def inquiry_in(directory: Path, **sections) -> Inquiry:
    sections = {"data": {"directory": str(directory)}, **sections}
    return Inquiry(
        settings=load_settings(environment={}, overrides=sections), settings_file=None, clock=lambda: 0.0
    )


def secrets(inquiry: Inquiry):
    return tuple(check_files(inquiry))[1]


def test_before_the_first_start_there_are_no_secrets(tmp_path):
    """The first start creates them; the check creates nothing."""
    assert secrets(inquiry_in(tmp_path / "data")).result is CheckResult.SKIPPED
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "mode", "result"),
    [
        ("audit.key", 0o600, CheckResult.OK),
        ("audit.key", 0o640, CheckResult.FAIL),
        ("control.token", 0o600, CheckResult.OK),
        ("control.token", 0o640, CheckResult.WARN),
        ("control.token", 0o604, CheckResult.FAIL),
        ("admin.key", 0o644, CheckResult.FAIL),
    ],
)
def test_a_secret_is_for_its_owner(tmp_path, name, mode, result):
    """Open to its group is a warning, or a failure for signing keys; open to others is a failure."""
    (tmp_path / name).write_text("secret")
    (tmp_path / name).chmod(mode)
    check = secrets(inquiry_in(tmp_path))
    assert check.result is result
    assert result is CheckResult.OK or str(tmp_path / name) in check.seen


def test_secret_readable_through_the_group_passes(tmp_path):
    """As container engines mount them: the owner is another account, and this process is in the group."""
    given = SeenFile(path=tmp_path, mode=0o640, is_open=False, by_group=True)
    assert judge_secrets((given,)).result is CheckResult.OK
    assert judge_secrets((replace(given, by_group=False),)).result is CheckResult.WARN
    assert judge_secrets((replace(given, is_open=True),)).result is CheckResult.FAIL


def test_keys_to_stored_content_that_a_backup_of_the_data_would_take_are_reported(tmp_path):
    """Only if there are any, and not if they are elsewhere or encrypted."""
    data, apart = tmp_path / "data", tmp_path / "keys"

    def result(**audit):
        return tuple(check_files(inquiry_in(data, audit=audit)))[2].result

    assert result() is CheckResult.OK
    for keys in (data / "payload-keys", apart):
        keys.mkdir(parents=True)
        assert result(payload_keys_directory=str(keys)) is CheckResult.OK
        (keys / "acme.1.wrapping").write_text("plain key")
    assert result() is CheckResult.WARN
    assert result(payload_keys_directory=str(apart)) is CheckResult.OK
    assert result(payload_master_key_file=str(tmp_path / "master.key")) is CheckResult.OK


@pytest.mark.parametrize("setting", ["pool.key_file", "worker.scrape_token_file", "worker.tls_key_file"])
def test_secrets_between_gateway_and_workers_are_checked(tmp_path, setting):
    section, _, name = setting.partition(".")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o644)
    given = inquiry_in(tmp_path)
    chosen = getattr(given.settings, section).model_copy(update={name: tmp_path / "secret"})
    check = secrets(replace(given, settings=given.settings.model_copy(update={section: chosen})))
    assert check.result is CheckResult.FAIL
    assert str(tmp_path / "secret") in check.seen


def test_secrets_in_the_settings_are_checked(tmp_path):
    """Also the password file in the database's URL."""
    (tmp_path / "password").write_text("secret")
    (tmp_path / "password").chmod(0o644)
    url = f"postgresql://gateway@db/audit?password_file={tmp_path / 'password'}"
    check = secrets(inquiry_in(tmp_path / "data", audit={"database_url": url}))
    assert check.result is CheckResult.FAIL
    assert check.todo == f"run `chmod 600 {tmp_path / 'password'}`"


def test_world_writable_settings_are_a_failure():
    """Accounts that can write the settings file control where prompts are sent."""
    assert judge_settings_file(Path("a.yaml"), 0o666).result is CheckResult.FAIL
    assert judge_settings_file(Path("a.yaml"), 0o644).result is CheckResult.OK
    assert judge_settings_file(None, None).result is CheckResult.OK
