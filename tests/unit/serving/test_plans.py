"""What is on trial is never what one falls back to."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.launch import LaunchPlan
from appliance.serving.plans import Chosen, WorkerPlans
from appliance.serving.restart_request import Candidate, Wish, parse_wish

DRAFT = f"sha256:{'a' * 64}"
TRIED = Wish(with_draft=True, candidate=Candidate(draft=DRAFT, promotion="01JABC"))


def plan(name: str) -> LaunchPlan:
    return LaunchPlan(
        argv=(name,),
        environment={},
        url="http://127.0.0.1:9",
        host="127.0.0.1",
        port=9,
        model="demo",
        drain_seconds=1,
        max_startup_seconds=10,
    )


class Standing:
    """What is in service; a draft on trial counts until its promotion is over."""

    def __init__(self) -> None:
        self.in_service, self.over = "settings", False

    def choose(self, wish: Wish) -> Chosen:
        if wish.candidate is not None and not self.over:
            return Chosen(plan=plan("trial"), is_trial=True)
        return Chosen(plan=plan(self.in_service))


@pytest.fixture
def standing() -> Standing:
    return Standing()


@pytest.fixture
def plans(standing) -> WorkerPlans:
    return WorkerPlans(plan("settings"), target_only=plan("alone"), choose=standing.choose)


async def start(plans: WorkerPlans, *, healthy: bool = True) -> str:
    """Start by the plan in force; which one that was."""
    await plans.prepare()
    if healthy:
        plans.saw_health()
    return plans.current.argv[0]


def wish(plans: WorkerPlans, wished: Wish) -> None:
    plans.wish(wished)
    assert plans.take_wish()


async def test_each_start_asks_anew_what_is_in_service(plans, standing):
    """It may have changed while the worker ran."""
    assert await start(plans) == "settings"
    standing.in_service = "promoted"
    assert await start(plans) == "promoted"


async def test_a_trial_lasts_as_long_as_its_promotion(plans, standing):
    """Whoever crashes comes back on trial, and afterwards does not."""
    wish(plans, TRIED)
    assert [await start(plans), await start(plans)] == ["trial", "trial"]
    standing.over = True
    assert await start(plans) == "settings"


async def test_a_worker_without_its_draft_is_asked_for_none(plans, standing):
    """It was told to leave it out, whatever is in service."""
    standing.in_service = "promoted"
    wish(plans, Wish(with_draft=False))
    assert await start(plans) == "alone"
    assert plans.is_hard_off
    wish(plans, Wish(with_draft=True))
    assert await start(plans) == "promoted"
    assert not plans.is_hard_off


async def test_a_trial_that_does_not_start_is_left_for_what_is_in_service(plans, standing):
    """Which may have changed since the worker was started last."""
    assert await start(plans) == "settings"
    standing.in_service = "promoted"
    wish(plans, TRIED)
    assert await start(plans, healthy=False) == "trial"
    assert plans.go_back()
    assert await start(plans) == "promoted"


async def test_what_is_in_service_and_does_not_start_is_left_for_what_last_worked(plans, standing):
    """That stays in force until somebody wishes otherwise: asking anew would bring the same again."""
    assert await start(plans) == "settings"
    standing.in_service = "broken"
    assert await start(plans, healthy=False) == "broken"
    assert plans.go_back()
    assert [await start(plans), await start(plans)] == ["settings", "settings"]
    assert not plans.go_back()
    wish(plans, Wish(with_draft=True))
    assert await start(plans, healthy=False) == "broken"


async def test_a_trial_that_worked_is_nothing_to_come_back_to(plans, standing):
    """It was never decided on."""
    assert await start(plans) == "settings"
    wish(plans, TRIED)
    assert await start(plans) == "trial"
    standing.over, standing.in_service = True, "broken"
    assert await start(plans, healthy=False) == "broken"
    assert plans.go_back()
    assert await start(plans) == "settings"


async def test_a_worker_that_never_worked_has_nothing_to_go_back_to(plans):
    """Its supervisor gives up."""
    assert await start(plans, healthy=False) == "settings"
    assert not plans.go_back()


def test_what_a_wish_says_is_what_is_found(tmp_path):
    """By way of the file, once."""
    file = tmp_path / "wish"
    for wished in (TRIED, Wish(with_draft=True), Wish(with_draft=False)):
        assert parse_wish(json.loads(json.dumps(wished.body()))) == wished
    plans = WorkerPlans(plan("settings"), restart_file=file)
    file.write_text(json.dumps(TRIED.body()))
    assert plans.is_wished
    assert plans.take_wish()
    assert plans._granted == TRIED
    assert not plans.take_wish()


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
def test_what_is_no_wish_is_none(content):
    """Nothing is guessed: a draft without its promotion would never end being tried."""
    assert parse_wish(content) is None


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_no_json_breaks_the_reader(content):
    """Whatever lies in the file."""
    found = parse_wish(content)
    assert found is None or parse_wish(found.body()) == found
