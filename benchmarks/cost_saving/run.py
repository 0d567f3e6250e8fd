"""
Drive one appliance: requests without drafts and with them in turn, and its own report after each.

The report is read while nothing runs, and only counts once it has compared exactly the tokens that the worker
gave with drafts: so that both sides speak of the same steps.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import aiohttp

from appliance.gateway.cost.saving import Steps, since
from benchmarks.cost_saving.estimate import (
    Comparison,
    Round,
    Saved,
    compare,
    drafted_of,
    read_saving,
    tokens_of,
)
from benchmarks.speculation.appliances import Side
from benchmarks.speculation.load import REQUEST_SECONDS, BenchmarkError, Target, ask, first_of
from benchmarks.speculation.plan import ADAPTIVE, Kind, Mode, fixed
from benchmarks.speculation.traffic import PROMPTS, Traffic, traffic_of
from demo.process import ApplianceProcess
from demo.training.corpus import load_corpus

WITHOUT = fixed(0)
PRICE_PER_HOUR = 3.6
ENVIRONMENT = {
    "APPLIANCE_LOG__LEVEL": "warning",
    "APPLIANCE_COST__FLUSH_SECONDS": "1",
    "APPLIANCE_COST__CURRENCY": "EUR",
    "APPLIANCE_COST__WORKER_PRICE_PER_HOUR": str(PRICE_PER_HOUR),
}
"""Settings of the appliance, and of the command that reports."""
VAGUE = 1.5
"""How many times the upper bound of what the target alone would take may be the lower one."""
SETTLE_SECONDS = 60.0
"""How long the report may take to have all steps: a look a second, a write a second, and a busy machine."""
AGAIN_SECONDS = 1.0
LEAST_ANSWERS = 2
"""Of each request in flight in a segment, however slow the machine is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    concurrency: tuple[int, ...] = (1, 4)
    rounds: int = 6
    most_rounds: int = 0
    """More rounds, up to so many, while bounds are so wide that half the saving or twice as much agrees."""
    seconds: float = 10.0
    """Length of a segment, to which requests that are in flight then are added."""
    learn: float = 20.0
    """Time that the monitor gets with each concurrency first; again and again while the report is vague."""
    learn_times: int = 4
    """At most."""
    max_tokens: int = 96

    @property
    def estimate_seconds(self) -> float:
        """About how long it takes, without starting the appliance."""
        return len(self.concurrency) * (self.learn + self.rounds * (2 * self.seconds + 12))


@dataclass(slots=True, kw_only=True)
class Found:
    """What has been found so far; it grows during a run, and survives its end."""

    engine: str = "unknown engine"
    comparisons: list[Comparison] = field(default_factory=list)


class Reporter:
    """`appliance cost report` of one data directory."""

    def __init__(self, data: Path, environment: Mapping[str, str]) -> None:
        self._data = data
        self._environment = {**os.environ, **environment}
        # Fixed, so that a run that goes past midnight or the end of a month has one report.
        self._first = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()

    async def saved(self) -> Saved:
        """
        The saving that it reports so far.

        Raises:
            BenchmarkError: it ends with an error.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "appliance", "cost", "report", "--json"),
            *("--from", self._first, "--data", str(self._data)),
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaint = await process.communicate()
        if process.returncode:
            message = f"`appliance cost report` ended with {process.returncode}: {complaint.decode().strip()}"
            raise BenchmarkError(message)
        return read_saving(json.loads(said))


class Driver:
    """Measures one running appliance; made by `connect`."""

    def __init__(self, side: Side, reporter: Reporter, plan: Plan, say: Callable[[str], None]) -> None:
        self._side, self._reporter, self._plan, self._say = side, reporter, plan, say
        self._segments = 0
        self._counted = 0
        """Tokens that the worker had given with drafts when the report was first read."""
        self._told = Saved()
        """The report when it was last read."""
        self._first = Saved()

    @classmethod
    async def connect(cls, process: ApplianceProcess, plan: Plan, say: Callable[[str], None]) -> "Driver":
        """
        Ask a ready appliance what it serves.

        Raises:
            BenchmarkError: it does not answer as one, or its worker counts no steps.
        """
        side = await Side.connect(process)
        driver = cls(side, Reporter(process.data, ENVIRONMENT), plan, say)
        driver._counted = tokens_of(drafted_of(await driver._steps()))
        driver._first = driver._told = await driver._reporter.saved()
        return driver

    async def run(self, found: Found) -> None:
        """
        Measure every concurrency.

        Args:
            found: what is added to.

        Raises:
            BenchmarkError: it cannot continue; `found` keeps what was measured.
        """
        traffic = traffic_of(Kind.CODE, load_corpus())
        found.engine = self._side.engine
        for concurrency in self._plan.concurrency:
            found.comparisons.append(await self._compare(concurrency, traffic))

    async def _compare(self, concurrency: int, traffic: Traffic) -> Comparison:
        for _time in range(self._plan.learn_times):
            self._say(f"concurrency {concurrency}: the monitor learns for {self._plan.learn:g} s")
            before = self._told
            await self._segment(ADAPTIVE, concurrency, traffic, 0, seconds=self._plan.learn)
            if (await self._settled()).since(before).spread < VAGUE:
                break
        rounds: list[Round] = []
        most = max(self._plan.rounds, self._plan.most_rounds)
        while True:
            rounds.append(await self._round(concurrency, traffic, len(rounds)))
            told = rounds[-1].told
            self._say(
                f"concurrency {concurrency}: round {len(rounds)}/{most}, the report saved "
                f"{told.seconds.mean:.2f} s ({told.seconds.low:.2f} to {told.seconds.high:.2f}) in "
                f"{told.spent:.2f} s with drafts"
            )
            if len(rounds) < self._plan.rounds:
                continue
            try:
                found = compare(concurrency, rounds, price=PRICE_PER_HOUR / 3600)
            except ValueError as error:
                raise BenchmarkError(str(error)) from None
            if found.is_sharp or len(rounds) >= most:
                return found

    async def _round(self, concurrency: int, traffic: Traffic, number: int) -> Round:
        # Every other round goes backwards, so that what drifts falls on both alike.
        order = (WITHOUT, ADAPTIVE) if number % 2 == 0 else (ADAPTIVE, WITHOUT)
        before = self._told
        # One right after the other; the report is waited for when both are over.
        found = {
            mode: await self._segment(mode, concurrency, traffic, number, seconds=self._plan.seconds)
            for mode in order
        }
        told = (await self._settled()).since(before)
        drafted = drafted_of(found[ADAPTIVE])
        if told.tokens != tokens_of(drafted):
            message = f"drafts were made outside of their segment: {told.tokens - tokens_of(drafted)} tokens"
            raise BenchmarkError(message)
        return Round(without=found[WITHOUT], drafted=drafted, told=told)

    async def _segment(
        self, mode: Mode, concurrency: int, traffic: Traffic, number: int, *, seconds: float
    ) -> Steps:
        """Every step from the first request of a segment to the end of its last."""
        plan = self._plan
        self._segments += 1
        await self._side.choose(mode)
        before = await self._steps()
        await keep_busy(
            self._side.target,
            traffic,
            concurrency=concurrency,
            # Both modes of a round take up the prompts at the same place.
            first=number * PROMPTS // max(1, plan.rounds),
            seconds=seconds,
            least=LEAST_ANSWERS * concurrency,
            max_tokens=plan.max_tokens,
            name=f"segment-{self._segments}",
        )
        return since(await self._steps(), before)

    async def _settled(self) -> Saved:
        """The report once it has compared all that was drafted."""
        counted = tokens_of(drafted_of(await self._steps())) - self._counted
        deadline = time.monotonic() + SETTLE_SECONDS
        while (told := await self._reporter.saved()).tokens - self._first.tokens < counted:
            if time.monotonic() > deadline:
                compared = told.tokens - self._first.tokens
                message = (
                    f"the report compared {compared} of {counted} tokens that were given with drafts, "
                    f"{SETTLE_SECONDS:.0f} seconds after the last: give it more --learn"
                )
                raise BenchmarkError(message)
            await asyncio.sleep(AGAIN_SECONDS)
        self._told = told
        return told

    async def _steps(self) -> Steps:
        reading = await self._side.reading()
        if reading is None:
            message = "the worker's plugin counts no steps, so there is nothing to compare with"
            raise BenchmarkError(message)
        return reading.steps


async def keep_busy(
    target: Target,
    traffic: Traffic,
    *,
    concurrency: int,
    first: int,
    seconds: float,
    least: int,
    max_tokens: int,
    name: str,
) -> None:
    """
    Keep this many requests in flight, for this long, and until this many were answered.

    Args:
        target: the gateway.
        traffic: what to send.
        concurrency: requests at once.
        first: number of the first prompt.
        seconds: how long, at least.
        least: answers; a machine that others use may be slow.
        max_tokens: length of each.
        name: differs from segment to segment, so that none finds what another left in the prefix cache.

    Raises:
        BenchmarkError: a request failed.
    """
    ends, numbers = time.perf_counter() + seconds, count(first)
    asked = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal asked
        while time.perf_counter() < ends or asked < least:
            asked += 1
            number = next(numbers)
            prompt = traffic.at(number, 0.0)
            salt = f"{name}-{number}"
            body = prompt.body(model=target.model, max_tokens=max_tokens, temperature=0.0, salt=salt)
            await ask(session, target, body)

    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for _seat in range(concurrency):
                group.create_task(client(session))
    except ExceptionGroup as failures:
        failure = first_of(failures)
        if isinstance(failure, aiohttp.ClientError | OSError | TimeoutError):
            message = f"a request failed: {type(failure).__name__} {failure}"
            raise BenchmarkError(message) from failure
        raise failure from None
