"""What a worker reports that it lacks, from the engine to the metrics."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.serving.plugin_client import parse_reading
from appliance.serving.vllm import capabilities
from appliance.serving.vllm.capabilities import ASK_RUNNER, find_missing
from appliance.serving.vllm.deferred_prefill import find_runner_problem
from appliance.serving.vllm.scheduler_control import SchedulerControl
from appliance.speculation.values import Capability, EngineReading, missing_of
from tests.fake_engine import FakeClock, FakeScheduler

OLDER = "this vLLM does not report the drafts of a request"


class Core:
    """vLLM's engine core: a scheduler, and an executor that reaches the workers."""

    def __init__(self, *answers: str, report: str | None = "summary") -> None:
        self.scheduler = FakeScheduler()
        self.model_executor = self
        self.answers = answers
        self.asked: list[str] = []
        settings = {} if report is None else {"per_request_spec_decode_metrics": report}
        self.vllm_config = SimpleNamespace(observability_config=SimpleNamespace(**settings))

    def collective_rpc(self, method: str) -> list[str]:
        self.asked.append(method)
        return list(self.answers)


def test_a_complete_engine_lacks_nothing_and_is_asked_once():
    core = Core("")
    assert (find_missing(core, ""), core.asked) == ({}, [ASK_RUNNER])


def test_the_reason_of_any_runner_is_reported():
    assert find_missing(Core("", "async"), "") == {"deferred_prefill": "async"}


def test_no_runner_is_asked_where_none_can_defer():
    core = Core("")
    assert find_missing(core, "on a GPU") == {"deferred_prefill": "on a GPU"}
    assert core.asked == []


def test_an_executor_of_another_structure_is_reported():
    core = Core()
    core.model_executor = None
    (why,) = find_missing(core, "").values()
    assert why == "the engine's runner cannot be asked: AttributeError"


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (None, OLDER),
        ("none", "the engine was started without --per-request-spec-decode-metrics"),
        ("detailed", None),
    ],
)
def test_drafts_by_request_depend_on_version_and_arguments(report, why):
    assert find_missing(Core("", report=report), "").get("attribution") == why


def test_an_engine_of_another_structure_has_no_drafts_by_request():
    core = Core("")
    del core.vllm_config
    assert find_missing(core, "") == {"attribution": OLDER}


def test_names_are_those_of_the_gateway():
    """Modules inside the worker cannot share its enumeration without importing it at every start."""
    names = (capabilities.DEFERRED_PREFILL, capabilities.ATTRIBUTION)
    assert names == (Capability.DEFERRED_PREFILL, Capability.ATTRIBUTION)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"drafter": None}, "the runner has no draft model that the plugin knows"),
        ({"use_aux_hidden_state_outputs": False}, "the draft does not read the target's layers"),
        ({"use_async_scheduling": True}, "the engine schedules asynchronously"),
        ({"supports_mm_inputs": True}, "the target reads images, sound or video"),
        ({"kv_cache_config": SimpleNamespace(kv_cache_groups=[1, 2])}, "there are several KV caches"),
    ],
)
def test_why_a_runner_does_not_defer(change: dict[str, Any], problem):
    runner = {
        "drafter": SimpleNamespace(needs_extra_input_slots=False),
        "use_aux_hidden_state_outputs": True,
        "use_async_scheduling": False,
        "supports_mm_inputs": False,
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[1]),
    }
    assert find_runner_problem(SimpleNamespace(**runner | change)) == problem


def reading_of(answer: str, **change: Any) -> EngineReading:
    return parse_reading(200, json.dumps(json.loads(answer) | change))


def test_the_gateway_reads_what_is_missing():
    control = SchedulerControl(FakeScheduler(), FakeClock(), {})
    answer = control.command("{}", "vllm", {"attribution": "why", "of a later version": "x"})
    assert missing_of(reading_of(answer)) == {Capability.ATTRIBUTION: "why"}
    assert missing_of(reading_of(control.command("{}", "vllm"))) == {}


def test_an_uncontrollable_engine_may_have_the_other_capabilities():
    answer = SchedulerControl.cannot(["a shape", "no figures"], "vllm", {"deferred_prefill": "why"})
    assert missing_of(reading_of(answer)) == {
        Capability.CONTROL: "a shape; no figures",
        Capability.DEFERRED_PREFILL: "why",
    }


@pytest.mark.parametrize("missing", [None, "x", []])
def test_an_earlier_plugin_is_not_assumed_to_have_them(missing):
    answer = SchedulerControl(FakeScheduler(), FakeClock(), {}).command("{}", "vllm")
    unreported = "the worker's plugin does not report it"
    assert missing_of(reading_of(answer, missing_capabilities=missing)) == {
        Capability.DEFERRED_PREFILL: unreported,
        Capability.ATTRIBUTION: unreported,
    }


def test_a_worker_without_the_plugin_has_none():
    missing = missing_of(parse_reading(404, ""))
    assert set(missing) == set(Capability)
    assert set(missing.values()) == {"the worker runs without the plugin, or was given no control token"}
    assert missing_of(None) == dict.fromkeys(Capability, "not scraped yet")
