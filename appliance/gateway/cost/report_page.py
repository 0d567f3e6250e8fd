"""A cost report as one HTML page without script, font or external address."""

from collections.abc import Iterator, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from appliance.gateway.cost.prices import JOULES_PER_KWH, SECONDS_PER_HOUR
from appliance.gateway.cost.report import Cost, CostLine, CostReport, Day, GapKind, Rest
from appliance.infra import svg

CHART_WIDTH, CHART_HEIGHT, LABELS = 900, 180, 24
MOST_LABELS = 16
LINE_COLUMNS = (
    "Tenant", "Model", "Requests", "Prompt tokens", "Delivered tokens", "Rejected draft tokens",
    "Engine h", "GPU h", "kWh", "Capital", "People", "Energy", "Total", "Per million delivered",
)  # fmt: skip
WORKER_COLUMNS = (
    "Worker", "Seen h", "Busy h", "Attributed h", "Estimated h", "kWh", "Measured by GPUs", "Total",
)  # fmt: skip
MISSING = {
    GapKind.NOT_WRITTEN: "a gateway ended without writing its latest counts",
    GapKind.NO_GATEWAY: "no gateway ran",
}

_Row = tuple[str, Sequence[str]]  # CSS class and cells


def render_page(report: CostReport) -> str:
    environment = Environment(
        loader=PackageLoader("appliance.gateway.cost"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    saving, observed = report.saving, report.observed_seconds
    most = max((day.busy_seconds + day.idle_seconds for day in report.days), default=0.0)
    savings = (
        ("Engine hours", _hours, (saving.seconds, saving.seconds_low, saving.seconds_high)),
        ("Tokens", "{:,.0f}".format, (saving.tokens, saving.tokens_low, saving.tokens_high)),
        (f"Money ({report.currency})", _money, (saving.money, saving.money_low, saving.money_high)),
    )
    return environment.get_template("report.html").render(
        report=report,
        title=f"Cost of serving, {report.begin:%Y-%m-%d} to before {report.end:%Y-%m-%d}",
        hours=_hours,
        money=_money,
        busy_share=report.busy_seconds / observed if observed else 0.0,
        line_columns=LINE_COLUMNS,
        lines=list(_lines(report)),
        most=most,
        chart=_chart(report.days, most) if most else None,
        worker_columns=WORKER_COLUMNS,
        workers=list(_workers(report)),
        savings=[("", (name, *map(show, amounts))) for name, show, amounts in savings],
        missing=[
            ("", (f"{gap.begin:%F %T}", f"{gap.end:%F %T}", gap.gateway or "", MISSING[gap.kind]))
            for gap in report.missing
        ],
        prices=[
            ("", (name.replace("_", " "), "not set" if price is None else f"{price:.6g}"))
            for name, price in report.prices.items()
        ],
    )


def _lines(report: CostReport) -> Iterator[_Row]:
    for line in report.lines:
        yield "", _line(line, line.tenant)
    for name, rest in (("none: idle", report.idle), ("none: unattributed", report.unattributed)):
        yield "rest", _rest(rest, name)
    yield "total", _line(report.total, "all")


def _line(line: CostLine, tenant: str) -> Sequence[str]:
    counts = (line.requests, line.prompt_tokens, line.delivered_tokens, line.wasted_tokens)
    return (
        tenant, line.model, *map("{:,}".format, counts), _hours(line.engine_seconds),
        _hours(line.gpu_seconds), _kwh(line.joules), *_costs(line.cost),
        "" if line.cost_per_million is None else _money(line.cost_per_million),
    )  # fmt: skip


def _rest(rest: Rest, name: str) -> Sequence[str]:
    return (name, "", "", "", "", "", _hours(rest.seconds), "", _kwh(rest.joules), *_costs(rest.cost), "")


def _costs(cost: Cost) -> Iterator[str]:
    return map(_money, (cost.capital, cost.people, cost.energy, cost.total))


def _workers(report: CostReport) -> Iterator[_Row]:
    for worker in report.workers:
        seconds = (worker.observed_seconds, worker.busy_seconds, worker.attributed_seconds)
        metered = worker.metered_seconds / worker.observed_seconds if worker.observed_seconds else 0.0
        yield (
            "",
            (
                worker.worker, *map(_hours, (*seconds, worker.estimated_seconds)), _kwh(worker.joules),
                f"{metered:.0%}", _money(worker.cost.total),
            ),
        )  # fmt: skip


def _chart(days: Sequence[Day], most: float) -> Markup:
    """One bar per day, idle time on top of busy time."""
    step = CHART_WIDTH / len(days)
    labelled = -(-len(days) // MOST_LABELS)
    parts = []
    for place, day in enumerate(days):
        left, base = place * step, float(CHART_HEIGHT)
        parts.append(
            svg.element(
                "title",
                f"{day.day}: {_hours(day.busy_seconds)} h busy, {_hours(day.idle_seconds)} h idle, "
                f"{day.delivered_tokens:,} tokens delivered",
            )
        )
        for kind, seconds in (("busy", day.busy_seconds), ("idle", day.idle_seconds)):
            height = seconds / most * CHART_HEIGHT
            base -= height
            box = {"x": left, "y": base, "width": max(1.0, step * 0.8), "height": height}
            shown = {name: f"{value:.1f}" for name, value in box.items()}
            parts.append(svg.element("rect", class_=kind, **shown))
        parts[-3:] = [svg.element("g", *parts[-3:])]
        if place % labelled == 0:
            parts.append(svg.label(left, CHART_HEIGHT + 16, f"{day.day:%m-%d}"))
    what = "Busy and idle hours of all workers by day"
    return svg.drawing(what, CHART_WIDTH, CHART_HEIGHT + LABELS, *parts)


def _hours(seconds: float) -> str:
    return f"{seconds / SECONDS_PER_HOUR:,.3f}"


def _kwh(joules: float) -> str:
    return f"{joules / JOULES_PER_KWH:,.3f}"


def _money(amount: float) -> str:
    return f"{amount:,.2f}"
