"""
One appliance whose worker is controlled from here, under a load that does not stop between segments.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET, load_settings
from appliance.speculation.values import StepCounters, draft_tokens_at
from benchmarks.speculation.appliances import Side
from benchmarks.speculation.conductor import Conductor, without
from benchmarks.speculation.hindsight import Trace
from benchmarks.speculation.load import BenchmarkError, Stream, long_prompts
from benchmarks.speculation.plan import ADAPTIVE, Cell, Kind, Mode, Plan, fixed, order_of
from benchmarks.speculation.provenance import hardware
from benchmarks.speculation.traffic import Prompt, Traffic, traffic_of
from demo.process import ApplianceProcess, StartError
from demo.training.corpus import load_corpus

SETTLE_SECONDS = 0.3
SETTLE_STEPS = 2
"""Steps after a switch that are reported apart: the first with drafts replays the deferred prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    mode: str
    after: str
    """The mode before it."""
    seconds: float
    tokens: int
    settle_seconds: float
    """From the switch to the measured part."""
    settle_tokens: int
    drafts: int = 0
    accepted_tokens: int = 0
    draft_tokens: float = 0.0
    """Mean K of its decode steps."""
    decode_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of its decode steps by the name of the fixed mode with their K."""
    catch_up_seconds: float = 0.0
    """By which steps took longer because the draft caught up."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Bench:
    """Made by `open_bench`."""

    def __init__(
        self, conductor: Conductor, stream: Stream, traffic: Mapping[Kind, Traffic], plan: Plan
    ) -> None:
        self.modes = (ADAPTIVE, *map(fixed, conductor.choices))
        self._conductor = conductor
        self._stream = stream
        self._traffic = traffic
        self._plan = plan
        self._after = ADAPTIVE
        self.steps: Mapping[tuple[int, int], StepCounters] = {}
        """Of the last segment, by batch bucket and K."""

    def load(self, cell: Cell) -> None:
        """Change the load; running requests end as they are."""
        self._stream.change(traffic=self._traffic[cell.kind], concurrency=cell.concurrency)

    async def round(self, cell: Cell, number: int) -> tuple[Segment, ...]:
        """Every mode once, under the load of the cell, with the same prompts."""
        window, first = self._plan.window(cell.kind), number * cell.concurrency
        order = order_of(self.modes, cell, number)
        return tuple([await self.segment(mode, window, first_prompt=first) for mode in order])

    async def segment(self, mode: Mode, seconds: float, *, first_prompt: int | None = None) -> Segment:
        self._stream.mark(first_prompt)
        switch = await self._conductor.switch(mode)
        switched = time.perf_counter()
        await asyncio.sleep(SETTLE_SECONDS)
        start = await self._conductor.read()
        while start.step_count < switch.step_count + SETTLE_STEPS:
            await asyncio.sleep(SETTLE_SECONDS / 10)
            start = await self._conductor.read()
        begun = time.perf_counter()
        is_extended = False
        if mode == ADAPTIVE:
            end, is_extended = await self._conductor.adapt(start, seconds)
        else:
            await asyncio.sleep(seconds)
            end = await self._conductor.read()
        # A reading waits for a step, which may hold a long prompt and yield no token: no part of the segment.
        ended = time.perf_counter() if is_extended else begun + seconds
        spent = without(end, start)
        self.steps = spent.steps
        steps = sum(counters.steps for counters in spent.steps.values())
        decode_seconds = dict.fromkeys((fixed(k).name for _, k in spent.steps), 0.0)
        for (_, k), counters in spent.steps.items():
            decode_seconds[fixed(k).name] += counters.seconds
        after, self._after = self._after, mode
        return Segment(
            mode=mode.name,
            after=after.name,
            seconds=ended - begun,
            tokens=self._stream.tokens(begun, ended),
            settle_seconds=begun - switched,
            settle_tokens=self._stream.tokens(switched, begun),
            drafts=spent.drafting.drafts,
            accepted_tokens=spent.drafting.accepted_tokens,
            draft_tokens=sum(k * each.steps for (_, k), each in spent.steps.items()) / max(1, steps),
            decode_seconds=decode_seconds,
            catch_up_seconds=spent.catch_up_seconds,
        )

    async def follow(
        self, before: Cell, after: Cell, seconds: float, settled: Callable[[Trace, float], bool]
    ) -> tuple[int, Trace]:
        """
        Change the load and let the monitor decide.

        Args:
            before: the load until now.
            after: the load from now on.
            seconds: how long.
            settled: ends it earlier, by the trace and the seconds since the change.

        Returns:
            K for `before` at the change; the trace of K for `after`, closed by its end.
        """
        start = await self._conductor.switch(ADAPTIVE)
        # Decisions are made once a tick, and traffic changes at any time.
        start, _ = await self._conductor.adapt(start, random.uniform(0, 1))
        self.load(after)
        began = time.perf_counter()
        k_before, trace = self._draft_tokens(before), [(0.0, self._draft_tokens(after))]

        def done() -> bool:
            now, k = time.perf_counter() - began, self._draft_tokens(after)
            if k != trace[-1][1]:
                trace.append((now, k))
            return settled(trace, now)

        await self._conductor.adapt(start, seconds, done)
        return k_before, [*trace, (time.perf_counter() - began, trace[-1][1])]

    def _draft_tokens(self, cell: Cell) -> int:
        """K of the monitor's table at a cell's batch size."""
        return draft_tokens_at(self._conductor.table, cell.concurrency)


@asynccontextmanager
async def open_bench(appliance: ApplianceProcess, plan: Plan, kinds: Sequence[Kind]) -> AsyncIterator[Bench]:
    """Requests are sent within the context, at first those of the first kind, one at a time."""
    side, corpus = await Side.connect(appliance), load_corpus()
    long: tuple[Prompt, ...] = ()
    if Kind.LONG in kinds:
        long = await long_prompts(side.target, side.max_model_len - 2 * plan.answer_tokens, corpus)
    traffic = {kind: traffic_of(kind, corpus, turn_seconds=plan.turn_seconds, long=long) for kind in kinds}
    async with side.plugin() as client:
        conductor = await Conductor.start(client, side.worker, load_settings(environment={}).monitor)
        stream = Stream(side.target, traffic[kinds[0]], concurrency=1, answer_tokens=plan.answer_tokens)
        async with stream.running():
            yield Bench(conductor, stream, traffic, plan)


@contextmanager
def appliance_of(
    options: argparse.Namespace, *, draft: bool = True, control: str = "observe"
) -> Iterator[ApplianceProcess]:
    """An appliance that by default leaves control of its worker to the caller."""
    environment = {
        "APPLIANCE_LOG__LEVEL": "warning",
        "APPLIANCE_MONITOR__CONTROL": control,
        "APPLIANCE_WORKER__DRAFT_TOKENS": str(options.draft_tokens),
    }
    arguments = ("--draft", str(options.draft)) if draft else ("--no-draft",)
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
        ApplianceProcess(
            *("up", "--model", str(options.model), *arguments), data=Path(scratch), environment=environment
        ) as appliance,
    ):
        yield appliance


def add_options(parser: argparse.ArgumentParser) -> None:
    """What resumable benchmarks have; those of the plan have its names."""
    usual, add = Plan(), parser.add_argument
    add("--minutes", type=float, default=inf, help="of this sitting; 0 reports only (default: no limit)")
    add("--state", type=Path, help="file of what was measured (default: in results, by commit)")
    add("--seconds", type=float, default=usual.seconds, help="of a segment (default %(default)g)")
    add(
        "--turn-seconds",
        type=float,
        default=usual.turn_seconds,
        help="of one of two turns (default %(default)g)",
    )
    add_load_options(parser)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    usual, add = Plan(), parser.add_argument
    add("--learn", type=float, default=usual.learn, help="seconds for the monitor (default %(default)g)")
    add("--answer-tokens", type=count_of, default=usual.answer_tokens, help="mean (default %(default)d)")
    add("--draft-tokens", type=count_of, default=usual.draft_tokens, help="largest K (default %(default)d)")
    add("--model", type=Path, default=DEMO_TARGET, help="directory of the target (default: the demo's)")
    add("--draft", type=Path, default=DEMO_DRAFT, help="directory of the draft (default: the demo's)")


def plan_of(options: argparse.Namespace) -> Plan:
    return Plan(**{name: getattr(options, name) for name in asdict(Plan())})


def head_of(options: argparse.Namespace) -> dict[str, Any]:
    """What all sittings of one file of results agree in."""
    pair = f"{options.model.name} with {options.draft.name}"
    return {"plan": asdict(plan_of(options)), "pair": pair, "hardware": hardware()}


def count_of(text: str) -> int:
    if (count := int(text)) < 1:
        message = f"{text} is not 1 or more"
        raise argparse.ArgumentTypeError(message)
    return count


def conduct(work: Callable[[], None]) -> str:
    """Do the work of one sitting; returns what ended it early, if anything."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work()
    except KeyboardInterrupt:
        return "stopped early"
    except (BenchmarkError, StartError) as error:
        return str(error)
    return ""


def say(line: str) -> None:
    print(line, flush=True)
