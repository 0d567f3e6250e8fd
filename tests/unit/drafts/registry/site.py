"""
A site with a registry of drafts, and workshops that make drafts for it: real keys, real tensors, tiny.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.audit.signing_keys import Signer, create_signing_key, load_keys, mldsa_path
from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.revision import REVISION, SIGNATURE, SIGNED, Revision
from appliance.serving.weights import digest_weights
from appliance.sovereignty.bundle.signature import TrustedKey
from tests.unit.drafts.lint.builder import RECORD, Draft, eagle31, write

NOW = 1_795_000_000.0
SITE_KEY, MAKER_KEY = "site.example/audit/drafts", "maker.example/drafts"


def digest(number: int) -> str:
    """A digest that is one in form."""
    return f"sha256:{number:064x}"


def new_key(path: Path, name: str) -> Signer:
    """A key of that name, made now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    create_signing_key(path)
    return load_keys(path, mldsa_path(path), name)


def trust(*signers: Signer) -> tuple[TrustedKey, ...]:
    """What a site trusts that trusts these."""
    return tuple(TrustedKey(verifier_key=signer.verifier_key) for signer in signers)


@dataclass
class Site:
    """A place for drafts, a registry and the key of the site."""

    place: Path
    signer: Signer
    now: float = NOW
    made: dict[str, Path] = field(default_factory=dict)
    """Targets by the name of the draft that was made for them."""

    @classmethod
    def open(cls, place: Path) -> "Site":
        return cls(place=place, signer=new_key(place / "drafts.key", SITE_KEY))

    @property
    def directory(self) -> Path:
        return self.place / "drafts"

    @property
    def registry(self) -> DraftRegistry:
        """The registry as a process finds it that has just started."""
        return DraftRegistry(self.directory, trusted=trust(self.signer), clock=lambda: self.now)

    def draft(self, name: str = "first", draft: Draft | None = None, **record: Any) -> Path:
        """Make a draft; its record says what it is given, so that each differs from the others."""
        made = draft or eagle31()
        made.training = {**RECORD, "recipe": {"name": name}, **record}
        target, weights = write(made, self.place / "made" / name)
        self.made[name] = target.path
        return weights.path

    @property
    def target(self) -> str:
        """Digest of the target, which is the same for all drafts made here."""
        return digest_weights(next(iter(self.made.values())))

    def add(self, source: Path, **how: Any) -> Revision:
        """Register a draft as the site's own."""
        return self.registry.register(
            read_source(source), **{"target": self.target, "how": "trained", "signer": self.signer, **how}
        )

    def home(self, revision: Revision) -> Path:
        """Directory of a registered draft."""
        return self.directory / "revisions" / revision.hex


def sign(source: Path, signer: Signer, target: str, **changes: Any) -> Revision:
    """Write a maker's revision.json and revision.sig into a draft's directory."""
    found = read_source(source)
    revision = Revision(
        **{
            "digest": found.digest,
            "target": target,
            "record": found.record,
            "parent": found.record.parent,
            "dataset": found.record.dataset,
            "source": "trained",
            "made": "2026-11-01T00:00:00.000Z",
            **changes,
        }
    )
    (source / REVISION).write_bytes(revision.encode())
    (source / SIGNATURE).write_bytes(SIGNED.sign(revision.encode(), signer))
    return revision


def rewrite(path: Path, content: bytes) -> None:
    """Change a read-only file, as an attacker with the disk would."""
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(0o444)


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, mode and content of every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): (
            path.stat().st_ino,
            stat.S_IMODE(path.stat().st_mode),
            path.read_bytes(),
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file() and os.access(path, os.R_OK)
    }
