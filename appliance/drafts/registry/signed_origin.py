"""
Checks the signature of a draft from elsewhere.

Either a trusted key signed it, or an operator vouches for it.  An existing signature is always verified:
--vouch is for unsigned drafts and cannot bypass one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.registry.draft_source import DraftSource, read_small
from appliance.drafts.registry.revision import REVISION, SIGNATURE, SIGNED, Revision
from appliance.errors import BundleRefusedError, DraftRefusedError
from appliance.sovereignty.bundle.signature import TrustedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedOrigin:
    signer: str
    """Name of the trusted key."""
    revision: Revision
    page: bytes
    """Their revision.json, byte-exact."""
    note: bytes
    """Their revision.sig, byte-exact."""

    def check_target(self, target: str) -> None:
        if self.revision.target != target:
            raise DraftRefusedError(
                f"{self.signer} signed the draft for the target {self.revision.target}, and this target is "
                f"{target}: give the right one with --target"
            )


def read_origin(
    source: DraftSource,
    *,
    signature: Path | None,
    vouched: bool,
    trusted: Iterable[TrustedKey],
    now: float,
) -> SignedOrigin | None:
    """
    Verify who signed a draft elsewhere; None if it is unsigned and an operator vouches for it.

    `signature` is the note's path if it is not in the draft's directory; `now` is in seconds since the epoch.
    Raises DraftRefusedError if the draft is unsigned, or another one was signed.
    """
    if vouched:
        if signature is not None or (source.home / SIGNATURE).exists():
            raise DraftRefusedError(
                f"the draft in {source.home} is signed: leave --vouch out, or "
                f"remove {SIGNATURE} to vouch for it yourself"
            )
        return None
    if signature is None and not all((source.home / name).exists() for name in (REVISION, SIGNATURE)):
        raise DraftRefusedError(
            f"the draft in {source.home} is unsigned: it needs {REVISION} and {SIGNATURE} of a key in "
            "drafts.trusted_keys_file, or --vouch"
        )
    page = read_small(source.home / REVISION)
    note = read_small(signature or source.home / SIGNATURE)
    try:
        signer = SIGNED.verify(page, note, trusted, now)
    except BundleRefusedError as error:
        raise DraftRefusedError(f"the draft in {source.home} is refused: {error}") from error
    revision = Revision.decode(page)
    if revision.digest != source.digest:
        raise DraftRefusedError(
            f"the draft in {source.home} is not the one that {signer} signed: its digest is "
            f"{source.digest}, the signed one {revision.digest}; copy it again"
        )
    return SignedOrigin(signer=signer, revision=revision, page=page, note=note)
