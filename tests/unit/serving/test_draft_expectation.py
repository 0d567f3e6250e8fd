"""The path of an expectation: from training.json through launcher and plugin to the reading."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import Device, DeviceKind
from appliance.serving.launch import LaunchPlan, plan_launch
from appliance.serving.plugin_client import parse_reading
from appliance.serving.vllm.scheduler_control import SchedulerControl
from appliance.serving.weights import Weights
from appliance.serving.worker_protocol import EXPECTATION
from appliance.speculation.values import EngineReading
from tests.fake_engine import LOOKUP, FakeClock, FakeScheduler

CPU = Device(kind=DeviceKind.CPU, count=1, bfloat16=False)
MOST = max(LOOKUP)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def plan(training: dict[str, Any] | None, **settings: Any) -> LaunchPlan:
    """How a worker is started whose draft has this record; None for no draft."""
    draft = Weights(path=Path("/draft"), config={}, tensors={}, training=training or {})
    return plan_launch(
        WorkerSettings(**settings),
        python="/python",
        port=8000,
        device=CPU,
        target=Weights(path=Path("/target"), config={}, tensors={}),
        draft=None if training is None else draft,
        environment={},
        control_token_file=Path("/control.token"),
        can_import=lambda _: True,
    )


def asked(environment: dict[str, str]) -> EngineReading:
    """What a plugin in that environment reports, as the other side parses it."""
    control = SchedulerControl(FakeScheduler(), FakeClock(), environment)
    return parse_reading(200, control.command("{}", "vllm"))


def promise(length: float, tokens: int) -> dict[str, Any]:
    return {"expected": {"all": {"acceptance_length": length, "draft_tokens": tokens}}}


def test_expectation_in_the_record_reaches_the_reading():
    """Through the worker's environment, without the rest of the record."""
    made = plan({**promise(2.7, MOST), "recipe": {"secret": 1}})
    assert dict(made.environment)[EXPECTATION] == (f'{{"acceptance_length":2.7,"draft_tokens":{MOST}}}')
    assert asked(dict(made.environment)).expected_length == 2.7


@pytest.mark.parametrize(
    ("length", "tokens", "expected"),
    [
        (2.7, MOST, 2.7),
        (2.7, 2 * MOST, 1.85),
        (2.0, 1, 2.0),
        (1.0, MOST, 1.0),
        (1 + 2 * MOST, 2 * MOST, 1 + MOST),
    ],
)
def test_a_promise_for_more_draft_tokens_holds_for_fewer_by_their_share(length, tokens, expected):
    """At the least; and one for fewer holds for more as it is."""
    made = plan(promise(length, tokens))
    assert asked(dict(made.environment)).expected_length == pytest.approx(expected)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"expected": None},
        {"expected": []},
        {"expected": {}},
        {"expected": {"code": {"acceptance_length": 2.7, "draft_tokens": 3}}},
        {"expected": {"all": None}},
        promise(0.5, 3),
        promise(4.5, 3),
        promise(2.7, 0),
        promise(float("nan"), 3),
    ],
)
def test_useless_expectation_is_ignored(training):
    """Not a variable, not a byte of the plan."""
    assert plan(training) == plan({})
    assert EXPECTATION not in plan(training).environment


def test_only_a_loaded_draft_has_an_expectation():
    """The target alone has none, and neither do drafts that are no model's."""
    assert EXPECTATION not in plan(None, method="none").environment
    assert EXPECTATION not in plan(promise(2.7, 3), method="none").environment
    assert EXPECTATION not in plan(promise(2.7, 3), method="ngram").environment
    assert EXPECTATION in plan(promise(2.7, 3)).environment


@given(st.text() | JSON.map(json.dumps))
def test_plugin_starts_whatever_the_environment_contains(text: str):
    """An engine must never fail because of it; a malformed promise is ignored."""
    reading = asked({EXPECTATION: text})
    assert reading.controllable
    assert reading.expected_length is None or 1.0 <= reading.expected_length <= 1 + MOST


def test_deeply_nested_expectation_is_ignored():
    """Python would give up on it."""
    assert asked({EXPECTATION: "[" * 100_000}).expected_length is None


def test_worker_without_the_variable_has_no_expectation():
    """One that was started by hand, or whose draft has no record."""
    control = SchedulerControl(FakeScheduler(), FakeClock(), {})
    assert json.loads(control.command("{}", "vllm"))["expected"] is None
    assert asked({}).expected_length is None


def test_a_plugin_of_an_earlier_version_is_read_as_before():
    """It does not have the member."""
    said = json.loads(SchedulerControl(FakeScheduler(), FakeClock(), {}).command("{}", "vllm"))
    del said["expected"]
    assert parse_reading(200, json.dumps(said)).expected_length is None


@given(JSON)
def test_any_expectation_is_parsed_or_ignored(said: Any):
    """A reading is never lost because of it: control would be blind."""
    answer = json.loads(SchedulerControl(FakeScheduler(), FakeClock(), {}).command("{}", "vllm"))
    reading = parse_reading(200, json.dumps(answer | {"expected": said}))
    assert reading.controllable
    assert reading.expected_length is None


def test_engine_without_hooks_still_reports_the_expectation():
    """A gateway that only observes needs it too."""
    answer = json.loads(
        SchedulerControl(
            FakeScheduler(), FakeClock(), {EXPECTATION: '{"acceptance_length":2,"draft_tokens":3}'}
        ).command("{}", "vllm")
    )
    reading = parse_reading(200, json.dumps(answer | {"controllable": False, "problems": ["gone"]}))
    assert (reading.controllable, reading.expected_length) == (False, 2.0)
