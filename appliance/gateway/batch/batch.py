"""
Batches and files as values, the states of a batch, and why a batch ends early.

    validating ─► in_progress ─► finalizing ─► completed
             └─►  cancelling  ─► cancelled

An open batch can also fail; one that is not finalizing can expire.  Pure; the names are OpenAI's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

BATCH_PREFIX = "batch_"


class Status(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


FOLLOWS: Mapping[Status, frozenset[Status]] = MappingProxyType(
    {
        Status.VALIDATING: frozenset(
            {Status.IN_PROGRESS, Status.FAILED, Status.EXPIRED, Status.CANCELLING, Status.CANCELLED}
        ),
        Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.FAILED, Status.EXPIRED, Status.CANCELLING}),
        Status.FINALIZING: frozenset({Status.COMPLETED, Status.FAILED}),
        Status.CANCELLING: frozenset({Status.CANCELLED, Status.FAILED, Status.EXPIRED}),
        Status.COMPLETED: frozenset(),
        Status.FAILED: frozenset(),
        Status.EXPIRED: frozenset(),
        Status.CANCELLED: frozenset(),
    }
)
"""The states that may follow each state."""
ENDED = frozenset(status for status, next_ones in FOLLOWS.items() if not next_ones)
OPEN = frozenset(FOLLOWS) - ENDED


def before(status: Status) -> frozenset[Status]:
    """The states from which `status` may be entered."""
    return frozenset(state for state, next_ones in FOLLOWS.items() if status in next_ones)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProblem:
    """Of one line of its input, or of all of it."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    total: int = 0
    completed: int = 0  # answered with a 2xx
    failed: int = 0  # answered with an error, or never started


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Times are Unix seconds."""

    batch_id: str  # `batch_` and a ULID; if it is encrypted, also the id of its key
    tenant: str
    key_id: str  # of the API key that created it, under which every line runs
    gateway: str  # runs it
    client: str  # class of the client's address
    endpoint: str
    completion_window: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    sealed: bool  # whether its results and outputs are encrypted on disk
    status: Status
    model: str | None = None  # if all lines name the same one
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[BatchProblem, ...] = ()
    output_seconds: int  # retention of its output and error files
    counts: Counts = Counts()
    created_at: int
    expires_at: int
    moments: Mapping[Status, int] = field(default_factory=dict)  # when each later state was entered

    @property
    def ulid(self) -> str:
        return self.batch_id.removeprefix(BATCH_PREFIX)


def pick_next(waiting: list[Batch], running: Mapping[str, int]) -> Batch | None:
    """The oldest waiting batch of the tenant with the fewest running batches; `running` counts by tenant."""
    return min(waiting, key=lambda batch: (running.get(batch.tenant, 0), batch.ulid), default=None)


FILE_PREFIX = "file-"
LONGEST_FILENAME = 255


class FilePurpose(StrEnum):
    BATCH = "batch"  # requests, sent by the tenant
    BATCH_OUTPUT = "batch_output"  # results, written by the gateway


class Deleted(StrEnum):
    """Why a file was removed; also the reason in its `file.deleted` entry."""

    DELETED = "deleted"
    EXPIRED = "expired"
    ERASED = "erased"  # an operator erased the tenant's content
    REFUSED = "refused"  # its upload was too late for what it had reserved of the tenant's storage quota


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    file_id: str  # `file-` and a ULID; if it is encrypted, also the id of its key
    tenant: str
    gateway: str  # its directory has the bytes
    filename: str  # from the client, for display; never used as a path
    purpose: FilePurpose
    size: int  # bytes, as the tenant sees them
    sealed: bool  # whether the bytes are encrypted on disk, under the file's own key
    created_at: int
    expires_at: int  # Unix seconds, both

    @property
    def ulid(self) -> str:
        return self.file_id.removeprefix(FILE_PREFIX)


def clean_filename(name: str) -> str:
    last = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(character for character in last if character.isprintable())
    return kept[:LONGEST_FILENAME] or "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReason:
    """Why a batch ends before all of its lines are done."""

    status: Status  # the batch's last state
    code: str
    message: str  # for each unfinished line, in the error file
    problem: BatchProblem | None = None  # in the batch's `errors`
    keeps_outputs: bool = True  # whether the tenant gets the finished results


CANCELLED = StopReason(
    status=Status.CANCELLED,
    code="batch_cancelled",
    message="This request was not completed: the batch was cancelled.",
)
EXPIRED = StopReason(
    status=Status.EXPIRED,
    code="batch_expired",
    message="This request could not be run before the completion window ended.",
)
REVOKED = StopReason(
    status=Status.FAILED,
    code="batch_failed",
    message="This request was not completed: the API key of the batch is no longer valid.",
    problem=BatchProblem(
        code="invalid_api_key", message="The API key that created this batch was revoked or has expired."
    ),
)
ERASED = StopReason(
    status=Status.FAILED,
    code="batch_failed",
    message="This request was not completed: its content was erased.",
    problem=BatchProblem(code="content_erased", message="The input of this batch was erased."),
    keeps_outputs=False,
)
