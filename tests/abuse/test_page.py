"""
The page about abuse has the values of the settings and the code.
"""

import importlib
import re
from pathlib import Path

import pytest

from appliance.errors import ERROR_TABLE
from appliance.infra.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "limits-of-abuse.md"
ROW = re.compile(
    r"^\| (?P<against>[^|`]+) \| `(?P<bound>[\w.]+)` \| (?P<default>[\w.]+) \| (?P<beyond>[^|]+) \|$"
)
ROWS = [row for row in map(ROW.match, PAGE.read_text(encoding="utf-8").splitlines()) if row]


def default_of(name: str) -> float:
    """The default of a setting, or the value of a constant by its module."""
    where, _, field = name.rpartition(".")
    if where in Settings.model_fields:
        return float(getattr(getattr(Settings(), where), field))
    return float(getattr(importlib.import_module(where), field))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["bound"])
def test_page_has_the_value_and_error_of_each_limit(row):
    """Its default, and the status and code of what lies beyond it."""
    assert default_of(row["bound"]) == float(row["default"])
    for status, code in re.findall(r"(\d{3}) `(\w+)`", row["beyond"]):
        known = {(str(int(spec.status)), spec.code) for spec in ERROR_TABLE.values()}
        assert (status, code) in known or code in {"invalid_json", "invalid_http", "too_many_sequences"}, code


def test_page_lists_every_limit_of_the_api():
    """A limit that is added to the API's settings is a line of the table."""
    limits = {
        f"api.{name}"
        for name in type(Settings().api).model_fields
        if name.startswith("max_") or name.endswith("_seconds")
    }
    others = {"api.keep_alive_seconds", "api.drain_seconds", "api.stop_delay_seconds"}
    assert limits - {row["bound"] for row in ROWS} == others


def test_page_lists_every_abuse_test():
    named = set(re.findall(r"`(test_\w+\.py)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {path.name for path in Path(__file__).parent.glob("test_*.py")} - {
        "test_page.py",
        "test_leaks.py",
    }
