"""Usage and cost in the console: the same figures as the command line's report."""

import csv
import io
import re
from contextlib import closing
from datetime import date
from itertools import cycle
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import yaml
from markupsafe import escape

from appliance.api.console.bars import GROUPS, HEIGHT, OTHERS, WIDTH, Bar, draw_bars
from appliance.errors import CostUnavailableError
from appliance.gateway.cost.reader import UsageQuery, UsageReader, read_usage
from appliance.gateway.cost.rows import (
    SLOT_SECONDS,
    RecordingPeriod,
    ShareKey,
    TenantUsage,
    WorkerKey,
    WorkerTime,
    begin_of,
)
from appliance.gateway.cost.store import CostStore
from appliance.infra.settings import CostSettings
from appliance.tenancy import AdminScope
from tests.command import run_command
from tests.migrated import migrated
from tests.unit.api.console_site import HOSTILE, logged_in

ZONE = ZoneInfo("Africa/Nairobi")
TODAY = date(2026, 11, 20)
NOW = begin_of(TODAY, ZONE) + 15 * 3600.0
PRICES = {
    "currency": "KES",
    "worker_price_per_hour": 10.0,
    "people_per_month": 7300.0,
    "power_price_per_kwh": 24.5,
}
WHO = (("red", "m1"), ("red", "m2"), (HOSTILE, "m1"))


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Forty days of two workers, up to now; tenants take turns."""
    url = migrated(tmp_path / "audit.db")
    begin = int(NOW) - 40 * 86400
    turns = cycle(range(1, 8))
    shares, times = {}, {}
    for slot in range(begin, int(NOW), SLOT_SECONDS):
        for worker in ("w1", "w2"):
            given = 0
            for tenant, model in WHO:
                engine_us = next(turns) * 97_000_001
                given += engine_us
                shares[ShareKey(slot, worker, model, tenant)] = TenantUsage(
                    engine_us=engine_us,
                    millijoules=engine_us // 7,
                    requests=next(turns),
                    prompt_tokens=next(turns) * 1001,
                    delivered_tokens=next(turns) * 1003,
                    draft_tokens=300,
                    accepted_tokens=211,
                )
            times[WorkerKey(slot, worker)] = WorkerTime(
                observed_us=SLOT_SECONDS * 1_000_000,
                busy_us=given + 5_000_000,
                millijoules=given // 3,
                busy_millijoules=given // 6,
                draft_us=1_000_000,
                draft_tokens=900,
                target_only_us=1_700_000,
                target_only_low_us=1_500_000,
                target_only_high_us=1_900_000,
            )
    period = RecordingPeriod(
        start="s", gateway="g", began_at=begin, until=int(NOW), flush_seconds=30, closed=False
    )
    with closing(CostStore(url)) as store:
        store.write(period, shares, times)
    return url


def reader(database: str, prices: dict | None = None) -> UsageReader:
    return UsageReader(
        database_url=database, settings=CostSettings(**(prices or {})), time_zone="Africa/Nairobi"
    )


def cells(page: str, heading: str) -> list[list[str]]:
    """The rows of the table in the section with this heading's id."""
    section = page.split(f'id="{heading}"')[1].split("</section>", maxsplit=1)[0]
    body = section.split("<tbody>")[1].split("</tbody>")[0]
    return [
        [re.sub(r"<[^>]*>", " ", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in body.split("</tr>")[:-1]
    ]


@pytest.mark.parametrize(
    ("period", "first"), [("day", "2026-11-20"), ("week", "2026-11-14"), ("month", "2026-10-22")]
)
async def test_the_page_shows_what_the_command_line_reports(database, tmp_path, monkeypatch, period, first):
    """Every line, of the days that the page names."""
    (tmp_path / "settings.yaml").write_text(
        yaml.safe_dump({"cost": PRICES, "limits": {"time_zone": ZONE.key}})
    )
    monkeypatch.setattr("appliance.cli.cost.wall_clock", lambda: NOW)
    arguments = ["cost", "report", "--from", first, "--to", "2026-11-21", "--csv"]
    where = ["--config", str(tmp_path / "settings.yaml"), "--data", str(tmp_path)]
    printed = run_command(*arguments, *where)
    async with logged_in(usage=reader(database, PRICES), now=NOW) as client:
        page = (await client.get(f"/console/usage?period={period}")).text
    assert f"appliance cost report --from {first} --to 2026-11-21" in page
    expected = [
        [
            " ".join(filter(None, (str(escape(row["tenant"])), row["model"]))),
            *(
                f"{int(row[name]):,}" if row[name] else "\N{EN DASH}"
                for name in ("requests", "prompt_tokens", "delivered_tokens", "wasted_tokens")
            ),
            f"{float(row['engine_seconds']) / 3600:,.3f}",
            f"{float(row['kwh']):,.3f}",
            f"{float(row['total']):,.2f}",
            f"{float(row['cost_per_million']):,.2f}" if row["cost_per_million"] else "\N{EN DASH}",
        ]
        for row in csv.DictReader(io.StringIO(printed.stdout))
    ]
    assert len(expected) == len(WHO) + 3
    assert cells(page, "lines") == expected


@pytest.mark.parametrize("days", [1, 7, 30])
def test_hours_and_days_add_up_to_the_lines(database, days):
    first = date.fromordinal(TODAY.toordinal() + 1 - days)
    usage = read_usage(
        UsageQuery(
            database_url=database,
            first=first,
            end=date(2026, 11, 21),
            time_zone=ZONE.key,
            settings=CostSettings(**PRICES),
            now=NOW,
        )
    )
    assert len(usage.spans) == (16 if days == 1 else days), "none begins after now"
    for line in usage.report.lines:
        parts = [
            part
            for span in usage.spans
            for part in span.parts
            if (part.tenant, part.model) == (line.tenant, line.model)
        ]
        assert sum(part.delivered_tokens for part in parts) == line.delivered_tokens
        assert sum(part.cost for part in parts) == pytest.approx(line.cost.total)


async def test_the_tables_have_the_figures_of_the_bars(database):
    async with logged_in(usage=reader(database, PRICES), now=NOW) as client:
        by_model = (await client.get("/console/usage?period=week&by=model")).text
        by_tenant = (await client.get("/console/usage?period=week")).text
    rows = cells(by_model, "tokens")
    assert [row[0] for row in rows] == [f"2026-11-{day}" for day in range(14, 21)]
    total = next(row for row in cells(by_model, "lines") if row[0] == "(total)")
    assert f"{sum(int(row[-1].replace(',', '')) for row in rows):,}" == total[3]
    assert len(rows[0]) == 1 + 2 + 1
    assert sum(float(row[-1].replace(",", "")) for row in cells(by_tenant, "cost")) == pytest.approx(
        sum(float(row[7].replace(",", "")) for row in cells(by_tenant, "lines")[: len(WHO)]), abs=0.05
    )
    assert by_tenant.count('class="bar-2"') == 14


async def test_without_a_price_the_page_shows_tokens_and_names_the_settings(database):
    async with logged_in(usage=reader(database), now=NOW) as client:
        page = (await client.get("/console/usage")).text
    assert "There is no cost without a price" in page
    assert "cost.worker_price_per_hour" in page
    assert 'id="cost"' not in page
    assert "Per million" not in page
    assert len(cells(page, "lines")[0]) == 7


async def test_savings_and_missing_times_are_shown(database):
    """A gateway that did not run for hours left a gap."""
    later = NOW + 4 * 3600
    async with logged_in(usage=reader(database, PRICES), now=later) as client:
        page = (await client.get("/console/usage?period=day")).text
    worker, _other, total = cells(page, "saving")
    assert worker[0] == "w1"
    assert worker[1].split()[0] == f"{15 * 0.7 / 3600:.3f}"
    assert total[0] == "(total)"
    assert "Missing: 2026-11-20 12:00:00 to 2026-11-20 16:00:00 UTC" in page
    assert "no gateway ran" in page


async def test_names_are_escaped_and_the_page_runs_no_script_of_its_own(database):
    async with logged_in(usage=reader(database, PRICES), now=NOW) as client:
        for query in ("", "?period=day&by=model", "?period=<x>&by=<y>"):
            page = (await client.get(f"/console/usage{query}")).text
            assert HOSTILE not in page
            assert "<x>" not in page
            assert not re.search(r"<style|\sstyle=|\son[a-z]+=|https?://", page)
    assert "&lt;script&gt;" in page


async def test_the_page_needs_the_scope_read(database):
    async with logged_in(usage=reader(database), scope=AdminScope.WORKERS, now=NOW) as client:
        refused = await client.get("/console/usage")
    assert (refused.status_code, "lacks the scope `read`" in refused.text) == (403, True)


async def test_without_a_database_the_page_says_why(tmp_path):
    async with logged_in(usage=reader(f"sqlite:///{tmp_path / 'no' / 'audit.db'}"), now=NOW) as client:
        answer = await client.get("/console/usage")
    assert answer.status_code == 503
    assert "recorded engine time could not be read" in answer.text


async def test_an_empty_database_is_no_error(tmp_path):
    async with logged_in(usage=reader(migrated(tmp_path / "audit.db"), PRICES), now=NOW) as client:
        page = (await client.get("/console/usage?period=month")).text
    assert page.count("Nothing was recorded") == 2
    assert "no gateway ran" in page


async def test_a_result_is_kept_until_gateways_write_again(database, tmp_path):
    """Of the same days only."""
    usage = reader(database)
    kept = await usage.read(TODAY, date(2026, 11, 21), NOW)
    assert await usage.read(TODAY, date(2026, 11, 21), NOW + 29) is kept
    assert await usage.read(TODAY, date(2026, 11, 21), NOW + 30) is not kept
    (tmp_path / "audit.db").write_bytes(b"")
    with pytest.raises(CostUnavailableError):
        await usage.read(date(2026, 11, 19), date(2026, 11, 21), NOW + 30)


def test_bars_stay_inside_the_drawing_and_the_smallest_groups_share_one():
    bars = [
        Bar(label=f"{n}", title=f"{n}", values={f"t{m}": float(m * n) for m in range(10)}) for n in range(30)
    ]
    chart = draw_bars("what", bars)
    assert chart is not None
    assert chart.groups == ("t9", "t8", "t7", "t6", "t5", OTHERS)
    assert len(chart.groups) == GROUPS
    for (_title, shown), bar in zip(chart.rows, bars, strict=True):
        assert shown[-1] == sum(bar.values.values()) == sum(shown[:-1])
    for box in re.findall(r"<rect[^>]*>", chart.drawing):
        x, y, width, height = (
            float(re.search(rf' {name}="([\d.]+)"', box)[1]) for name in ("x", "y", "width", "height")
        )
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + height <= HEIGHT
    assert draw_bars("what", [Bar(label="", title="", values={"t": 0.0})]) is None
    assert draw_bars("what", []) is None
