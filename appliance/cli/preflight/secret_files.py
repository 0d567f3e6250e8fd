"""Permissions of the settings file and of secret files; where the keys to stored content are."""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from appliance.audit.signing_keys import is_open_to_others
from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family
from appliance.infra.data_directory import keys_travel_with_data
from appliance.infra.key_location import secret_files

FILE = Subject("settings.file", "Settings file")
SECRETS = Subject("settings.secrets", "Secret files")
PAYLOAD_KEYS = Subject("settings.payload_keys", "Keys to stored content")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFile:
    path: Path
    mode: int
    """Permission bits."""
    is_open: bool
    """Whether others may use it; for a key, by the rule of a start."""
    by_group: bool
    """Whether this process is not the owner, so that it has access through the group."""


@family(FILE, SECRETS, PAYLOAD_KEYS)
def check_files(inquiry: Inquiry) -> Iterable[Check]:
    """Check the permissions of the settings file and every secret; their content is not judged."""
    yield judge_settings_file(inquiry.settings_file, _mode(inquiry.settings_file))
    yield judge_secrets(inspect_secrets(inquiry))
    inquiry.require_gateway()
    with suppress(PermissionError):
        yield judge_payload_keys(
            inquiry.installation.payload_keys, travel=keys_travel_with_data(inquiry.settings)
        )
        return
    raise SkippedError("this account may not list them")


def judge_settings_file(path: Path | None, mode: int | None) -> Check:
    if path is None:
        return FILE.ok("none; defaults and environment variables are valid")
    if mode is not None and mode & stat.S_IWOTH:
        return FILE.fail(f"{path} is valid, and world-writable", f"run `chmod o-w {path}`")
    return FILE.ok(f"{path} is valid")


def inspect_secrets(inquiry: Inquiry) -> tuple[SeenFile, ...]:
    settings, installation = inquiry.settings, inquiry.installation
    signing, master = secret_files(installation.signing_key), settings.audit.payload_master_key_file
    strict = [*signing, master, installation.tenants_mac_key]
    other = [
        installation.control_token,
        installation.admin_key,
        settings.tls.key_file,
        settings.tls.key_password_file,
        settings.tls.command_key_file,
        settings.pool.key_file,
        settings.audit.timestamp_client_key_file,
        settings.worker.scrape_token_file,
        settings.worker.tls_key_file,
        settings.audit.forward.key_file if settings.audit.forward else None,
        _password_file(installation.database_url),
    ]
    found = [_look(path, is_key=path in strict) for path in (*strict, *other) if path is not None]
    return tuple(file for file in found if file is not None)


def judge_secrets(files: tuple[SeenFile, ...]) -> Check:
    for file in files:
        if file.is_open:
            seen = f"{file.path} has mode {file.mode:04o}: accounts other than its owner may use it"
            return SECRETS.fail(seen, f"run `chmod 600 {file.path}`")
    shared = [str(file.path) for file in files if file.mode & 0o070 and not file.by_group]
    if shared:
        todo = "give it mode 0600, unless the group is private to its owner"
        return SECRETS.warn(f"its group may use {', '.join(shared)}", todo)
    if not files:
        return SECRETS.skipped("there are none yet; the first start creates them with mode 0600")
    return SECRETS.ok(f"{len(files)} found, none open to others")


def judge_payload_keys(keys: Path, *, travel: bool) -> Check:
    if not travel:
        return PAYLOAD_KEYS.ok(f"{keys}: none, encrypted, or apart from the data directory")
    return PAYLOAD_KEYS.warn(
        f"{keys} is in the data directory and not encrypted: a backup of all of it opens erased content",
        "exclude it from backups and set audit.payload_master_key_file, or move it and set "
        "audit.payload_keys_directory",
    )


def _look(path: Path, *, is_key: bool) -> SeenFile | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    mode, by_group = stat.S_IMODE(seen.st_mode), seen.st_uid != os.geteuid()
    is_open = is_open_to_others(seen) if is_key else bool(mode & 0o007)
    return SeenFile(path=path, mode=mode, is_open=is_open, by_group=by_group)


def _mode(path: Path | None) -> int | None:
    try:
        return None if path is None else stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def _password_file(url: str) -> Path | None:
    try:
        named = make_url(url).query.get("password_file")
    except ArgumentError:
        return None
    return Path(named) if isinstance(named, str) else None
