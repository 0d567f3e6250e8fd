"""
Stand-ins for what the plugin hooks into inside vLLM's engine: a clock, and a scheduler with its outputs.

As much of vLLM 0.32's `v1/core/sched/scheduler.py` and `async_scheduler.py` as the hooks see.  What it
shows beyond that is for tests to count by, in another way than the hooks do.
"""

from dataclasses import dataclass, field
from typing import Any

LOOKUP = (0, 3, 3, 3, 3, 3, 3, 1, 0)
"""Draft tokens by batch size, as vLLM expands `worker.draft_token_schedule`; index 0 is none."""


class FakeClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass
class DraftStats:
    """vLLM's `SpecDecodingStats`: one step's drafts."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class Stats:
    """vLLM's `SchedulerStats`."""

    spec_decoding_stats: DraftStats | None = None


@dataclass
class Tokens:
    """vLLM's `EngineCoreOutput`: what one request got."""

    new_token_ids: list[int]


@dataclass
class Outputs:
    """vLLM's `EngineCoreOutputs`: what the requests of one client got."""

    outputs: list[Tokens]
    scheduler_stats: Stats | None = None


@dataclass
class Step:
    """vLLM's `SchedulerOutput`."""

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_spec_tokens_to_schedule: int
    is_whole: bool
    """Not of vLLM: no prompt, and every request verifies as many draft tokens as it drafts next."""


class FakeScheduler:
    """Requests that decode for as long as they are there; their drafts are accepted as configured."""

    def __init__(self, lookup: tuple[int, ...] = LOOKUP, *, num_spec_tokens: int = 3) -> None:
        self.dynamic_sd_lookup = list(lookup)
        self.num_spec_tokens = num_spec_tokens
        self.log_stats = True
        self.disobeys = False
        """Whether it ignores its table, as another vLLM might."""
        self.prompts: dict[str, int] = {}
        """Requests, with the tokens of their prompts that are left to compute."""
        self.drafts: dict[str, int] = {}
        """Draft tokens that a request verifies at its next step."""

    def add(self, *requests: str, prompt: int = 5) -> None:
        """Add requests."""
        self.prompts |= dict.fromkeys(requests, prompt)

    def finish(self, *requests: str) -> None:
        """Remove requests."""
        for request in requests:
            del self.prompts[request]
            self.drafts.pop(request, None)

    def schedule(self, throttle_prefills: bool = False) -> Step:
        """Put every request into the next step."""
        batch = len(self.prompts)
        k = self.num_spec_tokens if self.disobeys or not batch else self.draft_tokens_for(batch)
        verified = {request: [-1] * count for request, count in self.drafts.items() if count}
        counts = {
            request: prompt or 1 + len(verified.get(request, ())) for request, prompt in self.prompts.items()
        }
        step = Step(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=verified,
            num_spec_tokens_to_schedule=k,
            is_whole=all(
                not prompt and len(verified.get(request, ())) == k for request, prompt in self.prompts.items()
            ),
        )
        self.prompts = dict.fromkeys(self.prompts, 0)
        self.drafts = dict.fromkeys(self.prompts, k)
        return step

    def draft_tokens_for(self, batch: int) -> int:
        return self.dynamic_sd_lookup[batch]

    def update_from_output(self, step: Step, accepted: int = 0) -> dict[int, Outputs]:
        """Give each request a token, and as many draft tokens as are accepted."""
        stats = DraftStats(
            num_draft_tokens_per_pos=[0] * self.num_spec_tokens,
            num_accepted_tokens_per_pos=[0] * self.num_spec_tokens,
        )
        outputs = []
        for request in step.num_scheduled_tokens:
            drafted = len(step.scheduled_spec_decode_tokens.get(request, ()))
            taken = min(accepted, drafted)
            outputs.append(Tokens(new_token_ids=[7] * (1 + taken)))
            stats.num_drafts += drafted > 0
            stats.num_draft_tokens += drafted
            stats.num_accepted_tokens += taken
            for position in range(drafted):
                stats.num_draft_tokens_per_pos[position] += 1
                stats.num_accepted_tokens_per_pos[position] += position < taken
        # vLLM makes no statistics of drafts in a step without any.
        told = Stats(spec_decoding_stats=stats if stats.num_drafts else None)
        return {0: Outputs(outputs=outputs, scheduler_stats=told)} if outputs else {}

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.prompts)


class FutureScheduler(FakeScheduler):
    """One whose table has a second axis, as proposed for vLLM: by batch size and context length."""

    def __init__(self) -> None:
        super().__init__()
        self.context = 0
        """Index of the context length in the table."""
        self.rows = [[k, min(k, 2), 0] for k in LOOKUP]
        self.dynamic_sd_lookup: Any = list(self.rows)

    def draft_tokens_for(self, batch: int) -> int:
        return self.rows[batch][self.context]


def work(
    scheduler: Any, clock: FakeClock, steps: int = 1, *, seconds: float = 0.01, accepted: int = 0
) -> None:
    """Let an engine make so many steps, one after the other, each of so many seconds."""
    for _ in range(steps):
        step = scheduler.schedule()
        clock.advance(seconds)
        scheduler.update_from_output(step, accepted)
