"""
The active draft of each target: one small file per target, replaced atomically.

Fails closed: an unreadable file is an error and never taken for absence, which would serve another draft
than the chosen one.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.drafts.registry.revision import is_digest
from appliance.errors import BundleStorageError, DraftStorageError
from appliance.infra.canonical_json import canonical
from appliance.infra.files import FOR_ALL
from appliance.sovereignty.bundle.copying import write_durably
from appliance.sovereignty.bundle.placing import PASSABLE

ACTIVE_DRAFTS = "standing"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveDraft:
    target: str
    draft: str | None = None
    """Digest of the draft that serves it; None for `worker.draft` of the settings."""
    previous: tuple[str | None, ...] = ()
    """Previously active drafts, newest first, for rollback; None as in `draft`."""
    promotion: str | None = None
    """Id of the running promotion."""
    candidate: str | None = None
    """Digest of the draft that the promotion tests."""

    def encode(self) -> bytes:
        return canonical({"format": FORMAT, **asdict(self)})


def read_active_draft(directory: Path, target: str) -> ActiveDraft:
    """Without a file the settings' draft serves the target; a damaged one raises DraftStorageError."""
    path = _path(directory, target)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ActiveDraft(target=target)
    except OSError as error:
        raise DraftStorageError(f"cannot read the active draft {path}: {error.strerror}") from error
    active = _parse(content)
    if active is None or active.target != target:
        raise DraftStorageError(
            f"{path}, which names the active draft, is damaged: restore it from a backup, or remove it to "
            "serve worker.draft"
        )
    return active


def write_active_draft(directory: Path, active: ActiveDraft) -> None:
    """
    Write atomically and durably, for workers under other accounts, whatever the umask.

    After DraftStorageError the previous one remains.
    """
    path = _path(directory, active.target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.stat().st_mode & PASSABLE != PASSABLE:
            path.parent.chmod(PASSABLE)
        write_durably(path, active.encode(), mode=FOR_ALL)
    except OSError as error:
        raise DraftStorageError(f"cannot write {path}: {error.strerror}") from error
    except BundleStorageError as error:
        raise DraftStorageError(f"{error}; the previous active draft remains") from error


def _path(directory: Path, target: str) -> Path:
    if not is_digest(target):
        raise DraftStorageError(f"{target!r} is not a digest of a target (sha256: and 64 hex digits)")
    return directory / ACTIVE_DRAFTS / f"{target.removeprefix('sha256:')}.json"


def _parse(content: bytes) -> ActiveDraft | None:
    try:
        fields: dict[str, Any] = json.loads(content)
        active = ActiveDraft(
            target=fields["target"],
            draft=fields["draft"],
            previous=tuple(fields["previous"]),
            promotion=fields["promotion"],
            candidate=fields["candidate"],
        )
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    drafts = (active.draft, active.candidate, *active.previous)
    fits = (
        is_digest(active.target)
        and all(each is None or is_digest(each) for each in drafts)
        and isinstance(active.promotion, str | None)
    )
    return active if fits and active.encode() == content else None
