"""
MANIFEST.sig: who vouches for a manifest.

A C2SP signed note (c2sp.org/signed-note) whose text names the manifest's hash and size.  Its first
line is no log's origin and its second no number, so a bundle's signature can never be read as a
checkpoint of an audit log, nor the other way round.  Only Ed25519 signatures (type 0x01) count.
Fails closed: no signature of a trusted key in force, no bundle.
"""

import hashlib
from collections.abc import Iterable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.audit.checkpoint import Note, NoteSigner, parse_note, sign_note
from appliance.bundle.manifest import MANIFEST, SIGNATURE
from appliance.bundle.trust import TrustedKey
from appliance.errors import BundleRefusedError, MalformedCheckpointError

HEADING = "sovereign-appliance bundle v1"


def signed_text(manifest: bytes) -> str:
    """Return the text that is signed for the bytes of a manifest."""
    return f"{HEADING}\nsha256:{hashlib.sha256(manifest).hexdigest()}\n{len(manifest)}\n"


def sign_manifest(manifest: bytes, signer: NoteSigner) -> bytes:
    """Return MANIFEST.sig for the bytes of MANIFEST.json."""
    return sign_note(signed_text(manifest), [signer]).encode()


def verify_signature(manifest: bytes, note_bytes: bytes, trusted: Iterable[TrustedKey], now: float) -> str:
    """
    Return the name of a trusted key in force that signed the manifest.

    Args:
        manifest: bytes of MANIFEST.json.
        note_bytes: bytes of MANIFEST.sig.
        trusted: keys of the site.
        now: seconds since the epoch.

    Raises:
        BundleRefusedError: nobody trusted signed these bytes, or the key is not in force.
    """
    try:
        note = parse_note(note_bytes.decode())
    except (UnicodeDecodeError, MalformedCheckpointError) as error:
        raise BundleRefusedError(f"{SIGNATURE} cannot be read: {error}") from error
    if note.text != signed_text(manifest):
        raise BundleRefusedError(f"{SIGNATURE} is of another {MANIFEST}: one of the two was altered")
    known = [key for key in trusted if _signed(note, key)]
    if not known:
        names = ", ".join(signature.name for signature in note.signatures)
        raise BundleRefusedError(f"no trusted key signed the bundle: its signature is by {names}")
    for key in known:
        if key.in_force(now):
            return key.name
    raise BundleRefusedError(known[0].complaint(now))


def _signed(note: Note, key: TrustedKey) -> bool:
    """Whether the key signed the note; raises when a signature in its name is wrong."""
    mine = [
        line.signature
        for line in note.signatures
        if (line.name, line.key_id) == (key.verifier_key.name, key.verifier_key.key_id)
    ]
    for signature in mine:
        try:
            public_key = Ed25519PublicKey.from_public_bytes(key.verifier_key.public_key)
            public_key.verify(signature, note.text.encode())
        except (InvalidSignature, ValueError) as error:
            problem = f"the signature of {key.name} is wrong: {SIGNATURE} was altered"
            raise BundleRefusedError(problem) from error
    return bool(mine)
