"""
Carry a plan out: switch, load, measure, and show how far it has come.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.speculation.appliances import Side
from benchmarks.speculation.load import BenchmarkError, Load, ask_once, drive
from benchmarks.speculation.plan import ADAPTIVE, Cell, Control, Kind, Mode, Plan
from benchmarks.speculation.summary import Learnt, Measured, parse_learnt
from benchmarks.speculation.traffic import (
    CHARACTERS_PER_TOKEN,
    PROMPTS,
    Prompt,
    Traffic,
    fitted_characters,
    long_texts,
    traffic_of,
)
from demo.training.corpus import Corpus


@dataclass(slots=True, kw_only=True)
class Records:
    """The measurements so far; they grow during a run, and survive its end."""

    measured: list[Measured] = field(default_factory=list)
    learnt: dict[Cell, tuple[Learnt, ...]] = field(default_factory=dict)
    engine: str = "unknown engine"


class Runner:
    """Carries a plan out on one appliance that speculates, and perhaps one that cannot."""

    def __init__(
        self, plan: Plan, *, speculative: Side, alone: Side | None, corpus: Corpus, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._speculative = speculative
        self._alone = alone
        self._corpus = corpus
        self._say = say
        self._serving: Side | None = None
        self._segments = 0

    async def run(self, records: Records, *, start: int = 0) -> None:
        """
        Measure every cell of the plan.

        Args:
            records: receives the measurements.
            start: how often the processes were started before, from which the numbers of rounds continue.

        Raises:
            BenchmarkError: it cannot continue; `records` keeps what was measured.
        """
        plan = self._plan
        for kind in plan.kinds:
            traffic = await self._traffic(kind)
            for cell in (cell for cell in plan.cells if cell.kind is kind):
                await self._cell(cell, traffic, records, start * plan.rounds)

    async def _cell(self, cell: Cell, traffic: Traffic, records: Records, earlier: int) -> None:
        plan = self._plan
        title = f"{cell.kind} t={cell.temperature:g} c={cell.concurrency}"
        if ADAPTIVE in plan.modes and plan.learn:
            self._say(f"{title}  the monitor learns for {plan.learn:g} s")
            await self._switch(ADAPTIVE)
            await drive(self._speculative.target, self._load(cell, traffic, 0, learn=True), _nothing)
        for number in range(earlier, earlier + plan.rounds):
            for mode in plan.order(number):
                side = await self._switch(mode)
                figures = await drive(side.target, self._load(cell, traffic, number), side.reading)
                records.measured.append(Measured(cell=cell, mode=mode, number=number, figures=figures))
                if mode == ADAPTIVE:
                    records.learnt[cell] = parse_learnt(await side.speculation())
                length = 1 + figures.accepted_tokens / figures.drafts if figures.drafts else None
                self._say(
                    f"{title}  round {number + 1}/{plan.restarts * plan.rounds}  {mode.name:<13}"
                    f"{figures.tokens_per_second:7.1f} tokens/s"
                    + (f", acceptance length {length:.2f}" if length is not None else "")
                )

    async def _switch(self, mode: Mode) -> Side:
        side = self._alone if mode.control is Control.TARGET_ALONE else self._speculative
        if side is None:
            message = "there is no worker that serves the target alone"
            raise BenchmarkError(message)
        if side is not self._serving:
            for other in (self._speculative, self._alone):
                if other is not None and other is not side:
                    other.pause()
            self._serving = side
            await side.resume()
        if mode.control is not Control.TARGET_ALONE:
            await side.choose(mode)
        return side

    def _load(self, cell: Cell, traffic: Traffic, number: int, *, learn: bool = False) -> Load:
        self._segments += 1
        plan = self._plan
        return Load(
            cell=cell,
            traffic=traffic,
            # Each round takes up the prompts elsewhere, each mode of a round at the same place.
            first=number * PROMPTS // max(1, plan.restarts * plan.rounds),
            warm_up=0.0 if learn else plan.warm_up,
            seconds=plan.learn if learn else plan.window(cell.kind),
            max_tokens=plan.max_tokens,
            name=f"segment-{self._segments}",
        )

    async def _traffic(self, kind: Kind) -> Traffic:
        plan = self._plan
        long = await self._long_prompts() if kind is Kind.LONG else ()
        return traffic_of(kind, self._corpus, shift_seconds=plan.shift_seconds, long=long)

    async def _long_prompts(self) -> tuple[Prompt, ...]:
        """Prompts near the context limit, cut by what the worker itself counts."""
        side = await self._switch(ADAPTIVE if ADAPTIVE in self._plan.modes else self._plan.modes[-1])
        if side.max_model_len is None:
            message = "the worker does not say how long a context may be: leave --kinds long out"
            raise BenchmarkError(message)
        limit = side.max_model_len - self._plan.max_tokens
        first = int(limit * CHARACTERS_PER_TOKEN)
        self._say("long  cutting prompts to the context limit")
        kept = []
        for short, whole in zip(
            long_texts(self._corpus, first), long_texts(self._corpus, 8 * limit), strict=True
        ):
            tokens = await ask_once(side.target, Prompt(text=short))
            fitted = Prompt(text=whole[: fitted_characters(len(short), tokens or 2 * limit, limit)])
            count = await ask_once(side.target, fitted)
            if count is not None and count <= limit:
                kept.append(fitted)
        if not kept:
            message = "no prompt could be cut to the context limit: leave --kinds long out"
            raise BenchmarkError(message)
        return tuple(kept)


async def _nothing() -> None:
    await asyncio.sleep(0)
