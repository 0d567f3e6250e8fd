"""
Which draft serves a target: one small file for each target.

Whoever starts a worker reads it, so it is replaced whole: a crash leaves what was said before or what is
said now.  A file that cannot be read is an error and never taken for none, since that would put another
draft into service than the one that was decided on.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.drafts.registry.revision import is_digest
from appliance.errors import BundleStorageError, DraftStorageError
from appliance.infra.canonical_json import canonical
from appliance.sovereignty.bundle.copying import write_durably

STANDING = "standing"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is decided about the drafts of one target."""

    target: str
    """Digest of the target."""
    draft: str | None = None
    """Digest of the draft that serves it; None for the one of `worker.draft` in the settings."""
    previous: tuple[str | None, ...] = ()
    """What served before, newest first: what a rollback goes back to; None as in `draft`."""
    promotion: str | None = None
    """Id of the promotion under way."""
    candidate: str | None = None
    """Digest of the draft that promotion tries."""

    def encode(self) -> bytes:
        """Return the file's bytes: canonical JSON."""
        return canonical({"format": FORMAT, **asdict(self)})


def read_standing(directory: Path, target: str) -> Standing:
    """
    Read what is decided about a target; where nothing is, the settings' draft serves it.

    Args:
        directory: of the life of drafts.
        target: digest of the target.

    Raises:
        DraftStorageError: the file cannot be read, or is damaged.
    """
    path = _path(directory, target)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Standing(target=target)
    except OSError as error:
        raise DraftStorageError(f"cannot read which draft serves, {path}: {error.strerror}") from error
    standing = _parse(content)
    if standing is None or standing.target != target:
        raise DraftStorageError(
            f"{path}, which says which draft serves, is damaged: restore it from a backup, or remove it to "
            "serve with worker.draft"
        )
    return standing


def write_standing(directory: Path, standing: Standing) -> None:
    """
    Write what is decided, whole or not at all; it survives a power cut.

    Raises:
        DraftStorageError: it cannot be written; what was decided before stands.
    """
    path = _path(directory, standing.target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, standing.encode())
    except OSError as error:
        raise DraftStorageError(f"cannot write {path}: {error.strerror}") from error
    except BundleStorageError as error:
        raise DraftStorageError(f"{error}; what was decided before stands") from error


def _path(directory: Path, target: str) -> Path:
    if not is_digest(target):
        raise DraftStorageError(f"{target!r} is no digest of a target: it reads sha256: and 64 hex digits")
    return directory / STANDING / f"{target.removeprefix('sha256:')}.json"


def _parse(content: bytes) -> Standing | None:
    """The standing, or None where the bytes are not those of one."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not _fits(said):
        return None
    standing = Standing(
        target=said["target"],
        draft=said["draft"],
        previous=tuple(said["previous"]),
        promotion=said["promotion"],
        candidate=said["candidate"],
    )
    return standing if standing.encode() == content else None


def _fits(said: dict[str, Any]) -> bool:
    """Whether every member is there and of its kind."""
    previous, promotion = said.get("previous"), said.get("promotion")
    return (
        set(said) == {"format", "target", "draft", "previous", "promotion", "candidate"}
        and is_digest(said["target"])
        and all(each is None or is_digest(each) for each in (said["draft"], said["candidate"]))
        and isinstance(previous, list)
        and all(each is None or is_digest(each) for each in previous)
        and (promotion is None or isinstance(promotion, str))
    )
