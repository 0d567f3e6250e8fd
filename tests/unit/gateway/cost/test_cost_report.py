"""Lines that add up, formulas, and self-contained pages."""

import csv
import io
import json
import re
from dataclasses import replace
from datetime import date
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.cost.prices import HOURS_PER_YEAR, capital_per_hour, per_million, prices_of
from appliance.gateway.cost.report import CostReport
from appliance.gateway.cost.report_page import render_page
from appliance.gateway.cost.rows import (
    Recorded,
    RecordingPeriod,
    ShareKey,
    TenantUsage,
    WorkerKey,
    WorkerTime,
    begin_of,
)
from appliance.gateway.cost.sheet import IDLE, TOTAL, UNATTRIBUTED, render_sheet
from appliance.gateway.cost.summary import make_report
from appliance.infra.settings import CostSettings

ZONE = ZoneInfo("Africa/Nairobi")
DAY, NEXT = date(2026, 11, 20), date(2026, 11, 21)
SLOT = begin_of(DAY, ZONE)
HOUR_US = 3_600_000_000
PRICED = CostSettings(
    currency="KES",
    worker_price_per_hour=10.0,
    people_per_month=HOURS_PER_YEAR / 12,  # one an hour
    power_price_per_kwh=0.5,
    pue=1.5,
)


def period(start: str, gateway: str) -> RecordingPeriod:
    return RecordingPeriod(
        start=start,
        gateway=gateway,
        began_at=SLOT,
        until=SLOT + 86400,
        flush_seconds=30,
        closed=True,
    )


def share(tenant: str, us: int, *, start: str = "s1", worker: str = "w1", mj: int = 0, **counts: int):
    return start, ShareKey(SLOT, worker, "m", tenant), TenantUsage(engine_us=us, millijoules=mj, **counts)


def hour(*, start: str = "s1", worker: str = "w1", busy: int, observed: int = HOUR_US, **more: int):
    return start, WorkerKey(SLOT, worker), WorkerTime(observed_us=observed, busy_us=busy, **more)


def report(shares=(), workers=(), periods=None, settings: CostSettings = PRICED) -> CostReport:
    recorded = Recorded(
        periods=(period("s1", "a"),) if periods is None else tuple(periods),
        shares=tuple(shares),
        workers=tuple(workers),
    )
    return make_report(recorded, first=DAY, end=NEXT, settings=settings, zone=ZONE, now=SLOT + 10 * 86400)


def test_an_hour_of_one_worker_to_the_cent():
    """Half of it is one tenant's, a tenth another's, a tenth no tenant's, the rest idle."""
    made = report(
        [
            share("red", HOUR_US // 2, mj=1_800_000_000, requests=3, delivered_tokens=250_000),
            share("blue", HOUR_US // 10, mj=0, requests=1, draft_tokens=30, accepted_tokens=10),
        ],
        [hour(busy=HOUR_US * 7 // 10, millijoules=7_200_000_000, busy_millijoules=3_600_000_000)],
    )
    red, blue = made.lines
    assert (red.cost.capital, red.cost.people) == (pytest.approx(5.0), pytest.approx(0.5))
    assert red.cost.energy == pytest.approx(0.5 * 1.5 * 0.5), "half a kWh, at the meter, at its price"
    assert red.cost_per_million == pytest.approx(red.cost.total * 4)
    assert (blue.wasted_tokens, blue.cost_per_million) == (20, None)
    assert made.idle.seconds == pytest.approx(0.3 * 3600)
    assert made.unattributed.seconds == pytest.approx(0.1 * 3600)
    assert made.total.cost.total == pytest.approx(10 + 1 + 2 * 1.5 * 0.5)
    assert made.total.cost_per_million == pytest.approx(made.total.cost.total * 4)


SHARES = st.lists(st.integers(min_value=0, max_value=HOUR_US // 8), max_size=6)


@given(SHARES, st.integers(min_value=HOUR_US // 2, max_value=HOUR_US), SHARES)
def test_lines_add_up_to_what_the_workers_cost(first, busy, second):
    """For any tenants and workers; nothing is lost or distributed."""
    made = report(
        [share(f"t{n}", us, worker="w1") for n, us in enumerate(first)]
        + [share(f"t{n}", us, worker="w2") for n, us in enumerate(second)],
        [hour(busy=busy, worker="w1"), hour(busy=HOUR_US // 3, worker="w2")],
    )
    lines = sum(line.cost.total for line in made.lines)
    assert lines + made.idle.cost.total + made.unattributed.cost.total == pytest.approx(made.total.cost.total)
    assert made.total.cost.total == pytest.approx(sum(worker.cost.total for worker in made.workers))
    assert made.total.cost.capital == pytest.approx(2 * 10.0)
    assert made.total.cost.people == pytest.approx(1.0), "people are paid once, however many workers"


def test_gateways_that_share_a_worker_do_not_double_it():
    """Each observes all of it and has requests of its own; a restarted gateway continues its rows."""
    made = report(
        [share("red", HOUR_US // 4), share("blue", HOUR_US // 4, start="s3")],
        [
            hour(busy=HOUR_US // 4, observed=HOUR_US // 2),
            hour(busy=HOUR_US // 4, observed=HOUR_US // 4, start="s2"),
            hour(busy=HOUR_US // 2, start="s3"),
        ],
        [period("s1", "a"), period("s2", "a"), period("s3", "b")],
    )
    assert made.observed_seconds == 3600
    assert made.busy_seconds == 1800
    assert made.unattributed.seconds == 0


def test_gateways_that_follow_one_another_add_up():
    """Half an hour each under different names, like replaced pods; or some minutes of overlap."""
    halves = [
        hour(busy=HOUR_US // 4, observed=HOUR_US // 2),
        hour(busy=HOUR_US // 4, observed=HOUR_US // 2, start="s2"),
    ]
    first = replace(period("s1", "a"), until=SLOT + 1800)
    for begins, observed in ((1800, 3600), (1500, 3300)):
        second = replace(period("s2", "b"), began_at=SLOT + begins, until=SLOT + begins + 1800)
        made = report([share("red", HOUR_US // 2)], halves, [first, second])
        assert made.observed_seconds == pytest.approx(observed)
        assert made.busy_seconds == pytest.approx(observed / 2)


def test_savings_with_their_bounds():
    """A saved hour is worth an hour; bounds stay in order, even below 0."""
    made = report(
        [],
        [
            hour(
                busy=HOUR_US // 2,
                draft_us=HOUR_US // 4,
                draft_tokens=1000,
                target_only_us=HOUR_US // 2,
                target_only_low_us=HOUR_US // 8,
                target_only_high_us=HOUR_US,
            )
        ],
    )
    saving = made.saving
    assert saving.seconds == pytest.approx(900)
    assert saving.money == pytest.approx(0.25 * 11)
    assert saving.tokens == pytest.approx(500), "the same time without would have given half of them"
    assert saving.seconds_low < 0 < saving.seconds < saving.seconds_high
    assert saving.tokens_low < saving.tokens < saving.tokens_high
    assert saving.money_low < saving.money < saving.money_high


def test_prices_that_are_not_set_are_named():
    """Seconds and tokens are complete, and a note says what the sums exclude."""
    made = report([share("red", 1, delivered_tokens=5)], [hour(busy=1)], settings=CostSettings())
    assert made.total.cost.total == 0
    assert "cost.worker_price" in made.notes[0]
    assert "cost.people_per_month" in made.notes[0]
    assert "cost.power_price_per_kwh" in made.notes[0]


def test_unmeasured_energy_is_noted():
    """Also for a worker on several machines: the driver knows the GPUs of one."""
    made = report(workers=[hour(busy=HOUR_US // 2, unknown_power_us=HOUR_US)])
    assert made.workers[0].metered_seconds == 0
    assert made.workers[0].unknown_power_seconds == 3600
    (note,) = [note for note in made.notes if "Energy is unknown" in note]
    assert "spans several machines" in note
    known = report(workers=[hour(busy=HOUR_US // 2, metered_us=HOUR_US, millijoules=10**9)])
    assert not [note for note in known.notes if "Energy" in note]


def test_estimated_time_and_claims_beyond_the_measured_time_are_noted():
    """Engine time that was not measured, and gateways that together claim more than was."""
    measured = report([share("red", HOUR_US // 2)], [hour(busy=HOUR_US // 2)])
    assert not [note for note in measured.notes if "engine time" in note]
    made = report([share("red", HOUR_US)], [hour(busy=HOUR_US // 2, estimated_us=HOUR_US // 2)])
    assert made.workers[0].estimated_seconds == 1800
    assert made.unattributed.seconds == -1800
    estimated, claimed = (note for note in made.notes if "engine time" in note)
    assert "the time with a request in flight was used instead" in estimated
    assert "claimed more engine time than was measured" in claimed


def test_formulas():
    assert capital_per_hour(CostSettings(worker_price=35_064, depreciation_years=4)) == pytest.approx(1.0)
    assert capital_per_hour(CostSettings()) is None
    assert per_million(2.0, 500_000) == 4.0
    assert per_million(2.0, 0) is None
    assert per_million(0.0, 5) is None, "what is not priced is not free"
    assert prices_of(PRICED, hours=0, worker_hours=0).people_per_hour == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker_price": 1.0, "worker_price_per_hour": 1.0},
        {"watts_idle": 5.0},
        {"pue": 0.5},
        {"currency": "<b>"},
        {"flush_seconds": 61},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValueError, match=r"worker_price|watts_idle|pue|currency|flush_seconds"):
        CostSettings(**wrong)


def shown() -> CostReport:
    return report(
        [share("red<&>", HOUR_US // 2, delivered_tokens=7), share("blue", HOUR_US // 4)],
        [hour(busy=HOUR_US, draft_us=5, draft_tokens=3, target_only_us=9)],
        [],
    )


def test_page_is_self_contained_and_escaped():
    """No script, no address, no external file; names cannot become markup."""
    page = render_page(shown())
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:|\bsrc=|\bhref=", page)
    assert "red<&" not in page
    assert "red&lt;&amp;&gt;" in page
    assert "none: idle" in page
    assert "no gateway ran" in page
    assert page.count("<svg") == 1
    assert "nothing could be compared" not in page.lower()


def test_empty_report_renders_as_a_page():
    page = render_page(report())
    assert "No time was recorded" in page


def test_csv_adds_up_and_contains_no_formula():
    """One header and one row per line; the total is the sum of the others to the cent."""
    made = report(
        [("s1", ShareKey(SLOT, "w1", "=1+1", "red"), TenantUsage(engine_us=HOUR_US // 3))],
        [hour(busy=HOUR_US // 2)],
    )
    rows = list(csv.DictReader(io.StringIO(render_sheet(made))))
    assert [row["tenant"] for row in rows] == ["red", IDLE, UNATTRIBUTED, TOTAL]
    assert rows[0]["model"] == "'=1+1"
    for column in ("engine_seconds", "kwh", "capital", "people", "energy", "total"):
        assert sum(float(row[column]) for row in rows[:-1]) == pytest.approx(
            float(rows[-1][column]), abs=1e-5
        )
    assert {row["currency"] for row in rows} == {"KES"}


def test_json_is_read_back():
    made = shown()
    assert CostReport.model_validate_json(made.model_dump_json()) == made
    assert json.loads(made.model_dump_json())["begin"].startswith("2026-11-20T00:00:00+03:00")
