"""
A report as one HTML page that needs nothing else: no script, no font, no address.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

from appliance.gateway.cost.gaps import GapKind
from appliance.gateway.cost.prices import JOULES_PER_KWH, SECONDS_PER_HOUR
from appliance.gateway.cost.report import Day, Line, Report, Rest, WorkerLine

STYLE = """
:root { color-scheme: light dark; --busy: #2563a8; --idle: #b9c4d0; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, .word { text-align: left; }
tr.rest { font-style: italic; } tr.total { font-weight: 600; border-top: 2px solid; }
.wide { overflow-x: auto; } svg { width: 100%; height: auto; } text { font-size: 11px; fill: currentColor; }
.busy { fill: var(--busy); } .idle { fill: var(--idle); }
.note { border-left: 3px solid #c77700; padding-left: .8rem; }
"""
CHART_WIDTH, CHART_HEIGHT, LABELS = 900, 180, 24
MOST_LABELS = 16
MISSING = {
    GapKind.NOT_WRITTEN: "a gateway ended without writing what it had counted last",
    GapKind.NOBODY_THERE: "no gateway ran, so nobody saw the workers",
}


def render_page(report: Report) -> str:
    """The page, whole."""
    title = f"Cost of serving, {report.begin:%Y-%m-%d} to before {report.end:%Y-%m-%d}"
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>Days of {escape(report.time_zone)}, money in {escape(report.currency)}. ",
            f"Made {report.made_at:%Y-%m-%d %H:%M}. It names tenants.</p>",
            *_summary(report),
            "<h2>Tenants and models</h2>",
            _lines(report),
            "<h2>Busy and idle time by day</h2>",
            _chart(report.days),
            "<h2>Workers</h2>",
            _workers(report),
            "<h2>What drafting saved</h2>",
            *_saving(report),
            "<h2>What is missing</h2>",
            *_missing(report),
            "<h2>What it was priced with</h2>",
            _prices(report),
            *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
            "</body></html>\n",
        )
    )


def _summary(report: Report) -> Iterable[str]:
    total = report.total
    share = report.busy_seconds / report.observed_seconds if report.observed_seconds else 0.0
    yield f"<p><strong>{_money(total.cost.total)} {escape(report.currency)}</strong> in all"
    if total.cost_per_million is not None:
        yield f", {_money(total.cost_per_million)} for a million delivered tokens, idle time included"
    yield f". Workers were busy {share:.1%} of {_hours(report.observed_seconds)} h.</p>"


def _lines(report: Report) -> str:
    head = (
        "Tenant", "Model", "Requests", "Prompt tokens", "Delivered tokens", "Rejected draft tokens",
        "Engine h", "GPU h", "kWh", "Capital", "People", "Energy", "Total", "Per million delivered",
    )  # fmt: skip
    rows = [_line(line, line.tenant, line.model) for line in report.lines]
    rows += [_rest(report.idle, "nobody: idle"), _rest(report.unattributed, "nobody: unattributed")]
    rows.append(_line(report.total, "all", "", kind="total"))
    return _table(head, rows)


def _line(line: Line, tenant: str, model: str, kind: str = "") -> str:
    per_million = "" if line.cost_per_million is None else _money(line.cost_per_million)
    cost = line.cost
    return _row(
        (
            tenant, model, f"{line.requests:,}", f"{line.prompt_tokens:,}", f"{line.delivered_tokens:,}",
            f"{line.wasted_tokens:,}", _hours(line.engine_seconds), _hours(line.gpu_seconds),
            _kwh(line.joules), *map(_money, (cost.capital, cost.people, cost.energy, cost.total)),
            per_million,
        ),
        kind,
    )  # fmt: skip


def _rest(rest: Rest, name: str) -> str:
    cost = rest.cost
    return _row(
        (
            name, "", "", "", "", "", _hours(rest.seconds), "", _kwh(rest.joules),
            *map(_money, (cost.capital, cost.people, cost.energy, cost.total)), "",
        ),
        "rest",
    )  # fmt: skip


def _workers(report: Report) -> str:
    head = ("Worker", "Seen h", "Busy h", "Attributed h", "Estimated h", "kWh", "Measured by GPUs", "Total")
    return _table(head, [_worker(worker) for worker in report.workers])


def _worker(worker: WorkerLine) -> str:
    metered = worker.metered_seconds / worker.observed_seconds if worker.observed_seconds else 0.0
    hours = (
        worker.observed_seconds,
        worker.busy_seconds,
        worker.attributed_seconds,
        worker.estimated_seconds,
    )
    cells = (*map(_hours, hours), _kwh(worker.joules), f"{metered:.0%}", _money(worker.cost.total))
    return _row((worker.worker, *cells))


def _saving(report: Report) -> Iterable[str]:
    saving = report.saving
    if not saving.compared_tokens:
        yield "<p>Nothing could be compared: no step with drafts, or none without to compare it with.</p>"
        return
    rows = [
        ("Engine hours", _hours(saving.seconds), _hours(saving.seconds_low), _hours(saving.seconds_high)),
        ("Tokens", *(f"{number:,.0f}" for number in (saving.tokens, saving.tokens_low, saving.tokens_high))),
        (f"Money ({report.currency})", *map(_money, (saving.money, saving.money_low, saving.money_high))),
    ]
    yield _table(("Saved", "Estimate", "At least", "At most"), [_row(row) for row in rows])
    yield (
        f"<p>Compared: {_hours(saving.compared_seconds)} engine hours of steps with drafts, which gave "
        f"{saving.compared_tokens:,} tokens, with the rate measured without drafts on the same workers. "
        "The bounds hold with 95 % confidence. Below 0 drafting cost more than it saved.</p>"
    )


def _missing(report: Report) -> Iterable[str]:
    if not report.missing:
        yield "<p>Nothing.</p>"
        return
    rows = [
        _row((_time(gap.begin), _time(gap.end), gap.gateway or "", MISSING[gap.kind]))
        for gap in report.missing
    ]
    yield _table(("From (UTC)", "To (UTC)", "Gateway", "Because"), rows)


def _prices(report: Report) -> str:
    rows = [
        _row((name.replace("_", " "), "not set" if price is None else f"{price:.6g}"))
        for name, price in report.prices.items()
    ]
    return _table(("Price", report.currency), rows)


def _chart(days: Sequence[Day]) -> str:
    """One bar a day, idle time on top of busy time."""
    most = max((day.busy_seconds + day.idle_seconds for day in days), default=0.0)
    if not most:
        return "<p>No time was recorded.</p>"
    step = CHART_WIDTH / len(days)
    labelled = max(1, -(-len(days) // MOST_LABELS))
    parts = []
    for place, day in enumerate(days):
        left, width = place * step, max(1.0, step * 0.8)
        busy = day.busy_seconds / most * CHART_HEIGHT
        idle = day.idle_seconds / most * CHART_HEIGHT
        what = (
            f"{day.day}: {_hours(day.busy_seconds)} h busy, {_hours(day.idle_seconds)} h idle, "
            f"{day.delivered_tokens:,} tokens delivered"
        )
        parts.append(
            f"<g><title>{what}</title>"
            f'<rect class="idle" x="{left:.1f}" y="{CHART_HEIGHT - busy - idle:.1f}" width="{width:.1f}" '
            f'height="{idle:.1f}"/><rect class="busy" x="{left:.1f}" y="{CHART_HEIGHT - busy:.1f}" '
            f'width="{width:.1f}" height="{busy:.1f}"/></g>'
        )
        if place % labelled == 0:
            parts.append(f'<text x="{left:.1f}" y="{CHART_HEIGHT + 16}">{day.day:%m-%d}</text>')
    return (
        f'<svg role="img" aria-label="Busy and idle hours of all workers by day" '
        f'viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT + LABELS}">{"".join(parts)}</svg>'
        f"<p>Dark: busy; light: idle. The highest bar is {_hours(most)} h.</p>"
    )


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    return f'<div class="wide"><table><tr>{cells}</tr>{"".join(rows)}</table></div>'


def _row(cells: Sequence[str], kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _hours(seconds: float) -> str:
    return f"{seconds / SECONDS_PER_HOUR:,.3f}"


def _kwh(joules: float) -> str:
    return f"{joules / JOULES_PER_KWH:,.3f}"


def _money(amount: float) -> str:
    return f"{amount:,.2f}"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"
