"""
The MAC of all tenants and keys, under a key that is not in their database.

One MAC covers every row and the generation, so a row that was added, changed, removed, swapped or replayed by
anything without the key is refused.  A replay of a complete older state is refused by the newest state that
this machine has accepted, in a file next to the sealed head.
"""

import hashlib
import hmac
import os
import secrets
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import TenantsAlteredError, TenantsUnavailableError, TenantsUnsealedError
from appliance.infra.data_directory import Installation
from appliance.infra.files import create_private, write_private

KEY_BYTES = 32
SHORTEST_KEY = 32
"""Minimum characters of the key's text."""
PURPOSE = b"appliance tenants and keys v1\n"
SEAL = "run `appliance tenant seal`, which compares them with the audit log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterState:
    """The one row that every change moves."""

    generation: int = 0
    mac: str | None = None
    """Hex; None before the first change, and in databases of versions without MACs."""


def digest_of(content: bytes) -> str:
    """Of the canonical content, without the key: anyone who has the rows can compute it."""
    return hashlib.sha256(PURPOSE + content).hexdigest()


class RosterMac:
    """Computes and checks MACs; the key is read at each use, so a new one needs no restart."""

    def __init__(self, *, key: Path, newest: Path, makes_key: bool) -> None:
        self.key, self._makes_key = key, makes_key
        self._newest_file = newest
        self._newest = RosterState()
        self._turn = threading.Lock()

    @classmethod
    def of(cls, installation: Installation) -> "RosterMac":
        key = installation.tenants_mac_key
        # A key that the settings place elsewhere is the operator's, as the control token is.
        return cls(
            key=key,
            newest=installation.tenants_newest,
            makes_key=key.parent == installation.directory,
        )

    @property
    def newest(self) -> RosterState:
        """The newest state that a process here has accepted; raises TenantsAlteredError if unreadable."""
        stored = self._read_newest()
        with self._turn:
            if stored.generation > self._newest.generation:
                self._newest = stored
            return self._newest

    def create_key(self) -> None:
        """Create the key if it is missing and belongs into the data directory; durable on return."""
        if not self._makes_key or self.key.exists():
            return
        try:
            with suppress(FileExistsError):
                create_private(self.key, secrets.token_hex(KEY_BYTES).encode() + b"\n")
        except OSError as error:
            raise TenantsUnavailableError(f"cannot write the MAC key {self.key}: {error.strerror}") from error

    def compute(self, content: bytes) -> str:
        """Hex; raises TenantsUnavailableError if the key cannot be used."""
        return hmac.new(self._load_key(), PURPOSE + content, hashlib.sha256).hexdigest()

    def check(self, state: RosterState, content: bytes, *, known: RosterState) -> None:
        """
        Accept a state as the newest; raises TenantsAlteredError, or as `compute`.

        `known` is `newest` from before the state was read: what came meanwhile does not make it old.
        """
        self.check_age(state, known=known)
        if state.mac is None:
            raise TenantsUnsealedError(f"tenants and keys in the database have no MAC: {SEAL}")
        # Encoded: what is in the database can be any text.
        if not hmac.compare_digest(self.compute(content).encode(), str(state.mac).encode()):
            raise TenantsAlteredError(
                "tenants and keys in the database were not written with the MAC key "
                f"{self.key}: restore that key, or {SEAL}"
            )
        self.accept(state)

    def check_age(self, state: RosterState, *, known: RosterState) -> None:
        """Raises TenantsAlteredError if a newer state, or another of the same generation, was accepted."""
        if state.generation < known.generation or (
            state.generation == known.generation and state.mac != known.mac
        ):
            raise TenantsAlteredError(
                f"tenants and keys in the database (generation {state.generation}) are older than, or differ "
                f"from, those that this machine has read (generation {known.generation}): {SEAL}"
            )

    def accept(self, state: RosterState) -> None:
        newest = self.newest
        with self._turn:
            if state.generation <= max(newest.generation, self._newest.generation):
                return
            self._newest = state
            # Without it, a change must still apply: a full disk may not keep a revoked key working.
            with suppress(OSError):
                write_private(self._newest_file, f"{state.generation} {state.mac}\n")

    def _read_newest(self) -> RosterState:
        try:
            generation, mac = self._newest_file.read_text(encoding="utf-8").split()
            return RosterState(generation=int(generation), mac=mac)
        except FileNotFoundError:
            return RosterState()
        except (OSError, ValueError) as error:
            raise TenantsAlteredError(
                f"{self._newest_file}, which says what tenants and keys this machine has read last, is "
                f"unreadable: remove it, then {SEAL}"
            ) from error

    def _load_key(self) -> bytes:
        try:
            with self.key.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read().strip()
        except FileNotFoundError as error:
            raise TenantsUnavailableError(
                f"the MAC key of tenants and keys, {self.key}, does not exist: copy it from another gateway "
                "or a backup, or use the admin API; if it is lost, `appliance tenant seal` makes another"
            ) from error
        except OSError as error:
            raise TenantsUnavailableError(f"cannot read the MAC key {self.key}: {error.strerror}") from error
        if mode & stat.S_IRWXO:
            raise TenantsUnavailableError(
                f"others may read the MAC key {self.key}: run `chmod 600 {self.key}`"
            )
        if len(key) < SHORTEST_KEY:
            raise TenantsUnavailableError(
                f"the MAC key {self.key} is shorter than {SHORTEST_KEY} characters: "
                "make one with `openssl rand -hex 32`"
            )
        return key
