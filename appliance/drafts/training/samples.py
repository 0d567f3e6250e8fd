"""
A data set as the lines that the process that trains is handed.

The samples are decrypted one by one, in the process that may, and handed on through a pipe: none of them
touches a disk.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from appliance.drafts.training.job import SampleLike, end_line, sample_line


class EntryLike(Protocol):
    """What a manifest says of a sample, as far as training reads it."""

    @property
    def request_id(self) -> str:
        """Of the request it was."""
        ...

    @property
    def digest(self) -> str:
        """Of its canonical form."""
        ...


class ManifestLike(Protocol):
    """The manifest of a data set."""

    @property
    def samples(self) -> Iterable[EntryLike]:
        """All that was taken."""
        ...


class DatasetLike(Protocol):
    """A data set that is open."""

    @property
    def manifest(self) -> ManifestLike:
        """What was taken."""
        ...

    @property
    def missing(self) -> int:
        """Samples that turned out erased while it was read."""
        ...

    def read(self, held_out: bool) -> Iterator[SampleLike]:  # noqa: FBT001 - the data set's own signature
        """Samples to train on, or those to measure on."""
        ...


def sample_lines(dataset: DatasetLike) -> Iterator[str]:
    """
    Hand out every sample that is still there, and last how many they were.

    Raises:
        DraftRefusedError: one is not what the manifest says.
    """
    digests = {entry.request_id: entry.digest for entry in dataset.manifest.samples}
    count = 0
    for held_out in (False, True):
        for sample in dataset.read(held_out):
            yield sample_line(sample, digest=digests[sample.request_id], held_out=held_out)
            count += 1
    yield end_line(samples=count, missing=dataset.missing)
