"""
The tenants' keys to kept content: files in a directory of their own, apart from the database.

    payload-keys/<tenant>.<ulid>.<purpose>            one key, base64, mode 0600
    payload-keys/<tenant>.<ulid>.<purpose>.retired    one whose destruction has begun

Erasing content means destroying keys, so these files need a backup policy of their own: a restored key makes
erased content readable again in database backups.  A database backup alone does not.

With a master key the files hold the keys encrypted (AES-256-GCM, bound to their names).  Fails
closed: a file that others may read, or that does not decrypt, is refused.  Used by one thread.
"""

import base64
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from appliance.audit.content.sealing import KEY_BYTES, NONCE_BYTES
from appliance.audit.entry import new_entry_id
from appliance.audit.signing_keys import OTHERS, is_open_to_others
from appliance.errors import AuditKeyError
from appliance.infra.files import sync_directory, sync_file, write_private

DIRECTORY_MODE = 0o700
RETIRED = ".retired"
DAY_MS = 86_400_000
_PLAIN, _ENCRYPTED = "plain", "encrypted"
_ULID_RANDOM_BYTES = 10
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_NAME = re.compile(
    rf"(?P<key_id>(?P<tenant>[a-z0-9][a-z0-9._-]*)\.(?P<ulid>[0-7][{_ALPHABET}]{{25}}))"
    r"\.(?P<purpose>wrapping|commitment|file)(?P<retired>\.retired)?"
)


class Purpose(StrEnum):
    WRAPPING = "wrapping"
    COMMITMENT = "commitment"
    """Commits to content that is not kept."""
    FILE = "file"
    """Encrypts one stored file; destroyed with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyName:
    key_id: str
    """`<tenant>.<ulid>`; never reused."""
    tenant: str
    purpose: Purpose
    is_retired: bool = False
    """Whether its destruction has begun: it unwraps data keys and wraps no new ones."""

    @property
    def made_ms(self) -> int:
        """Time of creation, in milliseconds since the epoch."""
        return ulid_ms(self.key_id)

    @property
    def file(self) -> str:
        return f"{self.key_id}.{self.purpose}{RETIRED if self.is_retired else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantKey:
    key_id: str
    key: bytes


class PayloadKeys:
    """The key directory, made if it is missing; AuditKeyError if it cannot be made, or others may read it."""

    def __init__(
        self,
        directory: Path,
        *,
        master_key: bytes | None,
        key_days: float,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._directory, self._master_key, self._key_ms = directory, master_key, key_days * DAY_MS
        self._clock, self._random_bytes = clock, random_bytes
        self._cache: dict[tuple[str, Purpose], TenantKey] = {}
        try:
            directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            if directory.stat().st_mode & OTHERS:
                raise AuditKeyError(f"others may read the payload keys: run `chmod 700 {directory}`")
        except OSError as error:
            raise AuditKeyError(f"cannot use the payload keys in {directory}: {error.strerror}") from error

    def current(self, tenant: str, purpose: Purpose) -> TenantKey:
        """The tenant's key for new content, made if there is none or it is too old; raises AuditKeyError."""
        found = self._cache.get((tenant, purpose))
        # Another gateway may have destroyed it: the keeper checks now, and again after storing.
        if found is None or not self.is_in_use(found.key_id, purpose):
            names = [name for name in self.names(tenant, purpose) if not name.is_retired]
            found = self.read(names[-1]) if names else None
        if found is None or int(self._clock() * 1000) - ulid_ms(found.key_id) >= self._key_ms:
            found = self.make(tenant, purpose)
        self._cache[tenant, purpose] = found
        return found

    def make(self, tenant: str, purpose: Purpose) -> TenantKey:
        """Create a key.  Durable on return; raises AuditKeyError."""
        entry_id = new_entry_id(int(self._clock() * 1000), self._random_bytes(_ULID_RANDOM_BYTES))
        name = KeyName(key_id=f"{tenant}.{entry_id}", tenant=tenant, purpose=purpose)
        key = self._random_bytes(KEY_BYTES)
        path = self._directory / name.file
        try:
            # Atomically: `names` ignores the temporary file that a crash leaves.
            write_private(path, self._encode(key, name))
        except OSError as error:
            raise AuditKeyError(f"cannot write the payload key {path}: {error.strerror}") from error
        # A crash before this line: a key that wrapped nothing.
        return TenantKey(key_id=name.key_id, key=key)

    def is_in_use(self, key_id: str, purpose: Purpose) -> bool:
        return (self._directory / f"{key_id}.{purpose}").exists()

    def names(self, tenant: str | None = None, purpose: Purpose | None = None) -> list[KeyName]:
        """Return every key, optionally of one tenant or purpose, oldest first."""
        try:
            matches = [_NAME.fullmatch(path.name) for path in self._directory.iterdir()]
        except OSError as error:
            raise AuditKeyError(f"cannot list {self._directory}: {error.strerror}") from error
        names = [
            KeyName(
                key_id=match["key_id"],
                tenant=match["tenant"],
                purpose=Purpose(match["purpose"]),
                is_retired=match["retired"] is not None,
            )
            for match in matches
            if match and tenant in {None, match["tenant"]} and purpose in {None, match["purpose"]}
        ]
        return sorted(names, key=lambda name: (name.made_ms, name.file))

    def find(self, key_id: str, purpose: Purpose) -> KeyName | None:
        """Return the key of this id, or None: it was destroyed."""
        return next((name for name in self.names(purpose=purpose) if name.key_id == key_id), None)

    def read(self, name: KeyName) -> TenantKey:
        """Raises AuditKeyError if the key is gone, overwritten, readable by others, or does not decrypt."""
        path = self._directory / name.file
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & OTHERS:
                    raise AuditKeyError(f"others may read the payload key {path}: run `chmod 600 {path}`")
                content = file.read()
        except OSError as error:
            raise AuditKeyError(f"cannot read the payload key {path}: {error.strerror}") from error
        if _is_overwritten(content):
            raise AuditKeyError(f"the payload key {path} was destroyed: its content was erased")
        text = content.decode("ascii", "replace")
        return TenantKey(key_id=name.key_id, key=self._decode(text, name, path))

    def is_overwritten(self, name: KeyName) -> bool:
        """
        Whether this key is destroyed, or a crash interrupted that between overwriting and deleting its file.

        Raises AuditKeyError if it cannot be read.
        """
        path = self._directory / name.file
        try:
            return _is_overwritten(path.read_bytes())
        except FileNotFoundError:
            return True
        except OSError as error:
            raise AuditKeyError(f"cannot read the payload key {path}: {error.strerror}") from error

    def retire(self, name: KeyName) -> KeyName:
        """Begin to destroy a key, if it is there: it wraps nothing new from now on.  Durable on return."""
        if name.is_retired:
            return name
        gone = KeyName(key_id=name.key_id, tenant=name.tenant, purpose=name.purpose, is_retired=True)
        try:
            with suppress(FileNotFoundError):  # another gateway retired it, or destroyed it
                (self._directory / name.file).rename(self._directory / gone.file)
            sync_directory(self._directory)
        except OSError as error:
            raise AuditKeyError(f"cannot retire the payload key {name.file}: {error.strerror}") from error
        self._cache.clear()
        return gone

    def destroy(self, name: KeyName) -> None:
        """
        Overwrite and delete a key.  Durable on return.

        Overwriting is best effort: on flash and on copying file systems old blocks survive until the
        device reuses them.  Encrypt the disk, or use a master key, where that matters.
        """
        path = self._directory / name.file
        try:
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
                sync_file(file)
            # A crash before this line leaves an overwritten file, which wraps nothing and is deleted later.
            path.unlink()
            sync_directory(self._directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise AuditKeyError(f"cannot destroy the payload key {path}: {error.strerror}") from error
        self._cache.clear()

    def _encode(self, key: bytes, name: KeyName) -> str:
        if self._master_key is None:
            return f"{_PLAIN} {base64.b64encode(key).decode()}\n"
        nonce = self._random_bytes(NONCE_BYTES)
        content = nonce + AESGCM(self._master_key).encrypt(nonce, key, _bound(name))
        return f"{_ENCRYPTED} {base64.b64encode(content).decode()}\n"

    def _decode(self, text: str, name: KeyName, path: Path) -> bytes:
        kind, _, encoded = text.strip().partition(" ")
        try:
            content = base64.b64decode(encoded, validate=True)
            if kind == _ENCRYPTED:
                if self._master_key is None:
                    raise AuditKeyError(f"{path} is encrypted: name audit.payload_master_key_file")
                cipher = AESGCM(self._master_key)
                content = cipher.decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], _bound(name))
        except (ValueError, InvalidTag) as error:
            raise AuditKeyError(f"{path} does not decrypt: is this its master key, and its name?") from error
        if kind not in {_PLAIN, _ENCRYPTED} or len(content) != KEY_BYTES:
            raise AuditKeyError(f"{path} holds no payload key: restore it from a backup of the keys")
        return content


def load_master_key(path: Path) -> bytes:
    """Read 32 bytes in base64; raises AuditKeyError if they are missing or others may read them."""
    try:
        with path.open("rb") as file:
            if is_open_to_others(os.fstat(file.fileno())):
                raise AuditKeyError(f"others may read the master key {path}: run `chmod 600 {path}`")
            key = base64.b64decode(file.read().strip(), validate=True)
    except OSError as error:
        raise AuditKeyError(f"cannot read the master key {path}: {error.strerror}") from error
    except ValueError as error:
        raise AuditKeyError(f"{path} must hold {KEY_BYTES} random bytes in base64") from error
    if len(key) != KEY_BYTES:
        raise AuditKeyError(f"{path} must hold {KEY_BYTES} random bytes in base64")
    return key


def ulid_ms(key_id: str) -> int:
    """The time in a ULID, or in that of a key's id, in milliseconds since the epoch."""
    number = 0
    for character in key_id.rpartition(".")[2][:10]:
        number = number << 5 | _ALPHABET.index(character)
    return number


def _is_overwritten(content: bytes) -> bool:
    return content.count(0) == len(content) > 0


def _bound(name: KeyName) -> bytes:
    return f"payload-keys/{name.key_id}.{name.purpose}".encode()
