"""How the results of `make matrix` become a table."""

import json

from tests.matrix import page
from tests.matrix.__main__ import parse_report
from tests.matrix.page import VERSIONS, checks

REPORT = """<testsuites><testsuite>
<testcase name="test_starts_and_answers" />
<testcase name="test_a_table_takes_effect[2]" />
<testcase name="test_a_table_takes_effect[0]">
<failure message="AssertionError: it drafts&#10;assert 1 == 0" /></testcase>
<testcase name="test_a_table_takes_effect[3]" />
<testcase name="test_plugin_controls"><failure message="KeyError: 'x'" /></testcase>
<testcase name="test_restarts_on_request">
<error
 message='failed on setup with "AssertionError: a log&#10;error: unknown: --x&#10;assert not True"' />
</testcase>
<testcase name="test_counters_add_up">
<error
 message='failed on setup with "AssertionError: not healthy after 600 s&#10;a log&#10;assert 2 == 1"' />
</testcase>
</testsuite></testsuites>"""


def test_a_failure_is_told_by_its_own_text_and_a_failed_start_by_the_log():
    assert parse_report(REPORT) == {
        "test_starts_and_answers": "",
        "test_a_table_takes_effect": "it drafts",
        "test_plugin_controls": "KeyError: 'x'",
        "test_restarts_on_request": "error: unknown: --x",
        "test_counters_add_up": "not healthy after 600 s",
    }


def test_the_page_hides_no_version_and_no_failure(monkeypatch, tmp_path):
    run = {"hardware": "a machine", "commit": "0abc", "date": "2026-11-25"}
    results = {
        "0.26.0": {**run, "problem": "it could not be installed", "checks": {}},
        "0.32.0": {
            **run,
            "problem": "",
            "checks": {"test_starts_and_answers": "", "test_plugin_controls": "why"},
        },
    }
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    page.RESULTS.write_text(json.dumps(results))
    lines = page.page().splitlines()
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ")[1:]
        for line in lines
        if "| " in line
    }
    assert rows["torch"] == list(VERSIONS.values())
    assert rows["The plugin's self-test passes"] == ["no (1)", *["not run"] * 5, "no (2)"]
    assert rows["Starts with our arguments, and answers"] == ["no (1)", *["not run"] * 5, "yes"]
    assert {"1. it could not be installed", "2. why"} <= set(lines)
    assert "- 0.26.0, 0.32.0: commit 0abc, 2026-11-25, a machine" in lines
    assert len(rows) >= len(checks())
