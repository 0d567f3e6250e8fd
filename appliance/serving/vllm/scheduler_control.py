"""
Control and measure one scheduler of vLLM, from inside the engine's own loop.

*Control*: at every step the scheduler looks up the number of draft tokens (K) for the batch size in a table,
which is rewritten in place (`draft_token_lookup`).  *Measure*: time and tokens of each kind of step, by batch
bucket and K.

A probe is a list of (K, steps), counted here, after which the table is in force again: if the control loop
that requested it dies meanwhile, nothing is left behind.

The hooks run in the thread that decodes, so each is a few additions; `hook_seconds` in the answer is their
cost.  Commands come from the thread of the listener: a lock keeps a command from changing the table within
`schedule`, and a reading consistent; it is held for nothing else, and no input or output happens under it.
Fails towards vLLM's own behaviour: a hook that raises removes all hooks, restores the table that vLLM was
started with, and reports it.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from appliance.infra.settings import process_environment
from appliance.serving.vllm.draft_token_lookup import DraftTokenLookup, find_table_problem
from appliance.serving.worker_protocol import EXPECTATION
from appliance.speculation.values import SETTLE_SECONDS

STALL = 10.0
"""A step that takes this many times the mean of its kind measured the machine, not the model."""
STALL_AFTER = 16
"""Steps of a kind before its mean is used for that."""
LARGEST_PROBE = 4096
COMMAND_SECONDS = 5.0
"""Maximum time a command waits for a step that is being scheduled."""
NOTHING: Mapping[str, str] = MappingProxyType({})

Clock = Callable[[], float]


def find_problems(scheduler: Any) -> list[str]:  # noqa: ANN401 - a scheduler of vLLM
    """Why this scheduler cannot be controlled; empty if it can."""
    problems = [
        f"the scheduler has no {name}"
        for name in ("schedule", "update_from_output", "has_unfinished_requests")
        if not callable(getattr(scheduler, name, None))
    ]
    if not getattr(scheduler, "num_spec_tokens", 0):
        return [*problems, "the engine was started without a draft"]
    if problem := find_table_problem(getattr(scheduler, "dynamic_sd_lookup", None)):
        problems.append(problem)
    if not getattr(scheduler, "log_stats", False):
        problems.append("the engine's statistics are off")
    return problems


class Cell:
    __slots__ = ("requests", "seconds", "seconds_squared", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = self.requests = self.tokens = 0
        self.seconds = self.seconds_squared = 0.0


class SchedulerControl:
    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 - a scheduler of vLLM
        clock: Clock = time.perf_counter,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._expected = _promised(process_environment() if environment is None else environment)
        self._scheduler = scheduler
        self._clock = clock
        self._lookup = DraftTokenLookup(scheduler.dynamic_sd_lookup)
        self._table = self._lookup.initial()
        self._choices = self._lookup.choices
        self._positions = int(scheduler.num_spec_tokens)
        self._epoch = os.urandom(8).hex()
        self._label: dict[str, str | None] = {"mode": None, "reason": None}
        self._probe: list[list[int]] = []
        self._cells: dict[tuple[int, int], Cell] = {}
        self._drafts = self._draft_tokens = self._accepted = 0
        self._drafted_at = [0] * self._positions
        self._accepted_at = [0] * self._positions
        self._idle = True
        self._began = 0.0
        self.draft_tokens: int | None = None
        """Draft tokens of the step scheduled last; None before the first, or once the hooks are removed."""
        self._batch = self._steps = self._stalls = 0
        self._counted_k: int | None = None
        self._changed_at = 0.0
        """When the first step with another K than the one before it ended."""
        self._hook_seconds = self._busy_seconds = self._catch_up_seconds = 0.0
        self._problems: list[str] = []
        self._lock = threading.Lock()
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        scheduler.schedule = self._hooked_schedule
        scheduler.update_from_output = self._hooked_update

    @staticmethod
    def cannot(problems: list[str], engine: str, missing: Mapping[str, str] = NOTHING) -> str:
        answer = {"controllable": False, "problems": problems, "engine": engine, "epoch": ""}
        return json.dumps(answer | {"missing_capabilities": dict(missing)})

    def command(self, text: str, engine: str, missing: Mapping[str, str] = NOTHING) -> str:
        """
        Carry out one command and answer with all measurements, and the `missing` capabilities.

        `text` is JSON: `{}` for a reading only; `table` as [[first, last, K], ...] from batch size 1 on,
        `mode` and `reason` to be repeated in readings, `probe` as [[K, steps], ...].  Safe in any thread;
        TimeoutError if the scheduler is stuck.
        """
        try:
            command = json.loads(text)
        except (ValueError, RecursionError) as error:
            return _refused(error)
        if not self._lock.acquire(timeout=COMMAND_SECONDS):
            raise TimeoutError(f"the engine did not answer within {COMMAND_SECONDS:g} s")
        try:
            self._apply(command)
            answer = self._answer(engine)
        except Exception as error:  # noqa: BLE001 - a bad command must not affect the engine
            return _refused(error)
        finally:
            self._lock.release()
        return json.dumps(answer | {"missing_capabilities": dict(missing)})

    def _apply(self, command: dict[str, Any]) -> None:
        table = self._expand(command["table"]) if "table" in command else None
        probe = [[int(k), int(steps)] for k, steps in command.get("probe", ())]
        if command:
            self._check(table, probe)
        if table is not None:
            self._table = table
            self._label = {"mode": command.get("mode"), "reason": command.get("reason")}
        if table is not None or "probe" in command:
            self._probe = probe
            self._fill()

    def _check(self, table: list[int] | None, probe: list[list[int]]) -> None:
        if self._problems:
            raise ValueError(self._problems[0])
        unknown = {*(table or ())[1:], *(k for k, _steps in probe)}.difference(self._choices)
        if unknown:
            raise ValueError(f"{sorted(unknown)} draft tokens are not among {self._choices}")
        if sum(steps for _k, steps in probe) > LARGEST_PROBE or any(steps < 1 for _k, steps in probe):
            raise ValueError(f"a probe has between 1 and {LARGEST_PROBE} steps")

    def _expand(self, spans: list[list[int]]) -> list[int]:
        table, expected = [0], 1
        for first, last, k in spans:
            if first != expected or last < first:
                raise ValueError(f"the range {first} to {last} does not follow batch size {expected - 1}")
            table += [int(k)] * (min(last, self._lookup.largest_batch) - first + 1)
            expected = last + 1
        if len(table) < 2:  # noqa: PLR2004 - index 0 is no batch size
            raise ValueError("the table has no range")
        return table + [table[-1]] * (self._lookup.largest_batch + 1 - len(table))

    def _fill(self) -> None:
        """Write the probe's K, or else the table, into the lists that the scheduler reads."""
        self._lookup.write([self._probe[0][0]] * len(self._table) if self._probe else self._table)

    def _hooked_schedule(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        with self._lock:
            if self._idle:
                self._idle, self._began, self._counted_k = False, self._clock(), None
            output = self._schedule(*arguments, **named)
            try:
                batch = len(output.num_scheduled_tokens)
                self.draft_tokens = output.num_spec_tokens_to_schedule if batch else None
                if batch and not self._lookup.allows(batch, output.num_spec_tokens_to_schedule):
                    self._remove_hooks("the scheduler does not follow its draft-token table")
            except Exception as error:  # noqa: BLE001 - a defect here must not affect requests
                self._remove_hooks(f"measuring a step failed: {type(error).__name__}: {error}")
            return output

    def _hooked_update(self, output: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        result = self._update(output, *arguments, **named)
        ended = self._clock()
        with self._lock:
            try:
                self._count(output, result, ended)
            except Exception as error:  # noqa: BLE001 - a defect here must not affect requests
                self._remove_hooks(f"measuring a step failed: {type(error).__name__}: {error}")
            self._idle = not self._scheduler.has_unfinished_requests()
            now = self._clock()
            self._began = ended
            self._hook_seconds += now - ended
        return result

    def _count(self, output: Any, result: Any, ended: float) -> None:  # noqa: ANN401
        batch = len(output.num_scheduled_tokens)
        if not batch:
            return
        k, seconds = output.num_spec_tokens_to_schedule, ended - self._began
        self._batch = batch
        self._steps += 1
        self._busy_seconds += seconds
        tokens = 0
        for outputs in result.values():
            for item in outputs.outputs:
                tokens += len(item.new_token_ids)
            stats = outputs.scheduler_stats
            if stats is not None and stats.spec_decoding_stats is not None:
                self._count_drafts(stats.spec_decoding_stats)
        verified = len(output.scheduled_spec_decode_tokens)
        self._changed_at = self._changed_at if self._counted_k in {None, k} else ended
        is_whole = output.total_num_scheduled_tokens == batch * (k + 1) and verified == (batch if k else 0)
        if is_whole and ended >= self._changed_at + SETTLE_SECONDS:
            self._count_step(batch, k, seconds, tokens)
        elif output.total_num_scheduled_tokens == batch and k and self._counted_k == 0:
            self._count_catching_up(batch, seconds)
        self._counted_k = k
        if self._probe and k == self._probe[0][0]:
            self._probe[0][1] -= 1
            if self._probe[0][1] <= 0:
                self._probe.pop(0)
                self._fill()

    def _count_drafts(self, stats: Any) -> None:  # noqa: ANN401
        self._drafts += stats.num_drafts
        self._draft_tokens += stats.num_draft_tokens
        self._accepted += stats.num_accepted_tokens
        for position, count in enumerate(stats.num_draft_tokens_per_pos[: self._positions]):
            self._drafted_at[position] += count
        for position, count in enumerate(stats.num_accepted_tokens_per_pos[: self._positions]):
            self._accepted_at[position] += count

    def _count_step(self, batch: int, k: int, seconds: float, tokens: int) -> None:
        kind = (1 << (batch - 1).bit_length(), k)
        cell = self._cells.get(kind)
        if cell is None:
            cell = self._cells[kind] = Cell()
        if cell.steps >= STALL_AFTER and seconds * cell.steps > STALL * cell.seconds:
            self._stalls += 1
            return
        cell.steps += 1
        cell.seconds += seconds
        cell.seconds_squared += seconds * seconds
        cell.requests += batch
        cell.tokens += tokens

    def _count_catching_up(self, batch: int, seconds: float) -> None:
        """The first step that drafts again runs the draft over all that it left out."""
        usual = self._cells.get((1 << (batch - 1).bit_length(), 0))
        if usual is not None and usual.steps:
            self._catch_up_seconds += max(0.0, seconds - usual.seconds / usual.steps)

    def _remove_hooks(self, problem: str) -> None:
        """Restore the scheduler."""
        self._problems.append(problem)
        self.draft_tokens = None
        self._table, self._probe = self._lookup.initial(), []
        self._label = {"mode": None, "reason": None}
        self._lookup.restore()
        self._scheduler.schedule = self._schedule
        self._scheduler.update_from_output = self._update

    def _answer(self, engine: str) -> dict[str, Any]:
        """Of copies: it is encoded outside the lock."""
        return {
            "controllable": not self._problems,
            "problems": list(self._problems),
            "engine": engine,
            "epoch": self._epoch,
            "largest_batch": self._lookup.largest_batch,
            "choices": self._choices,
            "table": _spans(self._table),
            **self._label,
            "is_probing": bool(self._probe),
            "batch": 0 if self._idle else self._batch,
            "step_count": self._steps,
            "stalls": self._stalls,
            "hook_seconds": self._hook_seconds,
            "busy_seconds": self._busy_seconds,
            "catch_up_seconds": self._catch_up_seconds,
            "expected": self._expected,
            "steps": [
                {
                    "batch": batch,
                    "draft_tokens": k,
                    "steps": cell.steps,
                    "seconds": cell.seconds,
                    "seconds_squared": cell.seconds_squared,
                    "requests": cell.requests,
                    "tokens": cell.tokens,
                }
                for (batch, k), cell in sorted(self._cells.items())
            ],
            "drafting": {
                "drafts": self._drafts,
                "draft_tokens": self._draft_tokens,
                "accepted_tokens": self._accepted,
                "drafted_per_position": list(self._drafted_at),
                "accepted_per_position": list(self._accepted_at),
            },
        }


def _refused(error: Exception) -> str:
    return json.dumps({"error": f"not a command: {error}"})


def _promised(environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - JSON, repeated and not understood
    try:
        return json.loads(environment.get(EXPECTATION, "null"))
    except (ValueError, RecursionError):
        return None


def _spans(lookup: list[int]) -> list[list[int]]:
    spans: list[list[int]] = []
    for batch, k in enumerate(lookup[1:], start=1):
        if spans and spans[-1][2] == k:
            spans[-1][1] = batch
        else:
            spans.append([batch, batch, k])
    return spans
