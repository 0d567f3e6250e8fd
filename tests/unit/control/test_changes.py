"""A change is reported everywhere, once, and with the same reason."""

import io
import json
import sys
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from appliance.audit.entry import Entry, decode, encode, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.control.changes import KEPT, ChangeLog, show_table
from appliance.errors import AuditEntryError, AuditUnavailableError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LogSettings
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.speculation.evidence import Acceptance
from appliance.speculation.state import MonitorState, SpeculationFigures
from appliance.speculation.values import EngineReading, Reason, SpecDecodeCounters, SpeculationMode
from tests.fakes import audit_fields

NOW = 1_800_000_000.123
READING = EngineReading(controllable=True, epoch="0f", largest_batch=8, choices=(0, 1, 3))


class Sink:
    """An audit log that takes entries until `refusal` is set."""

    def __init__(self) -> None:
        self.entries: list[tuple[EntryType, dict[str, Any]]] = []
        self.refusal: Exception | None = None

    def submit(self, entry_type: EntryType, /, **fields: Any) -> None:
        """Keep an entry, if the real log could encode it."""
        if self.refusal is not None:
            raise self.refusal
        self.entries.append((entry_type, audit_fields(entry_type, fields)))


class Reports:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.audit = Sink()
        self.metrics = Metrics(CollectorRegistry())
        self.text = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", self.text)
            logger = configure_logs(LogSettings(format="json"), terminal=False)
        self.changes = ChangeLog(audit=self.audit, metrics=self.metrics, logger=logger, clock=lambda: NOW)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.getvalue().splitlines()]

    def counted(self, mode: SpeculationMode, reason: Reason) -> float | None:
        return self.metrics.registry.get_sample_value(
            "appliance_speculation_changes_total", {"worker": "w1", "mode": mode, "reason": reason}
        )


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """A change log with its audit log, metrics and operator log."""
    return Reports(monkeypatch)


def counters(drafts: int, accepted: int) -> SpecDecodeCounters:
    """Drafts of one token each."""
    return SpecDecodeCounters(
        drafts=drafts, draft_tokens=drafts, accepted_tokens=accepted, accepted_per_position=(accepted,)
    )


def snapshot(mode: SpeculationMode = SpeculationMode.SPECULATIVE, **more: Any) -> WorkerSnapshot:
    """A worker in a mode, seen by control."""
    state = MonitorState(**{"mode": mode, "last": READING, "largest_batch": 8, "choices": (0, 1, 3)} | more)
    return WorkerSnapshot(
        worker=Worker(worker_id=WorkerId("w1"), url="http://127.0.0.1:1"),
        models=(ServedModel(name="demo", max_model_len=None, created=1),),
        decision=state.decision,
        figures=state.figures,
    )


USELESS = Acceptance(total=counters(400, 24))
DRAFTING = snapshot(acceptance=USELESS)
STOPPED = snapshot(
    SpeculationMode.TARGET_ONLY,
    basis=Reason.COLLAPSED,
    acceptance=USELESS,
    choice=MappingProxyType(dict.fromkeys((1, 2, 4, 8), 0)),
)


def test_audit_metric_log_and_event_agree_on_a_change(reports):
    reports.changes.record(DRAFTING, STOPPED)
    (change,) = reports.changes.since(0)
    ((entry_type, fields),) = reports.audit.entries
    (line,) = reports.lines
    assert entry_type is EntryType.SPECULATION_CHANGED
    for name in ("worker", "model", "mode", "previous_mode", "reason", "avoided", "drafts"):
        assert fields[name] == getattr(change, name)
    assert (change.worker, change.model) == ("w1", "demo")
    assert (change.mode, change.previous_mode) == (SpeculationMode.TARGET_ONLY, SpeculationMode.SPECULATIVE)
    assert (change.reason, change.table, change.drafts) == (Reason.COLLAPSED, ("1-8: 0",), 400)
    assert (change.acceptance_length, fields["acceptance_length"]) == (1.06, "1.060")
    assert fields["table"] == ["1-8: 0"]
    assert (line["event"], line["worker"], line["mode"]) == ("speculation_changed", "w1", "target_only")
    assert (line["reason"], line["acceptance_length"], line["detail"]) == ("collapsed", 1.06, "1-8: 0")
    assert "dropped_fields" not in line
    assert reports.counted(SpeculationMode.TARGET_ONLY, Reason.COLLAPSED) == 1
    assert change.time == "2027-01-15T08:00:00.123+00:00"


def test_the_audit_log_can_encode_a_change(reports):
    """With and without an acceptance length."""
    reports.changes.record(DRAFTING, STOPPED)
    reports.changes.record(snapshot(), snapshot(avoid=True))
    assert len(reports.audit.entries) == 2
    for entry_type, fields in reports.audit.entries:
        entry = Entry(
            log="a.local/audit",
            id=new_entry_id(1, bytes(10)),
            type=entry_type,
            time="2027-01-15T08:00:00.123Z",
            fields=fields,
        )
        assert decode(encode(entry)).fields["reason"] == fields["reason"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (DRAFTING, DRAFTING),
        (DRAFTING, replace(DRAFTING, healthy=True, tokens_per_second=5.0)),
        (DRAFTING, snapshot(reason=Reason.SCRAPE_FAILED)),
        (DRAFTING, snapshot(basis=Reason.RECOVERED)),
        (snapshot(last=None), snapshot()),
        (snapshot(), snapshot(last=None)),
    ],
)
def test_another_reason_or_a_first_table_is_not_a_change(reports, before, after):
    reports.changes.record(before, after)
    assert (reports.changes.since(0), reports.audit.entries, reports.lines) == ((), [], [])


@pytest.mark.parametrize(
    "after",
    [
        snapshot(SpeculationMode.TARGET_ONLY, basis=Reason.COLLAPSED),
        snapshot(avoid=True, basis=Reason.NOT_CONTROLLABLE),
        snapshot(choice=MappingProxyType({4: 0}), basis=Reason.BELOW_BREAK_EVEN),
    ],
)
def test_another_mode_table_or_avoidance_is_a_change(reports, after):
    reports.changes.record(snapshot(), after)
    (change,) = reports.changes.since(0)
    assert (change.mode, change.reason) == (after.decision.mode, after.decision.basis)
    assert (change.avoided, change.table) == (after.decision.avoid, show_table(after.decision.table))


def test_a_change_reports_the_window_that_was_judged(reports):
    """A decision starts a new window; its evidence is in the one before."""
    reports.changes.record(DRAFTING, replace(STOPPED, figures=SpeculationFigures()))
    (change,) = reports.changes.since(0)
    assert (change.drafts, change.acceptance_length) == (400, 1.06)


def test_a_change_without_drafts_has_no_acceptance_length(reports):
    """1.0 would read as a collapse."""
    reports.changes.record(snapshot(), snapshot(SpeculationMode.TARGET_ONLY, basis=Reason.OPERATOR_OVERRIDE))
    (change,) = reports.changes.since(0)
    assert (change.drafts, change.acceptance_length) == (0, None)
    assert "acceptance_length" not in reports.audit.entries[0][1]


def test_a_worker_without_a_known_model_is_reported_as_unknown(reports):
    """An entry needs a model."""
    reports.changes.record(replace(DRAFTING, models=()), replace(STOPPED, models=()))
    assert reports.audit.entries[0][1]["model"] == "unknown"


@pytest.mark.parametrize("refusal", [AuditUnavailableError("the disk is full"), AuditEntryError("too large")])
def test_a_change_that_the_audit_log_refuses_is_made_and_logged(reports, refusal):
    """It alters how fast tokens come, never which."""
    reports.audit.refusal = refusal
    reports.changes.record(DRAFTING, STOPPED)
    assert [change.reason for change in reports.changes.since(0)] == [Reason.COLLAPSED]
    assert reports.counted(SpeculationMode.TARGET_ONLY, Reason.COLLAPSED) == 1
    assert [line["event"] for line in reports.lines] == ["speculation_changed", "audit_entry_refused"]
    assert (reports.lines[1]["reason"], reports.lines[1]["error"]) == ("speculation.changed", str(refusal))


def test_changes_are_numbered_and_listed_after_a_number(reports):
    """Oldest first; with the last number only new ones follow."""
    reports.changes.record(DRAFTING, STOPPED)
    reports.changes.record(STOPPED, DRAFTING)
    first, second = reports.changes.since(0)
    assert (first.sequence, second.sequence) == (1, 2)
    assert reports.changes.since(1) == (second,)
    assert reports.changes.since(2) == ()


def test_only_the_latest_changes_are_kept(reports):
    """A worker that alternates for a year needs no memory; the numbers continue."""
    for _ in range(KEPT):
        reports.changes.record(DRAFTING, STOPPED)
        reports.changes.record(STOPPED, DRAFTING)
    kept = reports.changes.since(0)
    assert [change.sequence for change in kept] == list(range(KEPT + 1, 2 * KEPT + 1))


def test_a_table_is_shown_by_batch_sizes():
    """A range of one is written as one."""
    assert show_table(((1, 8, 3), (9, 9, 1), (10, 64, 0))) == ("1-8: 3", "9: 1", "10-64: 0")
    assert show_table(()) == ()
