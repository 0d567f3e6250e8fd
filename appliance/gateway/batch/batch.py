"""
One batch: what was asked, how far it is, and which states may follow which.

    validating ─► in_progress ─► finalizing ─► completed
             └─►  cancelling  ─► cancelled

Besides, one that is open can fail, and one that is not finalizing can expire.  Pure; the names are
OpenAI's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

BATCH_PREFIX = "batch_"


class Status(StrEnum):
    """How far a batch is."""

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
"""Every state, and the states that may come after it."""
ENDED = frozenset(status for status, next_ones in FOLLOWS.items() if not next_ones)
OPEN = frozenset(FOLLOWS) - ENDED


def before(status: Status) -> frozenset[Status]:
    """The states from which `status` may be entered."""
    return frozenset(state for state, next_ones in FOLLOWS.items() if status in next_ones)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProblem:
    """Why a batch failed, of one line of its input or of all of it."""

    code: str
    message: str
    line: int | None = None
    """From 1."""
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    """Answered with a 2xx."""
    failed: int = 0
    """Answered with an error, or never begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch; times are Unix seconds."""

    batch_id: str
    """`batch_` and a ULID; where it is encrypted, the ULID is its key's as well."""
    tenant: str
    key_id: str
    """Of the API key that made it, under which every line runs."""
    gateway: str
    """Who runs it."""
    client: str
    """Class of the address it came from."""
    endpoint: str
    completion_window: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    sealed: bool
    """Whether what it leaves on disk is encrypted."""
    status: Status
    model: str | None = None
    """The one model all lines name, if there is one."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[BatchProblem, ...] = ()
    output_seconds: int
    """How long its output and error files are kept."""
    counts: Counts = Counts()
    created_at: int
    expires_at: int
    moments: Mapping[Status, int] = field(default_factory=dict)
    """When each later state was entered."""

    @property
    def ulid(self) -> str:
        """The part of its id that sorts by time."""
        return self.batch_id.removeprefix(BATCH_PREFIX)


def pick_next(waiting: list[Batch], running: Mapping[str, int]) -> Batch | None:
    """
    Choose which batch is run next: of the tenant that has the fewest running, the oldest.

    Args:
        waiting: batches that are not run yet.
        running: number of batches that are, by tenant.
    """
    return min(waiting, key=lambda batch: (running.get(batch.tenant, 0), batch.ulid), default=None)
