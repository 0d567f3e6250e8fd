"""
The data directory: what a first start creates in it, and what later starts find there.

Keys are written before anything uses them.  A crash between two of the files leaves a directory that the next
start completes: every step creates only what is missing.
"""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigurationError
from appliance.infra.files import write_private
from appliance.infra.key_location import KeyLocation, secret_files
from appliance.infra.settings import Settings

TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    directory: Path
    database_url: str
    signing_key: KeyLocation
    spool: Path
    """Directory of audit entries that wait for the database."""
    payload_keys: Path
    """Directory of the keys to stored content."""
    control_token: Path
    """Secret that gateways present to workers, mode 0600."""
    tenants_mac_key: Path
    """Key of the MAC over tenants and keys, mode 0600."""
    drafts: Path
    drafts_key: KeyLocation

    @property
    def sealed_head(self) -> Path:
        """The newest signed head, kept apart from the database so that its rollback shows."""
        return self.directory / "audit.head"

    @property
    def public_key(self) -> Path:
        """The public half of the log's key, if that is in a token: only a process that signs opens it."""
        return self.directory / "audit.vkey"

    @property
    def drafts_public_key(self) -> Path:
        """The same of the drafts' key."""
        return self.directory / "drafts.vkey"

    @property
    def retired_keys(self) -> Path:
        """Verifier keys that a rotation to another place has ended; they must not sign again."""
        return self.directory / "audit.retired"

    @property
    def tenants_newest(self) -> Path:
        """The newest tenants and keys accepted here, so that a replay of older ones shows."""
        return self.directory / "tenants.newest"

    @property
    def files(self) -> Path:
        return self.directory / "files"

    @property
    def tenants(self) -> Path:
        """Default tenants file; the operator writes it."""
        return self.directory / "tenants.yaml"

    @property
    def admin_key(self) -> Path:
        """The admin key in clear, mode 0600, for commands on this machine."""
        return self.directory / "admin.key"

    @property
    def demo_key(self) -> Path:
        """The key of the tenant `demo` in clear, mode 0600; only `appliance up` makes it."""
        return self.directory / "demo.key"

    @property
    def restart_request(self) -> Path:
        """In a directory of its own, the only one here that a worker can write to."""
        return self.directory / "worker" / "worker-1.restart"

    @property
    def logs(self) -> Path:
        """Standard output of the workers."""
        return self.directory / "logs"


def locate(settings: Settings) -> Installation:
    directory = settings.data.directory.absolute()
    return Installation(
        directory=directory,
        database_url=settings.audit.database_url or f"sqlite:///{directory / 'audit.db'}",
        signing_key=settings.audit.signing_key_file or directory / "audit.key",
        spool=settings.audit.spool_directory or directory / "spool",
        payload_keys=(settings.audit.payload_keys_directory or directory / "payload-keys").absolute(),
        control_token=settings.data.control_token_file or directory / "control.token",
        tenants_mac_key=settings.tenants.mac_key_file or directory / "tenants-mac.key",
        drafts=(settings.drafts.directory or directory / "drafts").absolute(),
        drafts_key=settings.drafts.signing_key_file or directory / "drafts.key",
    )


def private_paths(settings: Settings, installation: Installation) -> frozenset[Path]:
    """What a worker must not open: the data of a gateway, and its secrets wherever they are."""
    audit, tls = settings.audit, settings.tls
    elsewhere = (
        *(installation.payload_keys, audit.payload_master_key_file, settings.batch.directory),
        audit.timestamp_client_key_file,
        *(tls.key_file, tls.key_password_file, tls.command_key_file, settings.pool.key_file),
        *(settings.tenants.file, settings.tenants.mac_key_file),
        audit.forward.key_file if audit.forward else None,
    )
    own = (installation.directory, installation.spool)
    keys = (*secret_files(installation.signing_key), *secret_files(installation.drafts_key))
    return frozenset({*own, *keys, *(path.absolute() for path in elsewhere if path is not None)})


def keys_travel_with_data(settings: Settings) -> bool:
    """Whether a copy of the data directory has unencrypted keys: it opens content that is erased later."""
    installation = locate(settings)
    keys = installation.payload_keys
    if settings.audit.payload_master_key_file or not keys.is_relative_to(installation.directory):
        return False
    return keys.is_dir() and any(keys.iterdir())


def prepare(
    installation: Installation,
    *,
    create_signing_key: Callable[[Path], None],
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> None:
    """Make the directory usable, creating what a first start needs except API keys (`register.enrolment`)."""
    directory = installation.directory
    if any(sign in str(directory) for sign in "?#%"):
        raise ConfigurationError(
            f"the data directory {directory} may not have ?, # or % in its name: choose another with --data"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        installation.logs.mkdir(mode=0o700, exist_ok=True)
        installation.restart_request.parent.mkdir(mode=0o700, exist_ok=True)
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = f"the data directory {directory} cannot be written to ({error.strerror})"
        raise ConfigurationError(f"{reason}: {_remedy(directory, error)}") from error
    if isinstance(installation.signing_key, Path) and not installation.signing_key.exists():
        create_signing_key(installation.signing_key)
    _prepare_control_token(installation, random_bytes)


def _remedy(directory: Path, error: OSError) -> str:
    if not isinstance(error, PermissionError) or not directory.exists():
        return "choose another with --data"
    owner, user, group = directory.stat(), os.geteuid(), os.getegid()
    return (
        f"it belongs to user {owner.st_uid} and group {owner.st_gid}, and this process is {user} and {group};"
        f" run `chown {user}:{group} {directory}` as root, or choose another with --data (Kubernetes does not"
        " apply fsGroup to a hostPath volume: change its owner on the node, or use a local volume)"
    )


def load_control_token(installation: Installation) -> str:
    """Read the secret that gateways present to workers: the first line, while it is being rotated."""
    path = installation.control_token
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the control token {path}: {error}") from error
    if not token:
        raise ConfigurationError(f"the control token {path} is empty: put a random word in it")
    return token.splitlines()[0].strip()


def _prepare_control_token(installation: Installation, random_bytes: Callable[[int], bytes]) -> None:
    """Create the token in the data directory; one that the settings place elsewhere is the operator's."""
    path = installation.control_token
    if path.exists():
        return
    if path.parent != installation.directory:
        message = f"the control token {path} does not exist: copy it from the machine control runs on"
        raise ConfigurationError(message)
    write_private(path, random_bytes(TOKEN_BYTES).hex() + "\n")
