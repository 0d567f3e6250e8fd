"""The schedule takes every step once, and drift affects both drafts equally."""

import pytest

from appliance.drafts.evaluation.arms import Arm, MeasurementStep, plan_schedule

INCUMBENT, CANDIDATE = Arm.INCUMBENT, Arm.CANDIDATE


def steps_of(schedule) -> list[MeasurementStep]:
    return [step for phase in schedule for step in phase.steps]


@pytest.mark.parametrize("rounds", [1, 2, 5, 8])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("incumbent", [True, False])
def test_every_arm_takes_every_round_once(rounds, together, incumbent):
    schedule = plan_schedule(rounds, incumbent=incumbent, together=together)
    arms = [Arm.TARGET, CANDIDATE, *([INCUMBENT] if incumbent else [])]
    wanted = {MeasurementStep(arm=arm, number=number) for arm in arms for number in range(rounds)}
    assert set(steps_of(schedule)) == wanted
    assert len(steps_of(schedule)) == len(wanted)
    assert all(step.arm in phase.arms for phase in schedule for step in phase.steps)
    assert steps_of(schedule)[0].arm is Arm.TARGET


def test_two_workers_that_fit_alternate_which_comes_first():
    """A steady drift of the machine affects both equally."""
    _target, pair = plan_schedule(8, incumbent=True, together=True)
    order = [(step.arm, step.number) for step in pair.steps]
    assert order[:4] == [(INCUMBENT, 0), (CANDIDATE, 0), (CANDIDATE, 1), (INCUMBENT, 1)]
    at = {arm: [place for place, step in enumerate(pair.steps) if step.arm is arm] for arm in pair.arms}
    assert sum(at[INCUMBENT]) == sum(at[CANDIDATE])


def test_two_workers_that_do_not_fit_run_in_three_turns():
    """The candidate in the middle: the mean time of both is equal."""
    schedule = plan_schedule(8, incumbent=True, together=False)
    assert [phase.arms for phase in schedule] == [(Arm.TARGET,), (INCUMBENT,), (CANDIDATE,), (INCUMBENT,)]
    order = [step.arm for phase in schedule[1:] for step in phase.steps]
    at = {arm: [place for place, each in enumerate(order) if each is arm] for arm in (INCUMBENT, CANDIDATE)}
    assert sum(at[INCUMBENT]) == sum(at[CANDIDATE])


def test_workers_of_finished_arms_are_not_started_again():
    _target, pair = plan_schedule(2, incumbent=True, together=True)
    done = [step for step in pair.steps if step.arm is INCUMBENT]
    left = pair.without(done)
    assert left.arms == (CANDIDATE,)
    assert left.steps == (MeasurementStep(arm=CANDIDATE, number=0), MeasurementStep(arm=CANDIDATE, number=1))
    assert pair.without(pair.steps).arms == ()
