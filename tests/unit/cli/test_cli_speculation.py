"""`appliance speculation`: commands reach the gateway, and its answers are shown."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from rich.console import Console
from typer.testing import CliRunner

from appliance.api.http.server import bind, make_server
from appliance.api.services import Services
from appliance.app.http_app import create_admin_app
from appliance.audit.entry_types import EntryType
from appliance.cli import cli
from appliance.cli.common.duration import SECONDS_IN, parse_duration, show_duration
from appliance.cli.speculation_view import render, show_ranges
from appliance.control.changes import SpeculationChange
from appliance.control.override import SqlOverrideStore
from appliance.errors import ConfigurationError
from appliance.gateway.attribution import Attribution
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, LogSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel, Worker, WorkerId
from appliance.speculation.evidence import Acceptance
from appliance.speculation.state import SpeculationFigures
from appliance.speculation.values import (
    Capability,
    Decision,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
)
from appliance.tenancy import Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import FakeControl, FakeView, audit_fields, uncounted_refusals
from tests.migrated import migrated

ADMIN_KEY, STORED_ADMIN_KEY = make_key(b"a" * 37, admin=True)
NOTHING: Any = None


@dataclass
class FakeAudit:
    """An audit log that keeps valid entries."""

    entries: list[dict[str, Any]] = field(default_factory=list)

    async def append(self, entry_type: EntryType, /, **fields: Any) -> None:
        self.entries.append({"type": str(entry_type), **audit_fields(entry_type, fields)})


@dataclass(kw_only=True)
class Gateway:
    """A gateway with one worker in its own thread, and the commands that use it."""

    url: str
    data: Path
    pool: WorkerPool
    control: FakeControl
    audit: FakeAudit
    overrides: SqlOverrideStore
    attribution: Attribution

    def run(self, *words: str) -> Result:
        arguments = ["speculation", *words, "--url", self.url, "--data", str(self.data)]
        return CliRunner(env={"COLUMNS": "200"}).invoke(cli, arguments)

    def orders(self) -> list[tuple[str, str, int, str]]:
        found = asyncio.run(self.overrides.list())
        return [
            (order.worker, str(order.mode), round(order.expires_at - order.since), order.note)
            for order in found
        ]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    (tmp_path / "admin.key").write_text(ADMIN_KEY + "\n")
    control, audit, pool = FakeControl(), FakeAudit(), WorkerPool()
    attribution = Attribution(label_key=bytes(16), clock=time.monotonic, min_drafts=1)
    settings = ApiSettings(port=0)
    listener = bind(settings)
    pool.add(Worker(worker_id=WorkerId("w1"), url="http://w1"))
    tenants = TenantDirectory((Tenant(name="operator", keys=(STORED_ADMIN_KEY,)),))
    with closing(SqlOverrideStore(migrated(tmp_path / "audit.db"))) as overrides:
        audit_log: Any = audit
        app = create_admin_app(
            Services(
                settings=settings,
                tenants=tenants,
                identity=Authenticator(tenants),
                refused=uncounted_refusals(),
                pool=pool,
                workers=NOTHING,
                gateway=NOTHING,
                audit=audit_log,
                attribution=attribution,
                control=control,
                overrides=overrides,
                metrics=Metrics(CollectorRegistry()),
                logger=configure_logs(LogSettings(level="error"), terminal=False),
                clock=time.time,  # noqa: TID251 - a composition root
                new_request_id=lambda: "ours",
                version="test",
            )
        )
        server = make_server(app, settings)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        host, port = listener.getsockname()[:2]
        observe(pool, control)
        yield Gateway(
            url=f"http://{host}:{port}",
            data=tmp_path,
            pool=pool,
            control=control,
            audit=audit,
            overrides=overrides,
            attribution=attribution,
        )
        while not server.started:
            time.sleep(0.01)
        server.should_exit = True
        thread.join()
    listener.close()


def observe(pool: WorkerPool, control: FakeControl) -> None:
    """Publish a state of the worker, as control does."""
    snapshot = pool.snapshot(WorkerId("w1"))
    assert snapshot is not None
    counters = SpecDecodeCounters(
        drafts=100, draft_tokens=100, accepted_tokens=67, accepted_per_position=(67,)
    )
    pool.update(
        replace(
            snapshot,
            healthy=True,
            models=(ServedModel(name="demo", max_model_len=None, created=1),),
            decision=Decision(mode=SpeculationMode.TARGET_ONLY, reason=Reason.COLLAPSED),
            figures=SpeculationFigures(acceptance=Acceptance(total=counters)),
            reading=EngineReading(controllable=True, epoch="e", table=((1, 4, 3), (5, 5, 1), (6, 64, 0))),
        )
    )
    control.views["w1"] = FakeView(
        since=time.time() - 3700,  # noqa: TID251
    )


def refusal(result: Result) -> str:
    """The one line of an error."""
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigurationError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


# What it says.


def test_status_shows_mode_reason_and_the_price_of_exploration(gateway: Gateway):
    gateway.run("off", "--worker", "w1", "--for", "3090m", "--note", "ticket [7]")
    gateway.control.changes.append(change())
    gateway.attribution.record(
        tenant="acme", model="demo", template="tpl", context="0-1k",
        drafts=100, draft_tokens=300, accepted_tokens=10, completion_tokens=100,
    )  # fmt: skip
    result = gateway.run("status")  # once, because the output is not a terminal
    assert result.exit_code == 0, result.exception
    for text in (
        "target_only for 1h 1m",
        "collapsed",
        "1-4: 3, 5: 1, 6-64: 0",
        "1.67 over 100 drafts",
        "1: 1.31",
        "0.40% of engine time",
        f"target_only by {STORED_ADMIN_KEY.key_id}, 2d 3h left: ticket [7]",
        "acme",
        "tpl",
        "290",
        "1-64: 0",
        "1.07",
    ):
        assert text in result.output, text


def test_status_json_is_the_gateways_answer(gateway: Gateway):
    gateway.control.changes.append(change())
    shown = json.loads(gateway.run("status", "--json").output)
    assert [worker["worker"] for worker in shown["workers"]] == ["w1"]
    assert [event["reason"] for event in shown["events"]] == ["collapsed"]
    assert shown["attribution"]["offenders"] == []


def change() -> SpeculationChange:
    return SpeculationChange(
        sequence=1,
        time="2027-01-15T08:00:00.000+00:00",
        worker="w1",
        model="demo",
        mode=SpeculationMode.TARGET_ONLY,
        previous_mode=SpeculationMode.SPECULATIVE,
        reason=Reason.COLLAPSED,
        table=("1-64: 0",),
        avoided=False,
        acceptance_length=1.071,
        drafts=32,
    )


def test_status_shows_a_worker_that_was_not_scraped_yet(gateway: Gateway):
    gateway.control.views.clear()
    change_reading(gateway.pool, None)
    result = gateway.run("status", "--once")
    assert result.exit_code == 0
    assert "all: not scraped yet" in result.output


def test_status_shows_what_a_worker_lacks_and_why(gateway: Gateway):
    assert rows(gateway)["missing capabilities"] == "-"
    missing = {Capability.ATTRIBUTION: "an old one", Capability.DEFERRED_PREFILL: "not on a GPU"}
    reading = EngineReading(
        controllable=False, problems=("no table",), epoch="", missing_capabilities=missing
    )
    change_reading(gateway.pool, reading)
    shown = rows(gateway)["missing capabilities"]
    assert shown == "control: no table; attribution: an old one; deferred_prefill: not on a GPU"


def change_reading(pool: WorkerPool, reading: EngineReading | None) -> None:
    snapshot = pool.snapshot(WorkerId("w1"))
    assert snapshot is not None
    pool.update(replace(snapshot, reading=reading))


def rows(gateway: Gateway) -> dict[str, str]:
    """The table of workers, which has one."""
    lines = [line.split("│") for line in gateway.run("status", "--once").output.splitlines() if "│" in line]
    return {cells[1].strip(): cells[2].strip() for cells in lines if len(cells) == 4}


def test_status_reports_unreadable_overrides():
    attribution: dict[str, Any] = {"offenders": []}
    shown = {"now": 0.0, "workers": [], "failure": "disk I/O error", "attribution": attribution}
    console = Console(record=True, width=120, file=open_nowhere())
    console.print(render(shown, []))
    assert "overrides are unknown: disk I/O error" in console.export_text()


def test_newest_changes_are_whole_in_a_terminal_of_80_columns():
    attribution: dict[str, Any] = {"offenders": []}
    shown = {"now": 0.0, "workers": [], "failure": None, "attribution": attribution}
    event = {"time": "2027-01-15T08:00:00.000Z", "worker": "worker-1", "mode": "target_only",
             "reason": "collapsed", "table": ["1-4: 0", "5-64: 1"], "acceptance_length": 1.07}  # fmt: skip
    console = Console(record=True, width=80, file=open_nowhere())
    console.print(render(shown, [event]))
    text = console.export_text()
    assert "01-15 08:00:00" in text
    assert "…" not in text


def open_nowhere() -> Any:
    return SimpleNamespace(write=lambda _text: None, flush=lambda: None)


# What it does.


def test_off_and_on_override_all_workers_for_an_hour(gateway: Gateway):
    assert gateway.run("off").exit_code == 0
    assert gateway.orders() == [("*", "target_only", 3600, "")]
    result = gateway.run("on")
    assert result.output == "all workers: speculative for 1h; `appliance speculation auto` ends it\n"
    assert gateway.orders() == [("*", "speculative", 3600, "")]


def test_override_takes_worker_duration_and_note(gateway: Gateway):
    result = gateway.run("off", "--worker", "w1", "--for", "90m", "--note", "drift")
    assert result.output == "w1: target_only for 1h 30m; `appliance speculation auto` ends it\n"
    assert gateway.orders() == [("w1", "target_only", 5400, "drift")]
    (entry,) = gateway.audit.entries
    assert (entry["type"], entry["actor"], entry["note"]) == (
        "speculation.overridden",
        STORED_ADMIN_KEY.key_id,
        "drift",
    )


def test_auto_removes_an_override(gateway: Gateway):
    gateway.run("off", "--worker", "w1")
    result = gateway.run("auto", "--worker", "w1")
    assert result.output == "w1: automatic control\n"
    assert gateway.orders() == []


def test_recycle_keeps_the_draft_by_default(gateway: Gateway):
    assert gateway.run("recycle", "w1").exit_code == 0
    assert gateway.run("recycle", "w1", "--without-draft", "--note", "memory").exit_code == 0
    asked = [(each["with_draft"], each["note"]) for each in gateway.control.recycles]
    assert asked == [(True, ""), (False, "memory")]


# What it refuses.


def test_refusal_of_the_gateway_is_one_line(gateway: Gateway):
    gateway.control.refusal = "It is the last worker of its model."
    assert refusal(gateway.run("recycle", "w1")).endswith("(409): It is the last worker of its model.")
    assert "No worker has this id" in refusal(gateway.run("off", "--worker", "w9"))
    assert "`seconds` must be" in refusal(gateway.run("off", "--for", "30s"))
    assert gateway.orders() == []


def test_wrong_admin_key_is_reported(gateway: Gateway):
    (gateway.data / "admin.key").write_text("sk-other")
    assert "is this its admin key?" in refusal(gateway.run("status", "--once"))


def test_missing_admin_key_is_reported(gateway: Gateway):
    (gateway.data / "admin.key").unlink()
    assert "--data" in refusal(gateway.run("off"))


def test_unreachable_gateway_is_reported(gateway: Gateway):
    result = CliRunner().invoke(
        cli, ["speculation", "off", "--url", "http://127.0.0.1:9", "--data", str(gateway.data)]
    )
    assert "no gateway answers at http://127.0.0.1:9" in refusal(result)


# Lengths of time and tables, as people write and read them.


@given(st.integers(0, 10**6), st.sampled_from("smhd"))
def test_duration_is_a_number_and_a_unit(number: int, unit: str):
    assert parse_duration(f"{number}{unit}") == number * SECONDS_IN[unit]


@given(st.integers(0, 59), st.integers(0, 59))
def test_duration_is_shown_as_it_is_written(minutes: int, seconds: int):
    shown = show_duration(60 * minutes + seconds)
    assert sum(parse_duration(part) for part in shown.split()) == 60 * minutes + seconds


@pytest.mark.parametrize("text", ["", "1", "s", "1 h", "-1h", "1.5h", "1H", "1h30m", "٣s", "1h\n"])
def test_malformed_duration_is_refused(text: str):
    with pytest.raises(ConfigurationError, match="30s, 10m, 1h or 2d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0s"), (-5, "0s"), (59.6, "1m"), (3661, "1h 1m"), (7 * 86400, "7d")]
)
def test_duration_is_shown_in_its_two_largest_units(seconds: float, shown: str):
    assert show_duration(seconds) == shown


def test_a_draft_token_table_is_shown_as_ranges():
    assert show_ranges([(1, 4, 3), (5, 5, 1), (6, 64, 0)]) == "1-4: 3, 5: 1, 6-64: 0"
    assert show_ranges([]) == "-"
