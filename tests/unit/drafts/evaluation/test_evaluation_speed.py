"""Speed is counted by the engine, and compared between steps of one kind."""

import pytest

from appliance.drafts.evaluation.aggregate import gain, gains, speed_ratio, step_totals
from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.evaluation_results import StepResult, StepTotals


def pace(batch: int, draft_tokens: int, *, step_seconds: float, tokens_per_step: float, steps: int = 100):
    return StepTotals(
        batch=batch,
        draft_tokens=draft_tokens,
        steps=steps,
        seconds=steps * step_seconds,
        requests=steps * batch,
        tokens=round(steps * tokens_per_step),
    )


def paces(factor: float = 1.0, length: float = 2.4) -> tuple[StepTotals, ...]:
    """One round at batch size 1; `factor` is how slow the whole process is."""
    return (
        pace(1, 3, step_seconds=0.006 * factor, tokens_per_step=length),
        pace(1, 0, step_seconds=0.004 * factor, tokens_per_step=1),
    )


def result(arm: Arm, number: int, measured: tuple[StepTotals, ...]) -> StepResult:
    return StepResult(arm=arm, number=number, answered=(), paces=measured)


def test_gain_is_tokens_per_engine_second_with_over_without_drafts():
    """2.4 tokens in 6 ms over one in 4 ms."""
    assert gain(paces()) == pytest.approx(2.4 / 1.5)


def test_gain_does_not_depend_on_the_speed_of_the_process():
    assert gain(paces(1.1)) == pytest.approx(gain(paces()))


def test_steps_are_compared_within_their_batch_bucket():
    """Larger batches are faster with and without drafts."""
    both = (*paces(), pace(4, 3, step_seconds=0.016, tokens_per_step=9.6))
    assert gain(both) == pytest.approx(gain(paces()))
    large = pace(4, 0, step_seconds=0.008, tokens_per_step=4)
    # 9.6 tokens of 2 ms each without drafts, in 16 ms: each bucket weighs by its time.
    assert gain((*both, large)) == pytest.approx((240 * 0.004 + 960 * 0.002) / (0.6 + 1.6))


def test_too_few_steps_give_no_gain():
    few = pace(1, 0, step_seconds=0.004, tokens_per_step=1, steps=7)
    assert gain((paces()[0], few)) is None
    assert gain(paces()[:1]) is None
    assert gain(()) is None


def test_speed_ratio_is_taken_by_round():
    """Harder prompts are harder for both."""
    lengths = (2.0, 2.4, 3.0, 1.6)
    mine = {number: gain(paces(1.0, 1.1 * length)) for number, length in enumerate(lengths)}
    other = {number: gain(paces(1.2, length)) for number, length in enumerate(lengths)}
    ratio = speed_ratio(mine, other)
    assert ratio.value == pytest.approx(1.1, abs=0.01)
    assert ratio.high - ratio.low < 0.03
    alone = speed_ratio(mine, None)
    assert alone.low < alone.value < alone.high


def test_rounds_of_one_arm_alone_do_not_count():
    """And one common round gives no interval."""
    assert speed_ratio({0: 1.5, 1: 1.5}, {1: 1.4, 2: 1.4}) is None


def test_step_totals_sum_over_the_rounds_of_an_arm():
    results = [result(Arm.CANDIDATE, 0, paces()), result(Arm.CANDIDATE, 1, paces())]
    results.append(result(Arm.INCUMBENT, 0, paces(3.0)))
    plain, drafted = step_totals(results, Arm.CANDIDATE)
    assert (plain.draft_tokens, plain.steps, plain.tokens) == (0, 200, 200)
    assert (drafted.draft_tokens, drafted.steps, drafted.tokens) == (3, 200, 480)
    assert drafted.seconds == pytest.approx(1.2)
    assert gains(results, Arm.CANDIDATE).keys() == {0, 1}
