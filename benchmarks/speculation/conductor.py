"""
Sets the table of one worker: to a fixed K, or as the product's monitor decides.

The monitor is given its own segments only: counters and time of all others are subtracted, so that it
learns nothing from them.  The gateway beside it has to run with `monitor.control: observe`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from appliance.control.loop import policy_of
from appliance.errors import WorkerFailedError
from appliance.infra.settings import MonitorSettings
from appliance.monitor import decide
from appliance.serving.plugin_client import SpeculationClient, SpeculationCommand
from appliance.serving.worker import Worker
from appliance.speculation.state import MonitorState
from appliance.speculation.values import NO_STEPS, DraftTokenTable, EngineReading, Reason, SpeculationMode
from benchmarks.speculation.load import BenchmarkError
from benchmarks.speculation.plan import Mode

ANSWER_SECONDS = 60.0
"""The plugin answers between two steps, and a step may hold long prompts."""
PROBE_SECONDS = 3.0
"""Maximum time that a segment of the monitor is extended by a probe in flight, so that its price counts."""
POLL_SECONDS = 0.02


def without(reading: EngineReading, others: EngineReading) -> EngineReading:
    """
    A reading as if `others` had never been counted; both are of one engine, or differences of such.

    Raises:
        BenchmarkError: the engine has restarted.
    """
    drafting = reading.drafting.since(others.drafting)
    if reading.epoch != others.epoch or drafting is None:
        message = "the worker restarted while it was measured"
        raise BenchmarkError(message)
    steps = {
        kind: left
        for kind, counters in reading.steps.items()
        if (left := counters.since(others.steps.get(kind, NO_STEPS))).steps
    }
    return replace(
        reading,
        steps=MappingProxyType(steps),
        drafting=drafting,
        step_count=reading.step_count - others.step_count,
        busy_seconds=(reading.busy_seconds or 0.0) - (others.busy_seconds or 0.0),
        catch_up_seconds=reading.catch_up_seconds - others.catch_up_seconds,
    )


class Conductor:
    """Made by `start`."""

    def __init__(
        self, client: SpeculationClient, worker: Worker, settings: MonitorSettings, first: EngineReading
    ) -> None:
        self.choices = first.choices
        """Numbers of draft tokens the worker is prepared for."""
        self._client = client
        self._worker = worker
        self._last = first.largest_batch
        self._policy = policy_of(settings)
        self._interval = settings.interval_seconds
        self._state = MonitorState(mode=SpeculationMode.SPECULATIVE)
        self._command = SpeculationCommand(
            table=first.table, mode=SpeculationMode.SPECULATIVE, reason=Reason.TOO_FEW_DRAFTS
        )
        self._own: EngineReading | None = None
        """What was counted in the monitor's own segments."""
        self._seconds = 0.0
        """Time of the monitor's own segments."""
        self._due = 0.0

    @property
    def table(self) -> DraftTokenTable:
        """The monitor's table."""
        return self._command.table

    @classmethod
    async def start(cls, client: SpeculationClient, worker: Worker, settings: MonitorSettings) -> "Conductor":
        first = await client.read(worker, ANSWER_SECONDS)
        if not first.controllable:
            raise BenchmarkError(f"speculation cannot be controlled: {'; '.join(first.problems)}")
        return cls(client, worker, settings, first)

    async def switch(self, mode: Mode) -> EngineReading:
        """Apply a mode's table; effective at the worker's next step."""
        if mode.draft_tokens is None:
            return await self._apply(self._command)
        name = SpeculationMode.SPECULATIVE if mode.draft_tokens else SpeculationMode.TARGET_ONLY
        table = ((1, self._last, mode.draft_tokens),)
        return await self._apply(SpeculationCommand(table=table, mode=name, reason=Reason.OPERATOR_OVERRIDE))

    async def read(self) -> EngineReading:
        try:
            return await self._client.read(self._worker, ANSWER_SECONDS)
        except WorkerFailedError as error:
            raise BenchmarkError(f"the worker does not report its counters: {error}") from error

    async def adapt(
        self, start: EngineReading, seconds: float, done: Callable[[], bool] = lambda: False
    ) -> tuple[EngineReading, bool]:
        """
        Let the monitor decide; returns the reading at the end, and whether a probe in flight put it off.

        Args:
            start: the reading at the beginning.
            seconds: how long.
            done: called after each decision; ends it earlier.
        """
        others = start if self._own is None else without(start, self._own)
        others = replace(others, epoch=start.epoch)
        began = time.perf_counter()

        def elapsed() -> float:
            return time.perf_counter() - began

        while (left := seconds - elapsed()) > 0:
            wait = max(0.0, self._due - self._seconds - elapsed())
            await asyncio.sleep(min(left, wait))
            if self._seconds + elapsed() >= self._due:
                await self._tick(without(await self.read(), others), self._seconds + elapsed())
                if done():
                    break
        reading = await self.read()
        is_extended = reading.is_probing
        while reading.is_probing and elapsed() < seconds + PROBE_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
            reading = await self.read()
        self._own = without(reading, others)
        self._seconds += elapsed()
        return reading, is_extended

    async def _tick(self, reading: EngineReading, now: float) -> None:
        self._due = now + self._interval
        self._state, decision = decide(self._state, reading, self._policy, now)
        command = SpeculationCommand(table=decision.table, mode=decision.mode, reason=decision.basis)
        if not decision.table or (decision.probe and not decision.starts_probe):
            return  # a table would end the probe in flight
        if command != self._command or decision.starts_probe:
            self._command = command
            await self._apply(replace(command, probe=decision.probe))

    async def _apply(self, command: SpeculationCommand) -> EngineReading:
        try:
            return await self._client.apply(self._worker, command, ANSWER_SECONDS)
        except WorkerFailedError as error:
            raise BenchmarkError(f"the worker did not apply a table: {error}") from error
