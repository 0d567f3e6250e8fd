"""
The input of the training process: lines of JSON on its standard input.

The first line is the job, then one line per sample, and the last holds their count; a stream that ends early
is rejected.  The training process never has access to the audit database, content keys or settings.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from appliance.drafts.training.training_recipe import TrainingRecipe
from appliance.drafts.training.windows import Text
from appliance.errors import DraftRefusedError

if TYPE_CHECKING:  # the training process must not load the audit database
    from appliance.drafts.harvest.dataset import Dataset


class SampleLike(Text, Protocol):
    @property
    def request_id(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    run: str
    target: str
    target_digest: str
    parent: str | None
    """Directory of the draft to start from; None to start from scratch."""
    parent_digest: str | None
    dataset: str
    """Digest of the data set's manifest."""
    recipe: TrainingRecipe
    device: str = "auto"
    corpus: str | None = None
    """File of general text."""
    corpus_digest: str | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change when a run resumes: everything but directories and device."""
        return {
            "target": self.target_digest,
            "parent": self.parent_digest,
            "dataset": self.dataset,
            "corpus": self.corpus_digest,
            "recipe": self.recipe.to_json(),
        }

    def in_directory(self, run: Path) -> Self:
        return replace(self, run=str(run))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        return cls(**{**content, "recipe": TrainingRecipe.from_json(content["recipe"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSample:
    request_id: str
    digest: str
    """Of its canonical form, as in the manifest."""
    held_out: bool
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSet:
    samples: tuple[JobSample, ...]
    missing: int
    """Requests of the data set that were erased since it was made."""

    @property
    def training(self) -> tuple[JobSample, ...]:
        return tuple(sample for sample in self.samples if not sample.held_out)

    @property
    def held_out(self) -> tuple[JobSample, ...]:
        return tuple(sample for sample in self.samples if sample.held_out)


def job_line(job: Job) -> str:
    return _line(asdict(job))


def sample_line(sample: SampleLike, *, digest: str, held_out: bool) -> str:
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
    return _line({"samples": samples, "missing": missing})


def read_samples(lines: Iterable[str]) -> TrainingSet:
    """Read what follows the job's line; raises DraftRefusedError if the sender stopped early."""
    samples: list[JobSample] = []
    for content in _objects(lines):
        if "samples" in content:
            if content["samples"] == len(samples):
                return TrainingSet(samples=tuple(samples), missing=int(content["missing"]))
            break
        mask = tuple(sign == "1" for sign in content.pop("loss_mask"))
        token_ids = tuple(content.pop("token_ids"))
        samples.append(JobSample(token_ids=token_ids, loss_mask=mask, **content))
    raise DraftRefusedError("the samples are incomplete; nothing was trained")


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.endswith("\n"):
            return
        yield json.loads(line)


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n"


def sample_lines(dataset: "Dataset") -> Iterator[str]:
    """Each sample is decrypted here and passed on through a pipe: none of them is written to disk."""
    digests = {entry.request_id: entry.digest for entry in dataset.manifest.samples}
    count = 0
    for held_out in (False, True):
        for sample in dataset.read(held_out):
            yield sample_line(sample, digest=digests[sample.request_id], held_out=held_out)
            count += 1
    yield end_line(samples=count, missing=dataset.missing)
