"""
Whether the weights are whole, and are those that were sent: against a bundle or what `sha256sum` printed.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.cli.preflight.accelerator import read_pair
from appliance.cli.preflight.check import Check, Subject, gib
from appliance.cli.preflight.inquiry import Inquiry
from appliance.cli.preflight.memory import tensor_bytes
from appliance.errors import ApplianceError, ConfigurationError
from appliance.sovereignty.bundle.load import Home
from appliance.sovereignty.bundle.manifest import Kind
from appliance.sovereignty.bundle.trust import TrustedKey, load_trusted_keys
from appliance.sovereignty.bundle.verify import open_bundle

FILES = Subject("weights.files", "Weights")
DIGESTS = Subject("weights.digests", "Digests of weights")
SUBJECTS = (FILES, DIGESTS)
CHUNK = 2**20
HEX_DIGITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What came of comparing one model's directory with what was sent."""

    directory: Path
    same: int
    """Files that are as they should be."""
    wrong: tuple[str, ...]
    """Names of files whose content is another."""
    missing: tuple[str, ...]
    """Names that were sent and are not there."""
    unknown: tuple[str, ...]
    """Names that are there and were not sent."""


def check_weights(inquiry: Inquiry) -> Iterable[Check]:
    """Read the headers of the weights, and every byte of them if there is something to compare with."""
    if not inquiry.worker:
        yield from (subject.skipped("no worker runs on this machine") for subject in SUBJECTS)
        return
    try:
        target, draft = read_pair(inquiry.settings.worker)
    except ConfigurationError as error:
        yield FILES.fail(
            str(error), "load the bundle's models, or name their directory in worker.model and worker.draft"
        )
        yield DIGESTS.skipped("the weights cannot be read")
        return
    models = [model for model in (target, draft) if model is not None]
    sizes = ", ".join(f"{model.path.name} {gib(tensor_bytes(model, 2))}" for model in models)
    yield FILES.ok(f"{sizes}: whole by their headers")
    if inquiry.manifest is None:
        yield DIGESTS.skipped("nothing to compare with; name a bundle or a list of sums with --against")
        return
    try:
        keys = Home(directory=inquiry.installation.directory).trusted
        trusted = load_trusted_keys(keys) if keys.exists() else None
        now = inquiry.clock()
        sent = [expected_files(inquiry.manifest, model.path, trusted=trusted, now=now) for model in models]
        compared = [compare(model.path, files) for model, files in zip(models, sent, strict=True)]
    except (ApplianceError, OSError, ValueError) as error:
        yield DIGESTS.fail(
            f"cannot compare: {error}", "name a bundle's directory, or a file that `sha256sum` wrote"
        )
        return
    yield judge_digests(compared, unsigned=trusted is None and _is_bundle(inquiry.manifest))


def expected_files(
    source: Path, model: Path, *, trusted: Sequence[TrustedKey] | None = None, now: float = 0.0
) -> dict[str, str]:
    """
    Name and SHA-256 of each file of one model, as it was sent.

    Args:
        source: a bundle (directory, parts, or a file ending in `.tar`), or a file of lines that `sha256sum`
            prints.
        model: the model's directory, which has its name or, where a bundle was loaded, lies below it.
        trusted: keys of which one must have signed the bundle; None: its signature is not asked for.
        now: Unix time in seconds, by which keys count.

    Raises:
        ApplianceError: the bundle is not what was signed, or cannot be read.
        OSError: the list cannot be read.
        ValueError: it is none, or does not name this model.
    """
    if _is_bundle(source):
        found = _from_bundle(source, model, trusted, now)
    else:
        text = source.read_text(encoding="utf-8")
        found = parse_sums(text, model.name) or parse_sums(text, model.parent.name)
    if not found:
        raise ValueError(f"{source} names no file of {model}")
    return found


def parse_sums(text: str, model: str) -> dict[str, str]:
    """
    Read lines of `sha256sum`; those with a directory in them count for the model of that name alone.

    Raises:
        ValueError: a line is none.
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        digest, _, name = line.partition(" ")
        path = Path(name.lstrip(" *"))
        if len(digest) != HEX_DIGITS or not path.name:
            raise ValueError(f"`{line[:80]}` is no line of sha256sum")
        if model in path.parts:
            at = len(path.parts) - 1 - path.parts[::-1].index(model)
            found[str(Path(*path.parts[at + 1 :]))] = digest.lower()
        elif len(path.parts) == 1:
            found[path.name] = digest.lower()
    return found


def compare(directory: Path, sent: Mapping[str, str]) -> Compared:
    """
    Digest every file of a directory that was sent, and look for others.

    Raises:
        OSError: a file cannot be read.
    """
    there = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
    wrong = [name for name in sorted(there & sent.keys()) if _digest(directory / name) != sent[name]]
    return Compared(
        directory=directory,
        same=len(there & sent.keys()) - len(wrong),
        wrong=tuple(wrong),
        missing=tuple(sorted(sent.keys() - there)),
        unknown=tuple(sorted(there - sent.keys())),
    )


def judge_digests(compared: Iterable[Compared], *, unsigned: bool = False) -> Check:
    """
    Decide whether every model is what was sent.

    Args:
        compared: each model beside what was sent.
        unsigned: whether that is a bundle that anybody may have made, because no key is trusted here yet.
    """
    compared = tuple(compared)
    again = "copy it again from the bundle, and find out who changed it"
    for model in compared:
        if model.wrong:
            return DIGESTS.fail(
                f"{model.directory / model.wrong[0]} is not what was sent{_more(model.wrong)}", again
            )
        if model.missing:
            return DIGESTS.fail(
                f"{model.directory / model.missing[0]} is missing{_more(model.missing)}", again
            )
    for model in compared:
        if model.unknown:
            seen = f"{model.directory / model.unknown[0]} was not sent{_more(model.unknown)}"
            return DIGESTS.warn(seen, "find out where it comes from: the engine may read it")
    same = sum(model.same for model in compared)
    if unsigned:
        seen = f"{same} files are those of the bundle, and whose bundle it is was not asked"
        return DIGESTS.warn(seen, "write the keys you trust to bundle-keys.txt in the data directory")
    return DIGESTS.ok(f"{same} files are what was sent")


def _is_bundle(source: Path) -> bool:
    return source.is_dir() or source.suffix == ".tar"


def _from_bundle(
    source: Path, model: Path, trusted: Sequence[TrustedKey] | None, now: float
) -> dict[str, str]:
    bundle = open_bundle(source, trusted=trusted, now=now)
    places = model.parts, model.parent.parts
    for tree in bundle.trees():
        name = Path(tree.item.name).parts
        if tree.item.kind is Kind.MODEL and any(parts[-len(name) :] == name for parts in places):
            return {path: file.sha256 for path, file in tree.named_files().items()}
    return {}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _more(names: tuple[str, ...]) -> str:
    return f", nor {len(names) - 1} more" if len(names) > 1 else ""
