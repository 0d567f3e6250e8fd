"""
Pieces of a file on disk: plain, or each encrypted under the file's own key.

A sealed piece is nonce, ciphertext and tag (AES-256-GCM), bound to its file and to its index, so that
pieces can be neither swapped nor moved.  Nonces are random: a file has far fewer than 2^32 pieces
(NIST SP 800-38D, 8.3), and a piece rewritten after a crash gets a new nonce.
"""

from collections.abc import Callable
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from appliance.audit.content.sealing import NONCE_BYTES
from appliance.errors import StorageUnavailableError

PIECE_BYTES = 65_536
SEALED_BYTES = PIECE_BYTES + NONCE_BYTES + 16  # a whole piece of a file


class Pieces(Protocol):
    stored_bytes: int  # of every piece of a file but the last

    def close(self, index: int, piece: bytes) -> bytes: ...

    def open(self, index: int, stored: bytes) -> bytes:
        """Raises StorageUnavailableError if it was damaged."""


class PlainPieces:
    stored_bytes = PIECE_BYTES

    def close(self, index: int, piece: bytes) -> bytes:  # noqa: ARG002 - see the protocol
        return piece

    def open(self, index: int, stored: bytes) -> bytes:  # noqa: ARG002
        return stored


class SealedPieces:
    """Encrypted under the key of the file called `name`."""

    stored_bytes = SEALED_BYTES

    def __init__(self, key: bytes, name: str, random_bytes: Callable[[int], bytes]) -> None:
        self._cipher = AESGCM(key)
        self._name = name
        self._random_bytes = random_bytes

    def close(self, index: int, piece: bytes) -> bytes:
        nonce = self._random_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, piece, self._place(index))

    def open(self, index: int, stored: bytes) -> bytes:
        try:
            return self._cipher.decrypt(stored[:NONCE_BYTES], stored[NONCE_BYTES:], self._place(index))
        except (InvalidTag, ValueError) as error:
            raise StorageUnavailableError(f"{self._name} was damaged on disk: create it again.") from error

    def _place(self, index: int) -> bytes:
        return f"{self._name}/{index}".encode()
