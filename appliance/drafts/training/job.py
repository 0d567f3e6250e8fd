"""
What the process that trains is told, and the samples it is handed: lines of JSON on its standard input.

The first line is the job, then comes one line for each sample, and the last says how many there were; a
stream that ends before is no data set.  The process that trains never sees the audit database, the keys to
kept content or the settings.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from appliance.drafts.training.recipe import Recipe
from appliance.drafts.training.windows import Text
from appliance.errors import DraftRefusedError


class SampleLike(Text, Protocol):
    """A sample of a data set, as far as training reads it."""

    @property
    def request_id(self) -> str:
        """Of the request it was."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training."""

    run: str
    """Directory of the run."""
    target: str
    """Directory of the target."""
    target_digest: str
    parent: str | None
    """Directory of the draft to start from; None to start from nothing."""
    parent_digest: str | None
    dataset: str
    """Digest of the data set's manifest."""
    recipe: Recipe
    device: str = "auto"
    corpus: str | None = None
    """File of general text."""
    corpus_digest: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What may not change between two runs of the same training: neither directories nor the device."""
        return {
            "target": self.target_digest,
            "parent": self.parent_digest,
            "dataset": self.dataset,
            "corpus": self.corpus_digest,
            "recipe": self.recipe.to_json(),
        }

    def in_directory(self, run: Path) -> Self:
        """The same job, with the directory of its run."""
        return replace(self, run=str(run))

    def to_json(self) -> dict[str, Any]:
        """The job as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read it back."""
        return cls(**{**content, "recipe": Recipe.from_json(content["recipe"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSample:
    """A sample as the process that trains has it."""

    request_id: str
    digest: str
    """Of its canonical form, as the manifest has it."""
    held_out: bool
    """Whether it is only measured on."""
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """All there is to train on."""

    samples: tuple[GivenSample, ...]
    missing: int
    """Requests of the data set that have been erased since it was made."""

    @property
    def training(self) -> tuple[GivenSample, ...]:
        """What is learnt from."""
        return tuple(sample for sample in self.samples if not sample.held_out)

    @property
    def held_out(self) -> tuple[GivenSample, ...]:
        """What is only measured on."""
        return tuple(sample for sample in self.samples if sample.held_out)


def job_line(job: Job) -> str:
    """The first line."""
    return _line(job.to_json())


def sample_line(sample: SampleLike, *, digest: str, held_out: bool) -> str:
    """One sample as a line."""
    return _line(
        {
            "request_id": sample.request_id,
            "digest": digest,
            "held_out": held_out,
            "token_ids": list(sample.token_ids),
            "loss_mask": "".join("1" if counts else "0" for counts in sample.loss_mask),
        }
    )


def end_line(*, samples: int, missing: int) -> str:
    """The last line."""
    return _line({"samples": samples, "missing": missing})


def read_given(lines: Iterable[str]) -> Given:
    """
    Read what follows the first line.

    Raises:
        DraftRefusedError: whoever sent it stopped halfway.
    """
    samples: list[GivenSample] = []
    for content in _contents(lines):
        if "samples" in content:
            if content["samples"] == len(samples):
                return Given(samples=tuple(samples), missing=int(content["missing"]))
            break
        mask = tuple(sign == "1" for sign in content.pop("loss_mask"))
        token_ids = tuple(content.pop("token_ids"))
        samples.append(GivenSample(token_ids=token_ids, loss_mask=mask, **content))
    raise DraftRefusedError("the samples did not arrive whole; nothing was trained")


def _contents(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.endswith("\n"):
            return
        yield json.loads(line)


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n"
