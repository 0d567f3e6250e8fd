"""
What the cost report says drafting saved, against what the worker's own counters say, on a real worker.

The benchmark of it in short (`benchmarks.cost_saving`): segments without drafts and with them in turn.
"""

import asyncio

import pytest

from benchmarks.cost_saving.estimate import Comparison
from benchmarks.cost_saving.run import ENVIRONMENT, PRICE_PER_HOUR, Driver, Found, Plan
from demo.process import ApplianceProcess

pytestmark = [pytest.mark.worker, pytest.mark.long]

PLAN = Plan(concurrency=(1,), rounds=5, seconds=4.0, learn=12.0)
WIDEST = 2.5
"""Bounds that are so many times apart, of what the target alone would take, would agree with anything."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Comparison:
    """One concurrency, measured."""
    data = tmp_path_factory.mktemp("cost-saving") / "data"

    async def measure(appliance: ApplianceProcess) -> Comparison:
        found = Found()
        await (await Driver.connect(appliance, PLAN, print)).run(found)
        (comparison,) = found.comparisons
        return comparison

    with ApplianceProcess("up", data=data, environment=ENVIRONMENT) as appliance:
        comparison = asyncio.run(measure(appliance))
    assert appliance.process.returncode == 0, "".join(appliance.output)
    return comparison


def test_the_reports_saving_agrees_with_the_measured_one(found):
    """Within what both say of their uncertainty."""
    assert found.agrees, f"the report: {found.told.seconds}, measured: {found.measured.seconds}"


def test_both_say_enough_to_be_wrong(found):
    """Bounds that hold everything agree with everything: so it is on a machine with much else to do."""
    spreads = (found.told.spread, found.measured.spread)
    assert max(spreads) < WIDEST, f"too vague, report and measurement: {spreads}; is the machine busy?"


def test_both_speak_of_the_same_steps(found):
    """To the token, and to the microsecond of each look."""
    assert found.told.tokens == found.measured.tokens > 500
    assert found.told.spent == pytest.approx(found.measured.spent, abs=0.01)


def test_money_is_saved_time_at_its_price(found):
    """As nothing but the machine has a price here."""
    for bound in ("mean", "low", "high"):
        seconds, money = (getattr(part, bound) for part in (found.told.seconds, found.told.money))
        assert money == pytest.approx(seconds * PRICE_PER_HOUR / 3600)
