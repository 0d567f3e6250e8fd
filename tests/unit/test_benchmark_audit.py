"""The audit benchmark counts right, and compares with a log that does nothing but fits."""

import inspect
import json

import pytest

from appliance.audit.entry import Entry, decode, encode, format_time, new_entry_id
from appliance.audit.sink import AuditSink
from benchmarks.audit import __main__ as command
from benchmarks.audit.entries import pair
from benchmarks.audit.figures import Times, markdown, times
from benchmarks.audit.large import Large, Step, _leaf, document, table
from benchmarks.audit.serving import Serving
from benchmarks.audit.soak import Sample, growth, judge
from benchmarks.audit.unaudited import NoAudit


def _samples(values):
    return [Sample(seconds=float(at), resident_mib=value, requests=at) for at, value in enumerate(values)]


def _report(**types):
    counts = {name.replace("_", "."): count for name, count in types.items()}
    return {"entries_by_type": counts, "size": sum(counts.values()), "verdict": "valid"}


def test_times_are_in_milliseconds():
    """Median and the value that one in a hundred exceeds."""
    found = times([number / 1000 for number in range(1, 101)])
    assert (found.count, found.p50, found.p99) == (100, 50.5, 99.0)
    assert times([]) == Times(count=0, p50=0.0, p99=0.0)


def test_a_table_has_a_line_for_each_row():
    """Columns, rule, rows."""
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


@pytest.mark.parametrize(
    ("p50", "ratio", "reached"), [(3.6, 0.75, True), (3.8, 1.0, False), (3.0, 0.74, False)]
)
def test_the_goal_has_two_limits(p50, ratio, reached):
    """Latency and throughput are judged, each by itself."""
    line = Serving(
        name="plain",
        stream=False,
        concurrency=1,
        rounds=1,
        none=Times(count=1, p50=3.0, p99=4.0),
        strict=Times(count=1, p50=p50, p99=5.0),
        none_per_second=100.0,
        strict_per_second=100.0 * ratio,
        ratio=ratio,
    )
    assert line.reaches_goal is reached


def test_growth_is_judged_after_warming_up():
    """What a process takes at its start is not growth; what it takes all along is."""
    assert growth(_samples([10, 50, *[100] * 8])) == 0
    assert growth(_samples(range(100, 200))) > 0.3
    assert growth(_samples([1, 2])) == float("inf")


def test_a_soak_that_lost_an_entry_fails():
    """Each request has an intent and an outcome, or the soak did not pass."""
    flat = _samples([100] * 20)
    good = judge(5, 1.0, _report(request_intent=5, request_outcome=5, audit_started=1), 0, flat)
    assert good.passes
    assert good.bookkeeping == {"audit.started": 1}
    for report, code, samples in (
        (_report(request_intent=5, request_outcome=4, request_aborted=1), 0, flat),
        (_report(request_intent=4, request_outcome=4), 0, flat),
        (_report(request_intent=5, request_outcome=5), 4, flat),
        (_report(request_intent=5, request_outcome=5), 0, _samples(range(1, 21))),
    ):
        assert not judge(5, 1.0, report, code, samples).passes


def test_the_entries_that_are_measured_are_entries():
    """What is appended is what a gateway may write, and one request's two belong together."""
    leaves = [decode(_leaf(index, index).leaf) for index in range(4)]
    assert [leaf.type for leaf in leaves] == ["request.intent", "request.outcome"] * 2
    assert len({leaf.id for leaf in leaves}) == 4
    assert leaves[0].fields["request_id"] == leaves[1].fields["request_id"]
    assert leaves[1].fields["request_id"] != leaves[2].fields["request_id"]
    for entry_type, fields in pair("r"):
        entry_id = new_entry_id(1, bytes(10))
        encode(Entry(log="l", id=entry_id, type=entry_type, time=format_time(1), fields=fields))


def test_the_sink_that_does_nothing_has_all_that_a_gateway_calls():
    """Otherwise the two gateways would differ in more than the log."""
    called = {name for name, _ in inspect.getmembers(AuditSink) if not name.startswith("_")}
    assert called <= {*dir(NoAudit)}


async def test_the_sink_that_does_nothing_answers_at_once():
    """Its futures are done when they are handed out, and indexes count up."""
    sink = NoAudit()
    receipts = [await sink.confirm(sink.submit("request.intent")) for _ in range(2)]
    assert [receipt.index for receipt in receipts] == [0, 1]


def test_results_carry_what_they_were_measured_with(tmp_path, monkeypatch):
    """Page and file name machine, commit and command."""
    monkeypatch.chdir(tmp_path)
    provenance = command.provenance_of("python -m benchmarks.audit", model="", draft="")
    command.write(tmp_path, provenance, "appends", "Appending", "| a |\n", [{"a": 1}])
    page = next(tmp_path.glob("*.md")).read_text()
    content = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert command.line(provenance) in page
    assert content == {"measured": command.line(provenance), "results": [{"a": 1}]}
    assert "`python -m benchmarks.audit`" in page


def test_a_large_log_is_compared_with_another_commits():
    """Both figures and their ratio; a step that the other commit does not have is left out there."""

    def log(commit, **seconds):
        steps = [
            Step(name=name, seconds=each, memory_mib=100, finding="valid") for name, each in seconds.items()
        ]
        return Large(
            commit=commit,
            root=".",
            directory=".",
            remembers=True,
            entries=2**20,
            database_mib=700,
            steps=steps,
        )

    logs = [log("before", verify=8.0), log("now", verify=2.0, again=1.0)]
    page = table(logs)
    assert "| verify | 8.000 | 2.000 | 100 | 100 | 0.250 | 1.00 | valid |" in page
    assert "| again | - | 1.000 | - | 100 | - | - | valid |" in page
    assert "before: 1,048,576 entries, 700 bytes an entry" in page
    assert json.loads(json.dumps(document(logs)))[1]["bytes_per_entry"] == 700
