"""
Who vouches for a file: MANIFEST.sig beside a bundle's manifest, and its like beside other files.

A C2SP signed note (c2sp.org/signed-note) whose text names the file's hash and size.  Its first line
says what kind of file that is; it is no log's origin and the second line no number, so a signature of
one kind can never be read as one of another kind, nor as a checkpoint of an audit log, nor the other way
round.  Only Ed25519 signatures (type 0x01) count.  Fails closed: no signature of a trusted key in
force, no file.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.audit.checkpoint import Note, NoteSigner, parse_note, sign_note
from appliance.errors import BundleRefusedError, MalformedCheckpointError
from appliance.sovereignty.bundle.manifest import MANIFEST, SIGNATURE
from appliance.sovereignty.bundle.trust import TrustedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedKind:
    """A kind of file that is signed, and the words it is refused with."""

    heading: str
    """First line of what is signed; every kind has its own."""
    file: str
    """Name of the file."""
    signature: str
    """Name of the file with the note."""
    thing: str
    """What the file stands for."""

    def text(self, content: bytes) -> str:
        """Return the text that is signed for the bytes of a file."""
        return f"{self.heading}\nsha256:{hashlib.sha256(content).hexdigest()}\n{len(content)}\n"

    def sign(self, content: bytes, signer: NoteSigner) -> bytes:
        """Return the note for the bytes of a file."""
        return sign_note(self.text(content), [signer]).encode()

    def verify(self, content: bytes, note_bytes: bytes, trusted: Iterable[TrustedKey], now: float) -> str:
        """
        Return the name of a trusted key in force that signed the file.

        Args:
            content: bytes of the file.
            note_bytes: bytes of the note.
            trusted: keys of the site.
            now: seconds since the epoch.

        Raises:
            BundleRefusedError: nobody trusted signed these bytes, or the key is not in force.
        """
        try:
            note = parse_note(note_bytes.decode())
        except (UnicodeDecodeError, MalformedCheckpointError) as error:
            raise BundleRefusedError(f"{self.signature} cannot be read: {error}") from error
        if note.text != self.text(content):
            raise BundleRefusedError(
                f"{self.signature} is of another {self.file}: one of the two was altered"
            )
        known = [key for key in trusted if self._signed(note, key)]
        if not known:
            names = ", ".join(signature.name for signature in note.signatures)
            raise BundleRefusedError(f"no trusted key signed {self.thing}: its signature is by {names}")
        for key in known:
            if key.in_force(now):
                return key.name
        raise BundleRefusedError(known[0].complaint(now))

    def _signed(self, note: Note, key: TrustedKey) -> bool:
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
                problem = f"the signature of {key.name} is wrong: {self.signature} was altered"
                raise BundleRefusedError(problem) from error
        return bool(mine)


BUNDLE = SignedKind(
    heading="sovereign-appliance bundle v1", file=MANIFEST, signature=SIGNATURE, thing="the bundle"
)


def sign_manifest(manifest: bytes, signer: NoteSigner) -> bytes:
    """Return MANIFEST.sig for the bytes of MANIFEST.json."""
    return BUNDLE.sign(manifest, signer)


def verify_signature(manifest: bytes, note_bytes: bytes, trusted: Iterable[TrustedKey], now: float) -> str:
    """
    Return the name of a trusted key in force that signed the manifest.

    Raises:
        BundleRefusedError: nobody trusted signed these bytes, or the key is not in force.
    """
    return BUNDLE.verify(manifest, note_bytes, trusted, now)
