"""A draft under test is never the plan to fall back to."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.launch import LaunchPlan
from appliance.serving.plans import ChosenPlan, WorkerPlans
from appliance.serving.restart_request import CandidateDraft, RestartRequest, parse_restart_request

DRAFT = f"sha256:{'a' * 64}"
TRIED = RestartRequest(with_draft=True, candidate=CandidateDraft(draft=DRAFT, promotion="01JABC"))


def plan(name: str) -> LaunchPlan:
    return LaunchPlan(
        argv=(name,),
        environment={},
        url="http://127.0.0.1:9",
        host="127.0.0.1",
        port=9,
        control_port=10,
        model="demo",
        drain_seconds=1,
        max_startup_seconds=10,
    )


class Standing:
    """The active draft; a draft under test counts until its promotion ends."""

    def __init__(self) -> None:
        self.in_service, self.over = "settings", False

    def choose(self, request: RestartRequest) -> ChosenPlan:
        if request.candidate is not None and not self.over:
            return ChosenPlan(plan=plan("trial"), is_trial=True)
        return ChosenPlan(plan=plan(self.in_service))


@pytest.fixture
def standing() -> Standing:
    return Standing()


@pytest.fixture
def plans(standing) -> WorkerPlans:
    return WorkerPlans(plan("settings"), target_only=plan("alone"), choose=standing.choose)


async def start(plans: WorkerPlans, *, healthy: bool = True) -> str:
    """Start by the plan in force, and return it."""
    await plans.prepare()
    if healthy:
        plans.record_health()
    return plans.current.argv[0]


def request(plans: WorkerPlans, wanted: RestartRequest) -> None:
    plans.request_restart(wanted)
    assert plans.accept_request()


async def test_draft_is_chosen_before_every_start(plans, standing):
    """It may have changed while the worker ran."""
    assert await start(plans) == "settings"
    standing.in_service = "promoted"
    assert await start(plans) == "promoted"


async def test_draft_under_test_does_not_outlive_its_promotion(plans, standing):
    """A worker that crashes restarts with it during the promotion, and not afterwards."""
    request(plans, TRIED)
    assert [await start(plans), await start(plans)] == ["trial", "trial"]
    standing.over = True
    assert await start(plans) == "settings"


async def test_start_without_draft_chooses_none(plans, standing):
    """The request excludes a draft, whichever is active."""
    standing.in_service = "promoted"
    request(plans, RestartRequest(with_draft=False))
    assert await start(plans) == "alone"
    assert plans.is_hard_off
    request(plans, RestartRequest(with_draft=True))
    assert await start(plans) == "promoted"
    assert not plans.is_hard_off


async def test_failed_trial_falls_back_to_the_active_draft(plans, standing):
    """It may have changed since the last start."""
    assert await start(plans) == "settings"
    standing.in_service = "promoted"
    request(plans, TRIED)
    assert await start(plans, healthy=False) == "trial"
    assert plans.roll_back()
    assert await start(plans) == "promoted"


async def test_failed_active_draft_rolls_back_to_the_last_working_plan(plans, standing):
    """That plan stays in force until a restart is requested: choosing again would give the same draft."""
    assert await start(plans) == "settings"
    standing.in_service = "broken"
    assert await start(plans, healthy=False) == "broken"
    assert plans.roll_back()
    assert [await start(plans), await start(plans)] == ["settings", "settings"]
    assert not plans.roll_back()
    request(plans, RestartRequest(with_draft=True))
    assert await start(plans, healthy=False) == "broken"


async def test_draft_under_test_is_never_rolled_back_to(plans, standing):
    """It was never promoted."""
    assert await start(plans) == "settings"
    request(plans, TRIED)
    assert await start(plans) == "trial"
    standing.over, standing.in_service = True, "broken"
    assert await start(plans, healthy=False) == "broken"
    assert plans.roll_back()
    assert await start(plans) == "settings"


async def test_worker_that_never_worked_cannot_roll_back(plans):
    """Its supervisor gives up."""
    assert await start(plans, healthy=False) == "settings"
    assert not plans.roll_back()


def test_restart_request_round_trips_through_the_file(tmp_path):
    """It is read once."""
    file = tmp_path / "request"
    for wanted in (TRIED, RestartRequest(with_draft=True), RestartRequest(with_draft=False)):
        assert parse_restart_request(json.loads(json.dumps(wanted.body()))) == wanted
    plans = WorkerPlans(plan("settings"), restart_file=file)
    file.write_text(json.dumps(TRIED.body()))
    assert plans.restart_requested
    assert plans.accept_request()
    assert plans._granted == TRIED
    assert not plans.accept_request()


@pytest.mark.parametrize(
    "content",
    [
        {"with_draft": True, "draft": DRAFT},
        {"with_draft": True, "promotion": "01JABC"},
        {"with_draft": False, "draft": DRAFT, "promotion": "01JABC"},
        {"with_draft": True, "draft": "../../etc", "promotion": "01JABC"},
        {"with_draft": True, "draft": DRAFT.upper(), "promotion": "01JABC"},
        {"with_draft": True, "draft": DRAFT, "promotion": "../P"},
        {"with_draft": True, "draft": 1, "promotion": "01JABC"},
        {"with_draft": 1},
        [],
        None,
    ],
)
def test_malformed_restart_request_is_ignored(content):
    """A draft without its promotion would stay under test for ever."""
    assert parse_restart_request(content) is None


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_any_json_is_a_restart_request_or_none(content):
    found = parse_restart_request(content)
    assert found is None or parse_restart_request(found.body()) == found
