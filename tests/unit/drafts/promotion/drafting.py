"""Random drafts as an engine counts them; requests differ in acceptance, drafts of one request share it."""

import math
import random
from dataclasses import dataclass, field
from types import MappingProxyType

from appliance.speculation.values import EngineReading, SpecDecodeCounters, StepCounters

K = 3
DRAFTS_PER_REQUEST = 30
STEP_SECONDS = 0.03


@dataclass
class Side:
    """One worker that drafts."""

    random: random.Random
    rate: float
    """Chance of a draft token whose predecessors were accepted, on average."""
    step_seconds: float = STEP_SECONDS
    spread: float = 0.15
    """How far requests differ in that chance."""
    epoch: str = "1"
    bucket: int = 1
    drafts: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * K)
    drafted: list[int] = field(default_factory=lambda: [0] * K)
    seconds: float = 0.0
    squared: float = 0.0
    tokens: int = 0

    def request(self) -> None:
        """Serve one request; the accepted tokens of its drafts are drawn by the normal approximation."""
        luck = min(0.98, max(0.02, self.rate + self.random.uniform(-self.spread, self.spread)))
        count, mean, noise = DRAFTS_PER_REQUEST, self.step_seconds, self.step_seconds / 10
        self.drafts += count
        self.seconds += self.random.gauss(count * mean, math.sqrt(count) * noise)
        self.squared += count * (mean**2 + noise**2)
        self.tokens += count
        alive = count
        for position in range(K):
            drawn = self.random.gauss(alive * luck, math.sqrt(alive * luck * (1 - luck)))
            alive = min(alive, max(0, round(drawn)))
            self.drafted[position] += count
            self.accepted[position] += alive
            self.tokens += alive

    def restart(self) -> None:
        self.epoch += "x"
        self.drafts = self.tokens = 0
        self.seconds = self.squared = 0.0
        self.accepted, self.drafted = [0] * K, [0] * K

    @property
    def reading(self) -> EngineReading:
        cell = StepCounters(
            steps=self.drafts,
            seconds=self.seconds,
            seconds_squared=self.squared,
            requests=self.drafts,
            tokens=self.tokens,
        )
        return EngineReading(
            controllable=True,
            epoch=self.epoch,
            choices=(0, K),
            steps=MappingProxyType({(self.bucket, K): cell}),
            drafting=SpecDecodeCounters(
                drafts=self.drafts,
                draft_tokens=sum(self.drafted),
                accepted_tokens=sum(self.accepted),
                accepted_per_position=tuple(self.accepted),
                drafted_per_position=tuple(self.drafted),
            ),
        )
