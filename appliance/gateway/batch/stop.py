"""
Why a batch ends before all of its lines are done, and what its tenant is told about the rest.
"""

from dataclasses import dataclass

from appliance.gateway.batch.batch import BatchProblem, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One reason."""

    status: Status
    """What the batch ends as."""
    code: str
    message: str
    """Of each line that was not run to its end, in the error file."""
    problem: BatchProblem | None = None
    """What the batch itself says."""
    keeps_outputs: bool = True
    """Whether what was done is given to the tenant."""


CANCELLED = Stop(
    status=Status.CANCELLED,
    code="batch_cancelled",
    message="This request was not run to its end: the batch was cancelled.",
)
EXPIRED = Stop(
    status=Status.EXPIRED,
    code="batch_expired",
    message="This request could not be run before the completion window ended.",
)
REVOKED = Stop(
    status=Status.FAILED,
    code="batch_failed",
    message="This request was not run to its end: the key of the batch opens nothing any more.",
    problem=BatchProblem(
        code="invalid_api_key", message="The key that made this batch was revoked or has expired."
    ),
)
ERASED = Stop(
    status=Status.FAILED,
    code="batch_failed",
    message="This request was not run to its end: its content was erased.",
    problem=BatchProblem(code="content_erased", message="The input of this batch was erased."),
    keeps_outputs=False,
)
