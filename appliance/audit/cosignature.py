"""
What a witness signs, and how the signature is written: C2SP `tlog-cosignature`.

A cosignature states: as of this time, this is the largest tree observed of that log, and it extends every
tree observed before.  Ed25519 (type 0x04) signs two lines and the checkpoint's text; ML-DSA-44 (type 0x06)
signs a structure that also names the signer.  A log that signs with ML-DSA-44 makes the same statement about
itself, as `tlog-checkpoint` recommends.  Pure.

Source: c2sp.org/tlog-cosignature at C2SP commit 5ba5ee83 (2026-07-22).
"""

from appliance.errors import MalformedCheckpointError

ED25519 = 0x01
"""Plain signature of a note, without a time."""
ED25519_COSIGNATURE = 0x04
MLDSA44 = 0x06

PUBLIC_KEY_BYTES = {ED25519: 32, ED25519_COSIGNATURE: 32, MLDSA44: 1312}
SIGNATURE_BYTES = {ED25519: 64, ED25519_COSIGNATURE: 64, MLDSA44: 2420}
ALGORITHM_NAMES = {ED25519: "Ed25519", ED25519_COSIGNATURE: "Ed25519 cosignature", MLDSA44: "ML-DSA-44"}
TIMESTAMPED = frozenset({ED25519_COSIGNATURE, MLDSA44})
MAX_TIME = 2**63 - 1

_TIME_BYTES = 8
_LONGEST_NAME = 255
_SUBTREE_LABEL = b"subtree/v1\n\0"


def ed25519_message(*, time: int, text: str) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()


def mldsa_message(*, name: str, time: int, origin: str, size: int, root: bytes) -> bytes:
    """Return what an ML-DSA-44 key signs of a tree (`cosigned_message`); raises MalformedCheckpointError."""
    try:
        return b"".join(
            (
                _SUBTREE_LABEL,
                _short(name),
                time.to_bytes(_TIME_BYTES),
                _short(origin),
                (0).to_bytes(_TIME_BYTES),  # a checkpoint is the subtree that starts at leaf 0
                size.to_bytes(_TIME_BYTES),
                root,
            )
        )
    except OverflowError as error:
        raise MalformedCheckpointError("a size or time is too large to be cosigned") from error


def encode_timestamped(time: int, signature: bytes) -> bytes:
    """Return what follows the key id in a signature line; raises MalformedCheckpointError."""
    if not 0 <= time <= MAX_TIME:
        raise MalformedCheckpointError("the time of a cosignature must be seconds since 1970, below 2^63")
    return time.to_bytes(_TIME_BYTES) + signature


def parse_timestamped(content: bytes, kind: int) -> tuple[int, bytes]:
    """Split time and signature; raises MalformedCheckpointError."""
    time = int.from_bytes(content[:_TIME_BYTES])
    if len(content) != _TIME_BYTES + SIGNATURE_BYTES[kind] or time > MAX_TIME:
        raise MalformedCheckpointError(
            f"a cosignature of type {kind:02x} is a time and {SIGNATURE_BYTES[kind]} bytes"
        )
    return time, content[_TIME_BYTES:]


def _short(text: str) -> bytes:
    content = text.encode()
    if not 1 <= len(content) <= _LONGEST_NAME:
        raise MalformedCheckpointError("a name that is cosigned has 1 to 255 bytes")
    return bytes([len(content)]) + content
