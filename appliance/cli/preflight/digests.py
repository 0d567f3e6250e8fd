"""The weights: whether they are complete, and match a bundle or the output of `sha256sum`."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.cli.preflight.accelerator import read_pair
from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family, gib
from appliance.cli.preflight.memory import tensor_bytes
from appliance.errors import ApplianceError, ConfigurationError
from appliance.sovereignty.bundle.bundle_verifier import open_bundle
from appliance.sovereignty.bundle.load import Home
from appliance.sovereignty.bundle.manifest import ItemKind
from appliance.sovereignty.bundle.signature import TrustedKey, load_trusted_keys

FILES = Subject("weights.files", "Weights")
DIGESTS = Subject("weights.digests", "Digests of weights")
HEX_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestComparison:
    directory: Path
    same: int
    wrong: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    """Files that were not expected."""


@family(FILES, DIGESTS)
def check_weights(inquiry: Inquiry) -> Iterable[Check]:
    """Read the headers of the weights, and every byte if there is something to compare with."""
    inquiry.require_worker()
    try:
        models = [model for model in read_pair(inquiry.settings.worker) if model is not None]
    except ConfigurationError as error:
        todo = "load the bundle's models, or name their directory in worker.model and worker.draft"
        yield FILES.fail(str(error), todo)
        raise SkippedError("the weights cannot be read") from error
    sizes = ", ".join(f"{model.path.name} {gib(tensor_bytes(model, 2))}" for model in models)
    yield FILES.ok(f"{sizes}: complete by their headers")
    if inquiry.manifest is None:
        raise SkippedError("nothing to compare with; pass a bundle or a list of sums with --against")
    try:
        keys = Home(directory=inquiry.installation.directory).trusted
        trusted = load_trusted_keys(keys) if keys.exists() else None
        now = inquiry.clock()
        sent = [expected_files(inquiry.manifest, model.path, trusted=trusted, now=now) for model in models]
        compared = [compare(model.path, files) for model, files in zip(models, sent, strict=True)]
    except (ApplianceError, OSError, ValueError) as error:
        todo = "pass a bundle's directory, or a file with the output of `sha256sum`"
        yield DIGESTS.fail(f"cannot compare: {error}", todo)
    else:
        yield judge_digests(compared, unsigned=trusted is None and _is_bundle(inquiry.manifest))


def expected_files(
    source: Path, model: Path, *, trusted: Sequence[TrustedKey] | None = None, now: float = 0.0
) -> dict[str, str]:
    """
    Name and SHA-256 of each expected file of one model.

    `source` is a bundle (directory, parts, or a file ending in `.tar`), or a file with the output of
    `sha256sum`.  `model` has the model's name, or is below a directory of that name.  The bundle must be
    signed by one of the `trusted` keys that is valid at `now` (Unix time); without keys its signature is
    not checked.

    Raises ApplianceError if the bundle is not what was signed or cannot be read, OSError if the list cannot
    be read, and ValueError if it is malformed or does not contain this model.
    """
    if _is_bundle(source):
        found = _from_bundle(source, model, trusted, now)
    else:
        text = source.read_text(encoding="utf-8")
        found = parse_sums(text, model.name) or parse_sums(text, model.parent.name)
    if not found:
        raise ValueError(f"{source} lists no file of {model}")
    return found


def parse_sums(text: str, model: str) -> dict[str, str]:
    """Parse lines of `sha256sum`; those with a directory count only for the model of that name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        digest, _, name = line.partition(" ")
        path = Path(name.lstrip(" *"))
        if len(digest) != HEX_DIGITS or not path.name:
            raise ValueError(f"`{line[:80]}` is not a line of sha256sum")
        if model in path.parts:
            at = len(path.parts) - 1 - path.parts[::-1].index(model)
            found[str(Path(*path.parts[at + 1 :]))] = digest.lower()
        elif len(path.parts) == 1:
            found[path.name] = digest.lower()
    return found


def compare(directory: Path, sent: Mapping[str, str]) -> DigestComparison:
    there = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    wrong = [name for name in sorted(there & sent.keys()) if _digest(directory / name) != sent[name]]
    return DigestComparison(
        directory=directory,
        same=len(there & sent.keys()) - len(wrong),
        wrong=tuple(wrong),
        missing=tuple(sorted(sent.keys() - there)),
        unknown=tuple(sorted(there - sent.keys())),
    )


def judge_digests(compared: Iterable[DigestComparison], *, unsigned: bool = False) -> Check:
    """Whether every model matches; `unsigned` if the bundle's signature was not checked."""
    compared = tuple(compared)
    again = "copy it again from the bundle, and find out who changed it"
    for model in compared:
        if model.wrong:
            seen = f"{model.directory / model.wrong[0]} does not match{_more(model.wrong)}"
            return DIGESTS.fail(seen, again)
        if model.missing:
            seen = f"{model.directory / model.missing[0]} is missing{_more(model.missing)}"
            return DIGESTS.fail(seen, again)
    for model in compared:
        if model.unknown:
            seen = f"{model.directory / model.unknown[0]} was not expected{_more(model.unknown)}"
            return DIGESTS.warn(seen, "find its origin: the engine may read it")
    same = sum(model.same for model in compared)
    if unsigned:
        seen = f"{same} files match the bundle, whose signature was not checked"
        return DIGESTS.warn(seen, "write the keys you trust to bundle-keys.txt in the data directory")
    return DIGESTS.ok(f"{same} files match")


def _is_bundle(source: Path) -> bool:
    return source.is_dir() or source.suffix == ".tar"


def _from_bundle(
    source: Path, model: Path, trusted: Sequence[TrustedKey] | None, now: float
) -> dict[str, str]:
    bundle = open_bundle(source, trusted=trusted, now=now)
    places = model.parts, model.parent.parts
    for tree in bundle.trees():
        name = Path(tree.item.name).parts
        if tree.item.kind is ItemKind.MODEL and any(parts[-len(name) :] == name for parts in places):
            return {path: file.sha256 for path, file in tree.named_files().items()}
    return {}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _more(names: tuple[str, ...]) -> str:
    return f", nor {len(names) - 1} more" if len(names) > 1 else ""
