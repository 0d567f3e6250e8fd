"""A report as CSV (RFC 4180): one row per line, then the rest and the total."""

import csv
import io

from appliance.gateway.cost.prices import JOULES_PER_KWH
from appliance.gateway.cost.report import Cost, CostLine, CostReport

COLUMNS = (
    "tenant", "model", "requests", "prompt_tokens", "delivered_tokens", "draft_tokens", "accepted_tokens",
    "wasted_tokens", "engine_seconds", "gpu_seconds", "kwh", "capital", "people", "energy", "total",
    "cost_per_million", "currency", "from", "to",
)  # fmt: skip
IDLE, UNATTRIBUTED, TOTAL = "(idle)", "(unattributed)", "(total)"  # no tenant's name has parentheses


def render_sheet(report: CostReport) -> str:
    """Amounts have six decimals, so that sums are exact to the cent."""
    text = io.StringIO()
    sheet = csv.DictWriter(text, COLUMNS, restval="")
    sheet.writeheader()
    span = {
        "currency": report.currency,
        "from": report.begin.date().isoformat(),
        "to": report.end.date().isoformat(),
    }
    for line in report.lines:
        sheet.writerow(_row(line) | span | {"tenant": line.tenant, "model": _word(line.model)})
    for name, rest in ((IDLE, report.idle), (UNATTRIBUTED, report.unattributed)):
        amounts = {"engine_seconds": _amount(rest.seconds), "kwh": _kwh(rest.joules)}
        sheet.writerow({"tenant": name} | amounts | _money(rest.cost) | span)
    sheet.writerow(_row(report.total) | span | {"tenant": TOTAL})
    return text.getvalue()


def _row(line: CostLine) -> dict[str, str | int]:
    counts = {name: getattr(line, name) for name in COLUMNS[2:8]}
    return {
        **counts,
        "engine_seconds": _amount(line.engine_seconds),
        "gpu_seconds": _amount(line.gpu_seconds),
        "kwh": _kwh(line.joules),
        **_money(line.cost),
        "cost_per_million": "" if line.cost_per_million is None else _amount(line.cost_per_million),
    }


def _money(cost: Cost) -> dict[str, str]:
    return {name: _amount(getattr(cost, name)) for name in ("capital", "people", "energy", "total")}


def _kwh(joules: float) -> str:
    return _amount(joules / JOULES_PER_KWH)


def _amount(number: float) -> str:
    return f"{number:.6f}"


def _word(name: str) -> str:
    """A model's name that no spreadsheet evaluates as a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name
