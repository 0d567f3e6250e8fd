"""What is counted, which commands are applied, and how the hooks are removed."""

import json
import threading
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import WorkerFailedError
from appliance.serving.plugin_client import SpeculationCommand, parse_reading
from appliance.serving.vllm import scheduler_control
from appliance.serving.vllm.scheduler_control import (
    LARGEST_PROBE,
    STALL_AFTER,
    SchedulerControl,
    find_problems,
)
from appliance.speculation.values import (
    SETTLE_SECONDS,
    EngineReading,
    Reason,
    SpeculationMode,
    bucket_of,
    draft_tokens_at,
    table_of,
)
from tests.fake_engine import LOOKUP, FakeClock, FakeScheduler, FutureScheduler, Step, work

ENGINE = "vllm 0.32.0"
OTHER_SHAPE = "the draft-token table is neither by batch size nor by batch size and context length"
LARGEST = len(LOOKUP) - 1
ALL_OFF = [[1, LARGEST, 0]]
INITIAL = ((1, 6, 3), (7, 7, 1), (8, 8, 0))


class Controlled:
    """A scheduler with our hooks."""

    def __init__(self, *requests: str, scheduler: FakeScheduler | None = None) -> None:
        self.clock = FakeClock()
        self.scheduler = scheduler or FakeScheduler()
        self.own = (self.scheduler.schedule, self.scheduler.update_from_output)
        self.control = SchedulerControl(self.scheduler, self.clock)
        if requests:
            self.scheduler.add(*requests)
            self.work()  # their prompts

    def work(self, steps: int = 1, **how: Any) -> None:
        """Run this many steps."""
        work(self.scheduler, self.clock, steps, **how)

    def tell(self, **request: Any) -> dict[str, Any]:
        """Send a command; returns the answer as JSON."""
        return json.loads(self.control.command(json.dumps(request), ENGINE))

    @property
    def reading(self) -> EngineReading:
        """The answer as the client parses it."""
        return parse_reading(200, self.control.command("{}", ENGINE))

    @property
    def steps(self) -> dict[tuple[int, int], int]:
        """Counted steps by kind."""
        return {kind: cell.steps for kind, cell in self.reading.steps.items()}


def test_complete_scheduler_has_no_problems():
    assert find_problems(FakeScheduler()) == []


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("schedule", None, "the scheduler has no schedule"),
        ("update_from_output", None, "the scheduler has no update_from_output"),
        ("has_unfinished_requests", None, "the scheduler has no has_unfinished_requests"),
        ("num_spec_tokens", 0, "the engine was started without a draft"),
        ("dynamic_sd_lookup", None, "the scheduler has no draft-token table to change"),
        ("dynamic_sd_lookup", (0, 3), "the scheduler has no draft-token table to change"),
        ("dynamic_sd_lookup", [0], "the scheduler has no draft-token table to change"),
        ("dynamic_sd_lookup", [0, 3.0], OTHER_SHAPE),
        ("dynamic_sd_lookup", [0, [3, 1], [2, 0]], OTHER_SHAPE),
        ("dynamic_sd_lookup", [[0, 0], [3], [2, 0]], OTHER_SHAPE),
        ("dynamic_sd_lookup", [[], []], OTHER_SHAPE),
        ("dynamic_sd_lookup", [[0, 0], (3, 1)], OTHER_SHAPE),
        ("dynamic_sd_lookup", [[[0]], [[3]]], OTHER_SHAPE),
        ("log_stats", False, "the engine's statistics are off"),
    ],
)
def test_problems_name_what_a_scheduler_lacks(name, value, problem):
    """One line for each missing part."""
    scheduler = FakeScheduler()
    setattr(scheduler, name, value)
    assert find_problems(scheduler) == [problem]


def test_object_that_is_not_a_scheduler_has_problems():
    """Another vLLM may have renamed everything."""
    assert len(find_problems(object())) == 4


def test_counts_steps_in_which_every_request_verified_all_its_draft_tokens():
    """By batch bucket and draft tokens, with their time and tokens."""
    controlled = Controlled("a", "b", "c")
    controlled.work(5, seconds=0.02, accepted=2)
    cell = controlled.reading.steps[4, 3]
    assert (cell.steps, cell.requests, cell.tokens) == (5, 15, 45)
    assert cell.seconds == pytest.approx(0.1)
    assert cell.seconds_squared == pytest.approx(5 * 0.02**2)
    assert controlled.reading.step_count == 6


def test_counts_no_step_in_which_a_prompt_was_processed():
    """Alone or with others; the new request counts from the next step on."""
    controlled = Controlled("a")
    assert controlled.steps == {}
    controlled.scheduler.add("b")
    controlled.work()
    assert controlled.steps == {}
    controlled.work()
    assert controlled.steps == {(2, 3): 1}


def test_counts_no_step_in_which_a_request_had_fewer_drafts():
    """Near the end of its context a request drafts less; such a step measures neither K."""
    controlled = Controlled("a", "b")
    controlled.scheduler.drafts["b"] = 1
    controlled.work()
    controlled.scheduler.drafts["b"] = 0
    controlled.work()
    assert controlled.steps == {}
    controlled.work()
    assert controlled.steps == {(2, 3): 1}


def test_counts_no_step_between_two_numbers_of_draft_tokens():
    """The first step after a change still verifies what was drafted before it."""
    controlled = Controlled("a")
    controlled.work(2)
    controlled.tell(table=ALL_OFF)
    controlled.work()
    assert controlled.steps == {(1, 3): 2}
    controlled.work(3, seconds=0.03)
    controlled.tell(table=[[1, LARGEST, 1]])
    controlled.work()
    assert controlled.steps == {(1, 3): 2, (1, 0): 3}
    controlled.work(seconds=0.03)
    assert controlled.steps == {(1, 3): 2, (1, 0): 3, (1, 1): 1}


def test_counts_no_step_that_ends_soon_after_a_change_of_draft_tokens():
    """Answers of those before are still being sent then.  An engine that was idle has sent all."""
    controlled = Controlled("a")
    controlled.work(2)
    controlled.tell(table=ALL_OFF)
    controlled.work(seconds=0.001)
    controlled.work(3, seconds=0.006)
    assert controlled.steps == {(1, 3): 2}
    controlled.work(2, seconds=0.006)
    assert controlled.steps == {(1, 3): 2, (1, 0): 2}
    controlled.scheduler.finish("a")
    controlled.work()
    controlled.tell(table=[[1, LARGEST, 1]])
    controlled.scheduler.add("b")
    controlled.work(2, seconds=0.006)
    assert controlled.steps == {(1, 3): 2, (1, 0): 2, (1, 1): 1}


def test_what_the_first_step_that_drafts_again_takes_longer_is_for_catching_up():
    """Longer than a step without drafts, in which no draft is verified either."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF)
    controlled.work()
    controlled.work(4, seconds=0.01)
    for draft_tokens, seconds, total in ((3, 0.05, 0.04), (1, 0.5, 0.04), (0, 0.01, 0.04), (1, 0.03, 0.06)):
        controlled.tell(table=[[1, LARGEST, draft_tokens]])
        controlled.work(seconds=seconds)
        controlled.work(3, seconds=0.01)
        assert controlled.tell()["catch_up_seconds"] == pytest.approx(total)
    assert Controlled("a").tell()["catch_up_seconds"] == 0.0


def test_counts_no_step_without_requests():
    """An engine that cleans up after its last request decodes nothing."""
    controlled = Controlled("a")
    controlled.scheduler.finish("a")
    controlled.work()
    assert (controlled.reading.step_count, controlled.reading.batch) == (1, 0)


def test_a_step_takes_from_the_end_of_the_one_before_while_there_is_work():
    """The time between two steps is part of a token's cost."""
    controlled = Controlled("a")
    controlled.clock.advance(0.03)
    controlled.work(seconds=0.01)
    assert controlled.reading.steps[1, 3].seconds == pytest.approx(0.04)


def test_a_step_after_idling_takes_from_its_own_start():
    """No request waited before it."""
    controlled = Controlled("a")
    controlled.scheduler.finish("a")
    controlled.work()
    assert controlled.reading.batch == 0
    controlled.clock.advance(3600)
    controlled.tell(table=ALL_OFF)
    controlled.scheduler.add("b", prompt=1)
    controlled.work(seconds=0.01)
    assert controlled.reading.steps[1, 0].seconds == pytest.approx(0.01)


def test_an_engine_that_was_idle_has_nothing_to_catch_up():
    """Its first step may have one token, if the rest of the prompt is cached, as when drafting resumes."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF)
    controlled.work(4, seconds=0.03)
    controlled.scheduler.finish("a")
    controlled.work()
    controlled.tell(table=[[1, LARGEST, 3]])
    controlled.scheduler.add("b", prompt=1)
    controlled.work(seconds=0.5)
    assert controlled.reading.catch_up_seconds == 0.0


def test_steps_in_flight_are_counted_as_what_they_were_scheduled_as():
    """Two are scheduled before the first output arrives; the table changes between them."""
    controlled = Controlled("a")
    scheduler, clock = controlled.scheduler, controlled.clock
    first = scheduler.schedule()
    controlled.tell(table=ALL_OFF)
    second = scheduler.schedule()
    third_k = controlled.control.draft_tokens
    clock.advance(0.02)
    scheduler.update_from_output(first, 1)
    assert (controlled.steps, third_k) == ({(1, 3): 1}, 0)
    third = scheduler.schedule()
    clock.advance(0.01)
    scheduler.update_from_output(second)
    assert controlled.steps == {(1, 3): 1}
    clock.advance(0.025)
    scheduler.update_from_output(third)
    assert controlled.steps == {(1, 3): 1, (1, 0): 1}
    assert controlled.reading.steps[1, 0].seconds == pytest.approx(0.025)


def test_stalled_steps_are_excluded():
    """A step that takes ten times the mean of its kind is counted as a stall only."""
    controlled = Controlled("a")
    controlled.work(seconds=1.0)
    controlled.work(STALL_AFTER, seconds=0.01)
    before = controlled.reading.steps[1, 3]
    controlled.work(seconds=10 * before.seconds_per_step + 0.1)
    assert controlled.reading.steps[1, 3] == before
    assert controlled.tell()["stalls"] == 1
    controlled.work(seconds=9 * before.seconds_per_step)
    assert controlled.steps[1, 3] == before.steps + 1


def test_counts_a_slow_step_while_its_kind_is_not_known_yet():
    """With few steps, an outlier cannot be recognised."""
    controlled = Controlled("a")
    controlled.work(STALL_AFTER - 1, seconds=0.01)
    controlled.work(seconds=5.0)
    assert controlled.steps == {(1, 3): STALL_AFTER}
    assert controlled.tell()["stalls"] == 0


def test_counts_drafts_by_position():
    """vLLM's own counters do not say how many drafts reached a position."""
    controlled = Controlled("a", "b")
    controlled.work(2, accepted=2)
    controlled.tell(table=[[1, LARGEST, 1]])
    controlled.work(2, accepted=1)
    drafting = controlled.reading.drafting
    assert (drafting.drafts, drafting.draft_tokens, drafting.accepted_tokens) == (8, 20, 12)
    assert drafting.drafted_per_position == (8, 6, 6)
    assert drafting.accepted_per_position == (8, 4, 0)


def test_initial_reading_reports_the_table_in_force():
    """The table the engine was started with, every number it names, and no mode."""
    reading = Controlled().reading
    assert (reading.controllable, reading.problems) == (True, ())
    assert (reading.table, reading.choices, reading.largest_batch) == (INITIAL, (0, 1, 3), LARGEST)
    assert (reading.mode, reading.reason, reading.is_probing) == (None, None, False)
    assert reading.epoch


def test_every_start_of_an_engine_is_an_epoch_of_its_own():
    """Counters of two starts are never compared."""
    assert Controlled().reading.epoch != Controlled().reading.epoch


def test_a_table_is_in_force_at_the_next_step():
    """Its mode and reason are repeated in readings."""
    controlled = Controlled("a")
    command = SpeculationCommand(
        table=((1, 4, 1), (5, LARGEST, 0)), mode=SpeculationMode.TARGET_ONLY, reason=Reason.COLLAPSED
    )
    assert controlled.tell(**command.body())["table"] == [[1, 4, 1], [5, LARGEST, 0]]
    assert controlled.scheduler.schedule().num_spec_tokens_to_schedule == 1
    reading = controlled.reading
    assert (reading.table, reading.mode, reading.reason) == (command.table, command.mode, command.reason)
    controlled.scheduler.add(*"bcde")
    assert controlled.scheduler.schedule().num_spec_tokens_to_schedule == 0


def test_reading_changes_nothing():
    """The empty command only reads."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF, mode="target_only", reason="collapsed", probe=[[3, 4]])
    before = controlled.tell()
    assert controlled.tell() == before
    assert before["is_probing"]


@pytest.mark.parametrize(
    "text",
    [
        '{"table": [[2, 8, 3]]}',
        '{"table": [[1, 4, 3], [6, 8, 0]]}',
        '{"table": [[1, 4, 3], [4, 8, 0]]}',
        '{"table": [[1, 0, 3]]}',
        '{"table": []}',
        '{"table": [[1, 8, 2]]}',
        '{"table": [[1, 8, -1]]}',
        '{"table": [[1, 8]]}',
        '{"table": [[1, 8, null]]}',
        '{"table": [[1, 8, Infinity]]}',
        '{"table": {"1": 3}}',
        '{"table": null}',
        '{"table": [[1, 8, 0]], "mode": "target_only", "probe": [[2, 4]]}',
        '{"table": [[1, 8, 0]], "probe": [[3, 0]]}',
        '{"table": [[1, 8, 0]], "probe": [[3]]}',
        '{"table": [[1, 8, 0]], "probe": 7}',
        f'{{"table": [[1, 8, 0]], "probe": [[3, {LARGEST_PROBE}], [0, 1]]}}',
        *("", "nothing", "[]", '"table"', "7", "null", "[" * 100_000),
    ],
)
def test_invalid_command_changes_nothing(text):
    """No part of it is applied; the answer has the reason in one line."""
    controlled = Controlled("a")
    controlled.tell(table=[[1, LARGEST, 1]], mode="speculative", reason="healthy", probe=[[3, 5]])
    before = controlled.tell()
    refusal = json.loads(controlled.control.command(text, ENGINE))
    assert list(refusal) == ["error"]
    assert "\n" not in refusal["error"]
    assert controlled.tell() == before
    assert controlled.scheduler.dynamic_sd_lookup == [3] * len(LOOKUP)


def test_a_table_may_end_before_or_after_the_largest_batch():
    """The last range holds for all larger batches; impossible batch sizes are dropped."""
    controlled = Controlled()
    assert controlled.tell(table=[[1, 2, 3], [3, 4, 0]])["table"] == [[1, 2, 3], [3, LARGEST, 0]]
    assert controlled.tell(table=[[1, 2, 3], [3, 4096, 1]])["table"] == [[1, 2, 3], [3, LARGEST, 1]]


@given(st.lists(st.sampled_from([0, 1, 3]), min_size=4, max_size=4))
def test_every_table_of_control_is_applied_unchanged(draft_tokens):
    """`table_of` writes it, the engine looks it up, and reading it back gives the same."""
    table = table_of(dict(zip((1, 2, 4, 8), draft_tokens, strict=True)), LARGEST)
    controlled = Controlled()
    controlled.tell(table=[list(span) for span in table])
    assert controlled.reading.table == table
    wanted = [draft_tokens_at(table, batch) for batch in range(1, LARGEST + 1)]
    assert controlled.scheduler.dynamic_sd_lookup[1:] == wanted


def test_probe_runs_by_count_and_then_the_table_is_in_force():
    """Without another command: its sender may have died."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF, mode="probing", reason="probing", probe=[[3, 2], [1, 3]])
    seen = []
    for _ in range(8):
        assert controlled.reading.is_probing == (len(seen) < 5)
        seen.append(controlled.scheduler.schedule())
        controlled.scheduler.update_from_output(seen[-1])
    assert [step.num_spec_tokens_to_schedule for step in seen] == [3, 3, 1, 1, 1, 0, 0, 0]
    assert controlled.reading.table == ((1, LARGEST, 0),)
    assert controlled.scheduler.dynamic_sd_lookup == [0] * len(LOOKUP)


def test_a_probe_counts_steps_whatever_is_in_them():
    """Prompts that arrive during it do not make it longer; steps scheduled before do not shorten it."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF)
    in_flight = controlled.scheduler.schedule()
    controlled.tell(probe=[[3, 2]])
    controlled.scheduler.update_from_output(in_flight)
    controlled.scheduler.add("b")
    controlled.work()
    assert controlled.reading.is_probing
    controlled.work()
    assert not controlled.reading.is_probing


def test_a_probe_waits_for_traffic():
    """An idle engine does not probe."""
    controlled = Controlled()
    controlled.tell(table=ALL_OFF, probe=[[3, 1]])
    controlled.work(5)
    assert controlled.reading.is_probing


def test_probe_alone_keeps_table_mode_and_reason():
    """It is an interruption, not a decision."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF, mode="target_only", reason="collapsed")
    answer = controlled.tell(probe=[[3, 2]])
    assert (answer["table"], answer["mode"], answer["reason"]) == (ALL_OFF, "target_only", "collapsed")
    assert answer["is_probing"]


def test_a_table_ends_a_probe():
    """The latest command is in force at the next step."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF, probe=[[3, 100]])
    answer = controlled.tell(table=[[1, LARGEST, 1]], mode="speculative", reason="recovered")
    assert not answer["is_probing"]
    assert controlled.scheduler.schedule().num_spec_tokens_to_schedule == 1


def test_scheduler_that_ignores_its_table_is_restored():
    """It must not be reported as controllable."""
    controlled = Controlled("a")
    controlled.tell(table=ALL_OFF, mode="target_only", reason="collapsed", probe=[[1, 2]])
    controlled.scheduler.disobeys = True
    step = controlled.scheduler.schedule()
    assert (step.num_spec_tokens_to_schedule, controlled.control.draft_tokens) == (3, None)
    reading = controlled.reading
    assert (reading.controllable, reading.table, reading.mode) == (False, INITIAL, None)
    assert not reading.is_probing
    assert reading.problems == ("the scheduler does not follow its draft-token table",)
    assert (controlled.scheduler.schedule, controlled.scheduler.update_from_output) == controlled.own
    assert controlled.scheduler.dynamic_sd_lookup == list(LOOKUP)
    assert json.loads(controlled.control.command(json.dumps({"table": ALL_OFF}), ENGINE)) == {
        "error": "not a command: the scheduler does not follow its draft-token table"
    }
    assert controlled.scheduler.dynamic_sd_lookup == list(LOOKUP)


class WithoutTokens(FakeScheduler):
    """A vLLM of another version, whose outputs have no tokens."""

    def update_from_output(self, step: Step, accepted: int = 0) -> Any:
        return {0: super().update_from_output(step, accepted)}


class WithoutDraftTokens(FakeScheduler):
    """A vLLM of another version, whose steps have no number of draft tokens."""

    def schedule(self, throttle_prefills: bool = False) -> Step:
        step = super().schedule(throttle_prefills)
        del step.num_spec_tokens_to_schedule
        return step


@pytest.mark.parametrize("kind", [WithoutTokens, WithoutDraftTokens])
def test_failed_measurement_removes_the_hooks_only(kind):
    """The engine gets its scheduler's result, the initial table is restored, and the problem is reported."""
    controlled = Controlled(scheduler=kind())
    controlled.tell(table=ALL_OFF, mode="target_only", reason="collapsed", probe=[[3, 5]])
    controlled.scheduler.add("a", prompt=4)
    step = controlled.scheduler.schedule()
    assert step.num_scheduled_tokens == {"a": 4}
    assert list(controlled.scheduler.update_from_output(step)) == [0]
    reading = controlled.reading
    assert (reading.controllable, reading.table, reading.mode) == (False, INITIAL, None)
    assert not reading.is_probing
    assert reading.problems[0].startswith("measuring a step failed: AttributeError")
    assert (controlled.scheduler.schedule, controlled.scheduler.update_from_output) == controlled.own
    assert controlled.scheduler.dynamic_sd_lookup == list(LOOKUP)
    assert controlled.control.draft_tokens is None


def test_hooks_return_the_schedulers_own_objects():
    """Arguments and results pass through the hooks unchanged."""
    controlled = Controlled("a")
    given = []
    controlled.control._schedule = lambda *arguments, **named: given.append((arguments, named)) or step
    step = FakeScheduler.schedule(controlled.scheduler)
    controlled.control._update = lambda *arguments, **named: given.append((arguments, named)) or result
    result = FakeScheduler.update_from_output(controlled.scheduler, step)
    assert controlled.scheduler.schedule(True, more=1) is step
    assert controlled.scheduler.update_from_output(step, 2, more=3) is result
    assert given == [((True,), {"more": 1}), ((step, 2), {"more": 3})]


def test_reading_reports_the_cost_of_the_hooks():
    """Measured with the same clock, separately from the steps."""
    controlled = Controlled("a")
    controlled.scheduler.has_unfinished_requests = lambda: controlled.clock.advance(0.001) or True
    controlled.work(4, seconds=0.01)
    answer = controlled.tell()
    assert answer["hook_seconds"] == pytest.approx(0.004)
    assert answer["busy_seconds"] == pytest.approx(0.05 + 0.003)


def test_engine_without_a_controllable_scheduler_gives_the_reason():
    """In the format that the client parses."""
    problems = find_problems(object())
    reading = parse_reading(200, SchedulerControl.cannot(problems, ENGINE))
    assert (reading.controllable, reading.epoch) == (False, "")
    assert reading.problems == tuple(problems)


COMMANDS = st.sampled_from(
    [
        {"table": ALL_OFF, "mode": "target_only", "reason": "collapsed"},
        {"table": [[1, 2, 3], [3, LARGEST, 0]], "mode": "speculative", "reason": "healthy"},
        {"table": [[1, LARGEST, 1]], "mode": "speculative", "reason": "recovered"},
        {"probe": [[3, 2], [0, 1]]},
        {"table": ALL_OFF, "mode": "probing", "reason": "probing", "probe": [[1, 3]]},
    ]
)
EVENTS = st.lists(
    st.tuples(st.just("join"), st.integers(2, 9))
    | st.tuples(st.just("leave"), st.integers(0, LARGEST))
    | st.tuples(st.just("tell"), COMMANDS)
    | st.tuples(st.just("step"), st.integers(0, 3)),
    max_size=60,
)


class Tally:
    """An engine with some steps in flight, and the expected sums."""

    def __init__(self, in_flight: int) -> None:
        self.controlled = Controlled()
        self.in_flight = in_flight
        self.flying: deque[tuple[Step, int]] = deque()
        self.names = self.count = 0
        self.steps: Counter = Counter()
        self.tokens: Counter = Counter()
        self.drafted, self.accepted = [0] * 3, [0] * 3

    def do(self, what: str, how: Any) -> None:
        scheduler = self.controlled.scheduler
        if what == "join" and len(scheduler.prompts) < LARGEST:
            self.names += 1
            scheduler.add(f"r{self.names}", prompt=how)
        elif what == "leave" and len(scheduler.prompts) > how:
            scheduler.finish(list(scheduler.prompts)[how])
        elif what == "tell":
            self.controlled.tell(**how)
        elif what == "step":
            self.flying.append((scheduler.schedule(), how))
            if len(self.flying) >= self.in_flight:
                self.land()

    def land(self) -> None:
        """Deliver the output of the oldest step."""
        step, taken = self.flying.popleft()
        self.controlled.clock.advance(1.5 * SETTLE_SECONDS)
        self.controlled.scheduler.update_from_output(step, taken)
        tokens = 0
        for request in step.num_scheduled_tokens:
            verified = len(step.scheduled_spec_decode_tokens.get(request, ()))
            tokens += 1 + min(taken, verified)
            for position in range(verified):
                self.drafted[position] += 1
                self.accepted[position] += position < taken
        self.count += tokens > 0
        if step.is_whole and tokens:
            kind = (bucket_of(len(step.num_scheduled_tokens)), step.num_spec_tokens_to_schedule)
            self.steps[kind] += 1
            self.tokens[kind] += tokens


@given(events=EVENTS, in_flight=st.integers(1, 3))
def test_reading_equals_a_tally_of_the_steps(events, in_flight):
    """Steps by bucket and K, tokens, drafts and accepted tokens, with any number of steps in flight."""
    tally = Tally(in_flight)
    for what, how in events:
        tally.do(what, how)
    while tally.flying:
        tally.land()
    reading = tally.controlled.reading
    drafted, drafting = tally.drafted, reading.drafting
    assert reading.controllable
    assert {kind: cell.steps for kind, cell in reading.steps.items()} == tally.steps
    assert {kind: cell.tokens for kind, cell in reading.steps.items()} == tally.tokens
    assert drafting.drafted_per_position == tuple(drafted)
    assert drafting.accepted_per_position == tuple(tally.accepted)
    assert (drafting.drafts, drafting.draft_tokens) == (drafted[0], sum(drafted))
    assert drafting.accepted_tokens == sum(tally.accepted)
    assert reading.step_count == tally.count


@given(
    mode=st.sampled_from(SpeculationMode),
    reason=st.sampled_from(Reason),
    probe=st.lists(st.tuples(st.sampled_from([0, 1, 3]), st.integers(1, 9)), max_size=3),
    table=st.lists(st.sampled_from([0, 1, 3]), min_size=4, max_size=4),
    steps=st.integers(0, 20),
)
def test_applied_command_is_read_back(mode, reason, probe, table, steps):
    """No member is lost or renamed between command and reading."""
    command = SpeculationCommand(
        table=table_of(dict(zip((1, 2, 4, 8), table, strict=True)), LARGEST),
        mode=mode,
        reason=reason,
        probe=tuple(probe),
    )
    controlled = Controlled("a")
    controlled.work(steps, accepted=2)
    reading = parse_reading(200, controlled.control.command(json.dumps(command.body()), ENGINE))
    assert (reading.table, reading.mode, reading.reason) == (command.table, mode, reason)
    assert (reading.is_probing, reading.batch) == (bool(probe), 1)
    assert reading == controlled.reading


def test_refused_command_raises_for_the_sender():
    """The worker answers 400 with the reason, which becomes the error's message."""
    refusal = Controlled().control.command('{"table": [[1, 8, 2]]}', ENGINE)
    with pytest.raises(WorkerFailedError, match=r"400.*\[2\] draft tokens are not among \[0, 1, 3\]"):
        parse_reading(400, refusal)


@pytest.mark.parametrize("context", [0, 1, 2])
def test_a_table_by_context_too_is_changed_for_every_context(context):
    scheduler = FutureScheduler()
    scheduler.context = context
    controlled = Controlled("a", scheduler=scheduler)
    assert (controlled.reading.choices, controlled.reading.table) == ((0, 1, 2, 3), INITIAL)
    for draft_tokens in (1, 0, 3):
        assert controlled.tell(table=[[1, LARGEST, draft_tokens]])["controllable"]
        before = controlled.steps.get((1, draft_tokens), 0)
        controlled.work(4, seconds=0.03)
        assert controlled.steps[1, draft_tokens] == before + 3
    assert scheduler.rows is not scheduler.dynamic_sd_lookup, "the scheduler reads rows that it holds"


def test_a_table_by_context_too_is_restored_when_the_engine_does_not_follow_it():
    scheduler = FutureScheduler()
    controlled = Controlled("a", scheduler=scheduler)
    controlled.tell(table=ALL_OFF)
    scheduler.disobeys = True
    controlled.work()
    assert controlled.reading.problems == ("the scheduler does not follow its draft-token table",)
    assert scheduler.rows == [[k, min(k, 2), 0] for k in LOOKUP]


def test_a_table_whose_first_axis_is_no_batch_size_is_given_back():
    """A table by context and then batch size has the same shape; its second step shows it."""
    scheduler = FutureScheduler()
    scheduler.rows = scheduler.dynamic_sd_lookup = [[0, 1], [0, 1], [0, 1]]
    scheduler.draft_tokens_for = lambda batch: scheduler.rows[2][batch]
    controlled = Controlled("a", scheduler=scheduler)
    assert controlled.reading.controllable
    controlled.tell(table=[[1, 1, 0], [2, 2, 1]])
    controlled.work()
    assert not controlled.reading.controllable
    assert scheduler.rows == [[0, 1], [0, 1], [0, 1]]


def test_a_command_does_not_change_the_table_while_a_step_is_scheduled(monkeypatch):
    """Otherwise the step would seem not to follow its table, and the hooks would be removed."""
    monkeypatch.setattr(scheduler_control, "COMMAND_SECONDS", 0.01)
    told: list[Any] = []

    class Interrupted(FakeScheduler):
        def schedule(self) -> Step:
            thread = threading.Thread(target=tell)
            thread.start()
            thread.join()
            return super().schedule()

    def tell() -> None:
        try:
            told.append(controlled.tell(table=ALL_OFF))
        except TimeoutError as error:
            told.append(str(error))

    controlled = Controlled(scheduler=Interrupted())
    controlled.scheduler.add("a")
    controlled.work(2)
    assert told == ["the engine did not answer within 0.01 s"] * 2
    assert (controlled.reading.controllable, controlled.reading.table) == (True, INITIAL)
    assert controlled.tell(table=ALL_OFF)["table"] == ALL_OFF
