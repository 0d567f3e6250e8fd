"""
A directory with a draft, read for registration.

Only files the digest covers belong to the draft: config, tensors, tokenizer and text files directly in the
directory. Other files (code, pickled weights, pictures) never enter the registry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.drafts.registry.revision import MAX_BYTES, REVISION, is_digest
from appliance.drafts.training_record import DIGESTS, TrainingRecord, parse_record
from appliance.errors import ConfigurationError, DraftNotFoundError, DraftRefusedError
from appliance.serving.weights import TRAINING_RECORD, Weights, digest_files, hash_files, inspect_weights
from appliance.sovereignty.bundle.manifest import BundleFile, is_inner_path

WEIGHTS = "weights"
"""Directory of the draft's files in a registered draft."""
MEDIA_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    home: Path
    """The named directory; `revision.json`, if any, is in it."""
    weights: Weights
    """Config and tensors; its path holds the files."""
    files: Mapping[str, BundleFile]
    digest: str
    record: TrainingRecord
    """Empty without a `training.json`."""

    @property
    def record_hash(self) -> str | None:
        """SHA-256 (hex) of `training.json`."""
        file = self.files.get(TRAINING_RECORD)
        return None if file is None else file.sha256


def read_source(path: Path) -> DraftSource:
    """Read a draft's directory, or a registered one (`revision.json` and `weights/`); reads every byte."""
    home = path.absolute()
    if not home.is_dir():
        raise DraftNotFoundError(f"{home} is not a directory: give the one with the draft's config.json")
    inner = home / WEIGHTS
    place = inner if (home / REVISION).exists() and inner.is_dir() else home
    try:
        weights = inspect_weights(place)
        hashes = {name: found for name, found in hash_files(place).items() if name != REVISION}
        sizes = {name: (place / name).stat().st_size for name in hashes}
    except ConfigurationError as error:
        raise DraftRefusedError(f"the draft cannot be registered: {error}") from error
    except (OSError, UnicodeError, RecursionError) as error:
        raise DraftRefusedError(f"the draft in {place} cannot be read: {error}") from error
    odd = [name for name in hashes if not is_inner_path(name)]
    if odd:
        raise DraftRefusedError(f"the file {odd[0]!r} has an invalid name: rename or remove it")
    record, _wrong = parse_record(weights.training)
    for name in DIGESTS:
        if getattr(record, name) is not None and not is_digest(getattr(record, name)):
            raise DraftRefusedError(
                f"{place / TRAINING_RECORD}: {name} is not a digest (sha256: and 64 hex digits)"
            )
    return DraftSource(
        home=home,
        weights=weights,
        files={name: describe_file(sizes[name], found) for name, found in hashes.items()},
        digest=digest_files(hashes),
        record=record,
    )


def describe_file(size: int, sha256: str) -> BundleFile:
    return BundleFile(path=f"blobs/sha256/{sha256}", size=size, sha256=sha256, media_type=MEDIA_TYPE)


def read_small(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DraftRefusedError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise DraftRefusedError(f"{path} is too large: it was altered")
    return content
