"""
What the cost report says drafting saved, against what the worker's own counters say, on a real worker.

The benchmark of it in short (`benchmarks.cost_saving`): segments without drafts and with them in turn.  Their
engine time is compared within one run, by bounds that are too narrow for a saving half or twice as large.
"""

import asyncio

import pytest

from benchmarks.cost_saving.estimate import WRONG, Comparison
from benchmarks.cost_saving.run import ENVIRONMENT, PRICE_PER_HOUR, Driver, Found, Plan
from demo.process import ApplianceProcess

pytestmark = [pytest.mark.worker, pytest.mark.slow]

PLAN = Plan(concurrency=(1,), rounds=8, most_rounds=60, seconds=2.0, learn=8.0)
LEARN_SOON = {"APPLIANCE_MONITOR__EXPLORATION_SHARE": "0.1"}
"""The report knows what the target alone takes by the monitor's measurements: let there be more of them."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Comparison:
    """One concurrency, measured; how precise it is decides when it ends, not whether it agrees."""
    data = tmp_path_factory.mktemp("cost-saving") / "data"

    async def measure(appliance: ApplianceProcess) -> Comparison:
        found = Found()
        await (await Driver.connect(appliance, PLAN, print)).run(found)
        (comparison,) = found.comparisons
        return comparison

    environment = {**ENVIRONMENT, **LEARN_SOON}
    with ApplianceProcess("up", data=data, environment=environment) as appliance:
        comparison = asyncio.run(measure(appliance))
    assert appliance.process.returncode == 0, "".join(appliance.output)
    return comparison


def test_the_reports_saving_agrees_with_the_measured_one(found):
    """Within the uncertainty of both."""
    assert found.agrees, f"the report: {found.told.seconds}, measured: {found.measured.seconds}"


@pytest.mark.parametrize("factor", WRONG)
def test_a_saving_that_is_wrong_would_not_agree(found, factor):
    """Otherwise the bounds would be too wide to prove anything."""
    told, measured = found.told.seconds, found.measured.seconds
    assert not found.agrees_with(factor), f"too vague, {told} and {measured}: is the machine busy?"


def test_status_and_metrics_report_the_same_steps(found):
    """To the token, and to the microsecond of each poll."""
    assert found.told.tokens == found.measured.tokens > 500
    assert found.told.spent == pytest.approx(found.measured.spent, abs=0.01)


def test_money_is_saved_time_at_its_price(found):
    """As nothing but the machine has a price here."""
    for bound in ("mean", "low", "high"):
        seconds, money = (getattr(part, bound) for part in (found.told.seconds, found.told.money))
        assert money == pytest.approx(seconds * PRICE_PER_HOUR / 3600)
