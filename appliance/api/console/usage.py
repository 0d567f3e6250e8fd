"""The values of the usage page: the cost report of some days, and bars of its hours or days."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any
from zoneinfo import ZoneInfo

from appliance.api.console.bars import Bar, BarChart, draw_bars
from appliance.api.console.console import Console
from appliance.errors import CostUnavailableError
from appliance.gateway.cost.prices import JOULES_PER_KWH, SECONDS_PER_HOUR
from appliance.gateway.cost.reader import RecordedUsage
from appliance.gateway.cost.report import CostLine, Rest, Saving
from appliance.gateway.cost.series import UsagePart
from appliance.gateway.cost.sheet import IDLE, TOTAL, UNATTRIBUTED

PERIODS = {"day": ("Today", 1), "week": ("Last 7 days", 7), "month": ("Last 30 days", 30)}
"""Name and number of days, today included."""
GROUPS = {"tenant": "By tenant", "model": "By model"}
SHOWN_GAPS = 10
PRICES = ("capital_per_worker_hour", "people_per_worker_hour", "power_per_kwh")


async def usage(console: Console, asked: Mapping[str, str], now: float) -> dict[str, Any]:
    """The report that the CLI makes of the same days; `now` is Unix time."""
    period = asked["period"] if asked.get("period") in PERIODS else "week"
    group = asked["by"] if asked.get("by") in GROUPS else "tenant"
    zone = ZoneInfo(console.usage.time_zone)
    end = datetime.fromtimestamp(now, UTC).astimezone(zone).date() + timedelta(days=1)
    first = end - timedelta(days=PERIODS[period][1])
    values: dict[str, Any] = {
        "period": period,
        "periods": {key: name for key, (name, _days) in PERIODS.items()},
        "group": group,
        "groups": GROUPS,
        "usage": None,
        "status": f"{PERIODS[period][0]}, {GROUPS[group].lower()}.",
    }
    try:
        read = await console.usage.read(first, end, now)
    except CostUnavailableError as error:
        return values | {"code": HTTPStatus.SERVICE_UNAVAILABLE, "problem": str(error)}
    return values | {"usage": read.report, "first": first, "end": end} | _shown(read, group, zone, period)


def _shown(read: RecordedUsage, group: str, zone: ZoneInfo, period: str) -> dict[str, Any]:
    report = read.report
    priced = any(report.prices[name] is not None for name in PRICES)
    each = "hour" if period == "day" else "day"
    by = f"by {each} and {group}; the table below has the figures"
    tokens = _chart(read, group, zone, each, f"Delivered tokens {by}", lambda part: part.delivered_tokens)
    cost = _chart(read, group, zone, each, f"Cost {by}", lambda part: part.cost) if priced else None
    savings = [(worker.worker, worker.saving) for worker in report.workers if worker.saving.compared_tokens]
    return {
        "each": each,
        "priced": priced,
        "charts": [
            ("tokens", "Delivered tokens", 0, tokens),
            *([("cost", f"Cost in {report.currency}", 2, cost)] if priced else []),
        ],
        "lines": [
            *(_line(line, line.tenant) for line in report.lines),
            _rest(report.idle, IDLE),
            _rest(report.unattributed, UNATTRIBUTED),
            _line(report.total, TOTAL),
        ],
        "savings": [
            _saving(saving, name)
            for name, saving in (*savings, *([(TOTAL, report.saving)] if savings else []))
        ],
        "gaps": report.missing[:SHOWN_GAPS],
        "further_gaps": len(report.missing[SHOWN_GAPS:]),
        "written_until": read.written_until,
    }


def _chart(
    read: RecordedUsage,
    group: str,
    zone: ZoneInfo,
    each: str,
    what: str,
    value: Callable[[UsagePart], float],
) -> BarChart | None:
    bars = []
    for span in read.spans:
        values: dict[str, float] = {}
        for part in span.parts:
            name = part.tenant if group == "tenant" else part.model
            values[name] = values.get(name, 0.0) + value(part)
        begin = datetime.fromtimestamp(span.begin, UTC).astimezone(zone)
        label, title = ("%H:%M", "%H:%M") if each == "hour" else ("%m-%d", "%Y-%m-%d")
        bars.append(Bar(label=f"{begin:{label}}", title=f"{begin:{title}}", values=values))
    return draw_bars(what, bars)


def _line(line: CostLine, tenant: str) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "model": line.model,
        "requests": line.requests,
        "prompt_tokens": line.prompt_tokens,
        "delivered_tokens": line.delivered_tokens,
        "wasted_tokens": line.wasted_tokens,
        "hours": line.engine_seconds / SECONDS_PER_HOUR,
        "kwh": line.joules / JOULES_PER_KWH,
        "cost": line.cost.total,
        "cost_per_million": line.cost_per_million,
    }


def _rest(rest: Rest, name: str) -> dict[str, Any]:
    counts = dict.fromkeys(("requests", "prompt_tokens", "delivered_tokens", "wasted_tokens"))
    return {
        "tenant": name,
        "model": "",
        **counts,
        "hours": rest.seconds / SECONDS_PER_HOUR,
        "kwh": rest.joules / JOULES_PER_KWH,
        "cost": rest.cost.total,
        "cost_per_million": None,
    }


def _saving(saving: Saving, worker: str) -> dict[str, Any]:
    return {
        "worker": worker,
        "hours": [
            seconds / SECONDS_PER_HOUR
            for seconds in (saving.seconds, saving.seconds_low, saving.seconds_high)
        ],
        "tokens": (saving.tokens, saving.tokens_low, saving.tokens_high),
        "money": (saving.money, saving.money_low, saving.money_high),
    }
