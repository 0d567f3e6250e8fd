"""
Who vouches for a draft that comes from elsewhere.

Either a key that the site trusts has signed what lies beside it, or an operator vouches for it.  A
signature that is there is always judged: vouching is for what has none, and never a way around one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.registry.revision import REVISION, SIGNATURE, SIGNED, Revision
from appliance.drafts.registry.source import DraftSource, read_small
from appliance.errors import BundleRefusedError, DraftRefusedError
from appliance.sovereignty.bundle.trust import TrustedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What somebody else said of a draft, and signed."""

    signer: str
    """Name of the key, which the site trusts."""
    revision: Revision
    page: bytes
    """Their revision.json, as it came."""
    note: bytes
    """Their revision.sig, as it came."""

    def check_target(self, target: str) -> None:
        """
        Check that what was signed is a draft for this target.

        Raises:
            DraftRefusedError: it is one for another.
        """
        if self.revision.target != target:
            raise DraftRefusedError(
                f"{self.signer} signed the draft for the target {self.revision.target}, and this target is "
                f"{target}: name the right one with --target"
            )


def read_origin(
    source: DraftSource,
    *,
    signature: Path | None,
    vouched: bool,
    trusted: Iterable[TrustedKey],
    now: float,
) -> Origin | None:
    """
    Return who signed a draft elsewhere; None where nobody did, and an operator vouches for it.

    Args:
        source: the draft as it was found.
        signature: the note, where it came apart from the draft.
        vouched: whether an operator vouches for it.
        trusted: keys of the site.
        now: seconds since the epoch.

    Raises:
        DraftRefusedError: nobody answers for this draft, or what was signed is another one.
    """
    if vouched:
        if signature is not None or (source.home / SIGNATURE).exists():
            raise DraftRefusedError(
                f"the draft in {source.home} carries a signature, which is what it is judged by: leave "
                f"--vouch out, or take {SIGNATURE} away to answer for it yourself"
            )
        return None
    if signature is None and not source.is_signed:
        raise DraftRefusedError(
            f"nobody answers for the draft in {source.home}: it needs {REVISION} and {SIGNATURE} of a key in "
            "drafts.trusted_keys_file, or --vouch"
        )
    page = source.read(REVISION)
    note = source.read(SIGNATURE) if signature is None else read_small(signature)
    try:
        signer = SIGNED.verify(page, note, trusted, now)
    except BundleRefusedError as error:
        raise DraftRefusedError(f"the draft in {source.home} is refused: {error}") from error
    revision = Revision.decode(page)
    if revision.digest != source.digest:
        raise DraftRefusedError(
            f"the draft in {source.home} is not the one that {signer} signed: its files digest to "
            f"{source.digest}, and signed is {revision.digest}; copy it again"
        )
    return Origin(signer=signer, revision=revision, page=page, note=note)
