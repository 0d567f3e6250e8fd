"""How a plugin's answer is parsed, and what is refused."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import WorkerFailedError
from appliance.serving.plugin_client import SpeculationCommand, parse_reading
from appliance.speculation.values import Energy, Reason, SpecDecodeCounters, SpeculationMode, StepCounters

ANSWER: dict[str, Any] = {
    "controllable": True,
    "problems": [],
    "engine": "vllm 0.32.0",
    "epoch": "0f",
    "largest_batch": 64,
    "choices": [0, 1, 3],
    "table": [[1, 8, 3], [9, 64, 0]],
    "mode": "speculative",
    "reason": "healthy",
    "is_probing": False,
    "batch": 5,
    "step_count": 1000,
    "stalls": 1,
    "hook_seconds": 0.01,
    "busy_seconds": 10.0,
    "steps": [
        {
            "batch": 8,
            "draft_tokens": 3,
            "steps": 900,
            "seconds": 9.0,
            "seconds_squared": 0.091,
            "requests": 4500,
            "tokens": 11000,
        }
    ],
    "drafting": {
        "drafts": 4500,
        "draft_tokens": 13500,
        "accepted_tokens": 6500,
        "drafted_per_position": [4500, 4500, 4500],
        "accepted_per_position": [3500, 2000, 1000],
    },
}


def changed(path: tuple[str | int, ...], value: Any) -> str:
    """The answer with something else in one place."""
    answer = copy.deepcopy(ANSWER)
    place: Any = answer
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(answer)


def test_reads_engine_time_and_energy():
    """Of a worker that can be controlled, of one that cannot, and of one too old to say."""
    energy = {"gpus": 2, "millijoules": 123_456}
    reading = parse_reading(200, json.dumps(ANSWER | {"energy": energy}))
    assert (reading.busy_seconds, reading.energy) == (10.0, Energy(gpus=2, millijoules=123_456))
    blind = {"controllable": False, "problems": ["no draft"], "engine": "", "epoch": "", "energy": energy}
    reading = parse_reading(200, json.dumps(blind))
    assert (reading.busy_seconds, reading.energy) == (None, Energy(gpus=2, millijoules=123_456))
    older = parse_reading(200, json.dumps({k: v for k, v in ANSWER.items() if k != "busy_seconds"}))
    assert (older.busy_seconds, older.energy) == (None, None)
    with pytest.raises(WorkerFailedError):
        parse_reading(200, changed(("busy_seconds",), 1e999))


def test_parses_a_plugins_reading():
    """Every member by its name."""
    reading = parse_reading(200, json.dumps(ANSWER))
    assert (reading.controllable, reading.problems, reading.epoch) == (True, (), "0f")
    assert (reading.largest_batch, reading.choices) == (64, (0, 1, 3))
    assert reading.table == ((1, 8, 3), (9, 64, 0))
    assert (reading.mode, reading.reason) == (SpeculationMode.SPECULATIVE, Reason.HEALTHY)
    assert (reading.is_probing, reading.batch, reading.step_count) == (False, 5, 1000)
    assert reading.steps == {
        (8, 3): StepCounters(steps=900, seconds=9.0, seconds_squared=0.091, requests=4500, tokens=11000)
    }
    assert reading.drafting == SpecDecodeCounters(
        drafts=4500,
        draft_tokens=13500,
        accepted_tokens=6500,
        accepted_per_position=(3500, 2000, 1000),
        drafted_per_position=(4500, 4500, 4500),
    )


def test_a_worker_without_the_plugin_cannot_be_controlled():
    """That is a reading, not a failure: the worker serves."""
    reading = parse_reading(404, '{"detail":"Not Found"}')
    assert (reading.controllable, reading.epoch, reading.table) == (False, "", ())
    assert reading.problems == ("the worker runs without the plugin, or was given no control token",)


def test_a_worker_with_another_token_cannot_be_controlled():
    """The reading names the token as the reason."""
    reading = parse_reading(401, '{"error":"the control token is missing or wrong"}')
    assert (reading.controllable, reading.problems) == (
        False,
        ("the worker does not accept this control token",),
    )


def test_uncontrollable_engine_gives_the_reason():
    """It never had hooks, so it has no epoch and no counters."""
    answer = {"controllable": False, "problems": ["one", "two"], "engine": "vllm 0.99", "epoch": ""}
    reading = parse_reading(200, json.dumps(answer))
    assert (reading.controllable, reading.problems, reading.epoch) == (False, ("one", "two"), "")


def test_engine_without_hooks_still_reports_its_counters():
    """With its epoch, so that nothing is taken for a restart."""
    reading = parse_reading(200, json.dumps(ANSWER | {"controllable": False, "problems": ["gone wrong"]}))
    assert (reading.controllable, reading.problems, reading.epoch) == (False, ("gone wrong",), "0f")
    assert reading.drafting.drafts == 4500


def test_a_refusal_is_a_failure_with_the_plugins_reason():
    """Any other status is a failure too."""
    with pytest.raises(WorkerFailedError, match=r"answered 400: no such table\.$"):
        parse_reading(400, '{"error": "no such table"}')
    with pytest.raises(WorkerFailedError, match=r"\(500\) is malformed"):
        parse_reading(500, "Internal Server Error")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("mode",), "fast"),
        (("reason",), "because"),
        (("table",), [[1, 8]]),
        (("table",), None),
        (("choices",), []),
        (("choices",), ["many"]),
        (("largest_batch",), float("inf")),
        (("largest_batch",), 0),
        (("steps", 0), {}),
        (("steps", 0, "seconds"), float("nan")),
        (("steps", 0, "seconds"), float("inf")),
        (("drafting",), {}),
        (("drafting", "drafts"), float("nan")),
        (("drafting", "accepted_per_position"), [1, 2]),
        (("drafting", "drafted_per_position"), 3),
    ],
)
def test_answer_with_an_impossible_value_is_refused(path, value):
    """Figures that decide about a worker are never used partly."""
    with pytest.raises(WorkerFailedError, match=r"^The answer of the worker's plugin \(200\) is malformed"):
        parse_reading(200, changed(path, value))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLACES = st.sampled_from(
    [
        *((name,) for name in ANSWER),
        *(("drafting", name) for name in ANSWER["drafting"]),
        *(("steps", 0, name) for name in ANSWER["steps"][0]),
        ("table", 0),
        ("steps", 0),
    ]
)


@given(path=PLACES, value=JSON, status=st.sampled_from([200, 400, 401, 404, 500]))
def test_any_answer_is_a_reading_or_a_worker_failure(path, value, status):
    """Control continues in both cases."""
    try:
        reading = parse_reading(status, changed(path, value))
    except WorkerFailedError:
        return
    assert min(reading.choices) == 0
    assert len(reading.drafting.acceptance_rate_per_position) == len(reading.drafting.accepted_per_position)


@pytest.mark.parametrize("text", ["", "null", "[]", "7", '"x"', "{", "{}", "[" * 100_000])
@pytest.mark.parametrize("status", [200, 400])
def test_text_that_is_not_json_is_a_failure(text, status):
    """Another server may listen there."""
    with pytest.raises(WorkerFailedError, match="is malformed"):
        parse_reading(status, text)


def test_command_carries_table_mode_reason_and_probe():
    """The wire uses the words of the audit log."""
    command = SpeculationCommand(
        table=((1, 8, 3), (9, 64, 0)),
        mode=SpeculationMode.TARGET_ONLY,
        reason=Reason.COLLAPSED,
        probe=((3, 9), (0, 4)),
    )
    assert json.loads(json.dumps(command.body())) == {
        "table": [[1, 8, 3], [9, 64, 0]],
        "mode": "target_only",
        "reason": "collapsed",
        "probe": [[3, 9], [0, 4]],
    }
