"""
Figures of one segment, from the arrival times of frames and the worker's own counts.

Load does not stop where a segment's measured part begins and ends, so that batches are full
throughout.  A request that reaches beyond it counts with the share of its frames that lie within.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from appliance.speculation.values import NO_STEPS, EngineReading, StepCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One request as its client saw it; times are of one monotonic clock, in seconds."""

    sent: float
    frames: tuple[float, ...]
    """When each frame with content arrived."""
    tokens: int
    """From the usage frame."""

    @property
    def first(self) -> float:
        """Time to first token, in seconds."""
        return self.frames[0] - self.sent

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first frame's; None for a single frame."""
        after = self.tokens * (1 - 1 / len(self.frames))
        return (self.frames[-1] - self.frames[0]) / after if after else None

    def tokens_between(self, begins: float, ends: float) -> float:
        """Tokens that arrived in a span, each frame taken to carry equally many."""
        return self.tokens * sum(begins <= at < ends for at in self.frames) / len(self.frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One measured segment."""

    seconds: float
    tokens: float
    requests: int
    """Requests that ended within."""
    ttft: float
    """Median time to first token, in seconds."""
    tpot: float
    """Median time per output token after that, in seconds."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: Mapping[tuple[int, int], StepCounters] = field(default_factory=dict)
    """Whole decode steps by (batch bucket, K), as the worker timed them."""

    @property
    def tokens_per_second(self) -> float:
        """Of all users together."""
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_user(self) -> float:
        """How fast a user's text streams: the inverse of the time per output token."""
        return 1 / self.tpot if self.tpot else 0.0


def figures_of(
    traces: Sequence[Trace],
    begins: float,
    ends: float,
    before: EngineReading | None = None,
    after: EngineReading | None = None,
) -> Figures:
    """
    Sum a segment up.

    Args:
        traces: every request that was sent, warm-up included.
        begins: where the measured part begins.
        ends: where it ends.
        before: the worker's counts at its beginning; None where it keeps none.
        after: the same at its end.

    Raises:
        ValueError: nothing arrived in the measured part.
    """
    seen = [trace for trace in traces if trace.tokens_between(begins, ends)]
    if not seen:
        message = "no token arrived while it was measured: give it more --seconds"
        raise ValueError(message)
    # Requests that end later ran, in part, while the batch was emptying.
    ended = [trace for trace in seen if trace.frames[-1] < ends] or seen
    answered = [trace for trace in seen if begins <= trace.frames[0] < ends] or ended
    figures = Figures(
        seconds=ends - begins,
        tokens=sum(trace.tokens_between(begins, ends) for trace in seen),
        requests=sum(begins <= trace.frames[-1] < ends for trace in seen),
        ttft=statistics.median(trace.first for trace in answered),
        tpot=statistics.median(per for trace in ended if (per := trace.per_token) is not None),
    )
    if before is None or after is None or before.epoch != after.epoch:
        return figures
    drafting = after.drafting.since(before.drafting)
    return Figures(
        seconds=figures.seconds,
        tokens=figures.tokens,
        requests=figures.requests,
        ttft=figures.ttft,
        tpot=figures.tpot,
        drafts=drafting.drafts if drafting else 0,
        draft_tokens=drafting.draft_tokens if drafting else 0,
        accepted_tokens=drafting.accepted_tokens if drafting else 0,
        steps={
            key: spent
            for key, counters in after.steps.items()
            if (spent := counters.since(before.steps.get(key, NO_STEPS))).steps
        },
    )


def acceptance_length(segments: Iterable[Figures]) -> float | None:
    """Mean tokens per draft with the bonus token over several segments; None without drafts."""
    drafts = accepted = 0
    for figures in segments:
        drafts, accepted = drafts + figures.drafts, accepted + figures.accepted_tokens
    return 1 + accepted / drafts if drafts else None


def steps_of(segments: Iterable[Figures]) -> dict[tuple[int, int], StepCounters]:
    """Steps of several segments together."""
    total: dict[tuple[int, int], StepCounters] = {}
    for figures in segments:
        for key, more in figures.steps.items():
            total[key] = total.get(key, NO_STEPS).plus(more)
    return total
