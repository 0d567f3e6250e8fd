"""The limits that apply to a request, and what each one measures."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from appliance.tenancy.allowances import Limits


class Measure(StrEnum):
    """What is limited; the names of the fields of `Limits`, and the metrics' label."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENT = "concurrent_requests"
    DAY = "tokens_per_day"
    MONTH = "tokens_per_month"

    @property
    def is_tokens(self) -> bool:
        """Whether a request takes one unit per token; otherwise it takes one unit."""
        return self in {Measure.TOKENS, Measure.DAY, Measure.MONTH}

    @property
    def is_budget(self) -> bool:
        """Whether it resets by the calendar."""
        return self in {Measure.DAY, Measure.MONTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    measure: Measure
    limit: int
    """Maximum units at once, in a minute or in a period."""
    model: str | None = None
    """The model it applies to; None for all models together."""

    @property
    def key(self) -> str:
        """Its name in the tenant's ledger."""
        return str(self.measure) if self.model is None else f"{self.measure}/{self.model}"


def quotas_of(limits: Limits) -> tuple[Quota, ...]:
    """Every limit that is set, those of single models last."""
    return (*_set_in(limits, None), *(
        quota for model, each in limits.by_model.items() for quota in _set_in(each, model)
    ))  # fmt: skip


def _set_in(limits: Limits, model: str | None) -> Iterator[Quota]:
    for measure in Measure:
        limit: int | None = getattr(limits, measure)
        if limit is not None:
            yield Quota(measure=measure, limit=limit, model=model)
