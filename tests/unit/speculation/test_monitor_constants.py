"""Every constant of the decision is in the documentation, with its value."""

import re
from dataclasses import fields
from pathlib import Path

from appliance import monitor
from appliance.infra.settings import MonitorSettings
from appliance.speculation import costs, evidence, exploration, goodput, state
from appliance.speculation.state import MonitorPolicy

DOCS = Path(__file__).parents[3] / "docs"
ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+)", re.MULTILINE)


def table(page: str) -> dict[str, float]:
    """Value by constant, as a page says."""
    return {name: float(value) for name, value in ROW.findall((DOCS / page).read_text(encoding="utf-8"))}


def test_the_decision_record_lists_the_constants_of_the_policy():
    """Eight, three of them settings."""
    defaults = {each.name: each.default for each in fields(MonitorPolicy)}
    settings = MonitorSettings()
    for name in ("min_drafts", "collapsed_below", "exploration_share"):
        defaults[name] = getattr(settings, name)
    assert table("decisions/0055-decide-by-one-model.md") == defaults
    assert len(defaults) == 8


def test_the_explanation_lists_all_other_constants():
    found = {
        name: value
        for module in (monitor, costs, evidence, exploration, goodput, state)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | float)
    }
    assert table("explanation/speculation-and-fallback.md") == found
