"""Everything once, and drift weighs on both drafts alike."""

import pytest

from appliance.drafts.evaluation.arms import Arm, MeasurementStep, plan_schedule

INCUMBENT, CANDIDATE = Arm.INCUMBENT, Arm.CANDIDATE


def steps_of(course) -> list[MeasurementStep]:
    return [step for shift in course for step in shift.steps]


@pytest.mark.parametrize("rounds", [1, 2, 5, 8])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("incumbent", [True, False])
def test_every_arm_takes_every_round_once(rounds, together, incumbent):
    """Whatever the order is."""
    course = plan_schedule(rounds, incumbent=incumbent, together=together)
    arms = [Arm.TARGET, CANDIDATE, *([INCUMBENT] if incumbent else [])]
    wanted = {MeasurementStep(arm=arm, number=number) for arm in arms for number in range(rounds)}
    assert set(steps_of(course)) == wanted
    assert len(steps_of(course)) == len(wanted)
    assert all(step.arm in shift.arms for shift in course for step in shift.steps)
    assert steps_of(course)[0].arm is Arm.TARGET


def test_two_workers_that_fit_take_turns_the_other_one_first_each_time():
    """A machine that slows down steadily slows both down alike."""
    _target, pair = plan_schedule(8, incumbent=True, together=True)
    order = [(step.arm, step.number) for step in pair.steps]
    assert order[:4] == [(INCUMBENT, 0), (CANDIDATE, 0), (CANDIDATE, 1), (INCUMBENT, 1)]
    at = {arm: [place for place, step in enumerate(pair.steps) if step.arm is arm] for arm in pair.arms}
    assert sum(at[INCUMBENT]) == sum(at[CANDIDATE])


def test_two_workers_that_do_not_fit_run_in_turn_the_candidate_in_the_middle():
    """Three starts, and the mean moment of both is the same."""
    course = plan_schedule(8, incumbent=True, together=False)
    assert [shift.arms for shift in course] == [(Arm.TARGET,), (INCUMBENT,), (CANDIDATE,), (INCUMBENT,)]
    order = [step.arm for shift in course[1:] for step in shift.steps]
    at = {arm: [place for place, each in enumerate(order) if each is arm] for arm in (INCUMBENT, CANDIDATE)}
    assert sum(at[INCUMBENT]) == sum(at[CANDIDATE])


def test_workers_of_finished_arms_are_not_started_again():
    """What is left of a shift names those it needs."""
    _target, pair = plan_schedule(2, incumbent=True, together=True)
    done = [step for step in pair.steps if step.arm is INCUMBENT]
    left = pair.without(done)
    assert left.arms == (CANDIDATE,)
    assert left.steps == (MeasurementStep(arm=CANDIDATE, number=0), MeasurementStep(arm=CANDIDATE, number=1))
    assert pair.without(pair.steps).arms == ()
