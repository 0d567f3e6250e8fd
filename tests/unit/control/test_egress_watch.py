"""The egress checks of a running gateway: records, schedule, readiness, admin API."""

import asyncio
import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from appliance.api import admin, ops
from appliance.api.error_responses import render
from appliance.audit.durability.health import AuditHealth
from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Receipt
from appliance.control.egress_checks import EgressWatch
from appliance.errors import ApplianceError, AuditUnavailableError, ControlRefusedError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import EgressSettings, LogSettings
from appliance.sovereignty.egress.egress_status import EgressStatus
from appliance.sovereignty.egress.probe import EgressProbe, Observation, ProbeKind, ProbeOutcome, ProbeResult
from appliance.sovereignty.wall import NO_WALL, Wall
from appliance.tenancy import Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import audit_fields, until

NOW = 1_800_000_000.0


def observed(outcome: ProbeOutcome, control: ProbeOutcome = ProbeOutcome.CONNECTED) -> Observation:
    return Observation(
        control=ProbeResult(
            probe=EgressProbe(kind=ProbeKind.CONTROL, host="10.0.0.5", port=8000), outcome=control
        ),
        results=(
            ProbeResult(probe=EgressProbe(kind=ProbeKind.TCP, host="1.1.1.1", port=443), outcome=outcome),
        ),
    )


CLOSED = observed(ProbeOutcome.TIMED_OUT)
OPEN = observed(ProbeOutcome.CONNECTED)
INCONCLUSIVE = observed(ProbeOutcome.TIMED_OUT, control=ProbeOutcome.REFUSED)


class Sink:
    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.failure: AuditUnavailableError | None = None

    def submit(self, entry_type: EntryType, /, **fields: Any) -> "asyncio.Future[Receipt]":
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        if self.failure:
            future.set_exception(self.failure)
        else:
            self.entries.append({"type": entry_type, **audit_fields(entry_type, fields)})
            future.set_result(Receipt(index=len(self.entries) - 1, entry_id="0" * 26))
        return future

    async def confirm(self, pending: "asyncio.Future[Receipt]") -> Receipt:
        return await pending


class Scene:
    """A watch whose network is a list: the last observation stays."""

    def __init__(self, *observations: Observation, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.observations = list(observations)
        self.sink, self.log, self.metrics = Sink(), io.StringIO(), Metrics(CollectorRegistry())
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", self.log)
            logger = configure_logs(LogSettings(format="json"), terminal=False)
        fast = {"mode": "strict", "interval_seconds": 1000, "retry_seconds": 1000, **settings}
        self.watch = EgressWatch(
            settings=EgressSettings(**fast),
            observe=None if fast["mode"] == "off" else self.observe,
            audit=self.sink,
            gateway="gw-1",
            host="pod-0",
            metrics=self.metrics,
            logger=logger,
            clock=lambda: NOW,
            monotonic=lambda: 5.0,
        )

    def observe(self) -> Observation:
        return self.observations.pop(0) if len(self.observations) > 1 else self.observations[0]

    def count(self, verdict: str) -> float:
        value = self.metrics.registry.get_sample_value("appliance_egress_checks_total", {"verdict": verdict})
        assert value is not None
        return value

    def verdicts(self) -> dict[str, float | None]:
        return {
            name: self.metrics.registry.get_sample_value("appliance_egress_verdict", {"verdict": name})
            for name in ("closed", "open", "inconclusive")
        }


@pytest.fixture
def scene(monkeypatch):
    return lambda *observations, **settings: Scene(*observations, monkeypatch=monkeypatch, **settings)


async def test_a_check_makes_an_entry_metrics_and_a_log_line(scene):
    made = scene(OPEN)
    report, receipt = await made.watch.check("ak_1")
    (entry,) = made.sink.entries
    assert (entry["type"], entry["result"], entry["trigger"]) == ("egress.attested", "open", "request")
    assert (entry["actor"], entry["gateway"], entry["host"]) == ("ak_1", "gw-1", "pod-0")
    assert entry["outcomes"] == ["tcp 1.1.1.1:443 connected"]
    assert receipt.index == 0
    assert report.time == "2027-01-15T08:00:00Z"
    assert made.verdicts() == {"closed": 0, "open": 1, "inconclusive": 0}
    assert made.count("open") == 1
    sample = made.metrics.registry.get_sample_value
    assert sample("appliance_egress_last_check_timestamp_seconds") == NOW
    (line,) = map(json.loads, made.log.getvalue().splitlines())
    assert (line["event"], line["level"], line["state"]) == ("egress_checked", "error", "open")
    assert line["detail"] == "tcp 1.1.1.1:443 connected"


async def test_checks_run_at_start_and_periodically(scene):
    """Without an actor."""
    made = scene(CLOSED, interval_seconds=1, retry_seconds=1000)
    running = asyncio.ensure_future(made.watch.run())
    await until(lambda: len(made.sink.entries) == 2)
    running.cancel()
    assert [entry["trigger"] for entry in made.sink.entries] == ["start", "schedule"]
    assert not any("actor" in entry for entry in made.sink.entries)


@pytest.mark.parametrize("first", [OPEN, INCONCLUSIVE], ids=["open", "inconclusive"])
async def test_a_check_that_is_not_closed_is_repeated_soon(scene, first):
    made = scene(first, CLOSED, retry_seconds=1)
    running = asyncio.ensure_future(made.watch.run())
    await until(lambda: made.count("closed") == 1)
    running.cancel()
    assert made.watch.status.problem is None


async def test_a_log_that_takes_no_entry_does_not_end_the_checks(scene):
    """The status follows the network, and the log's health reports the failure."""
    made = scene(OPEN)
    made.sink.failure = AuditUnavailableError("the disk is full")
    running = asyncio.ensure_future(made.watch.run())
    await until(lambda: "audit_entry_refused" in made.log.getvalue())
    assert not running.done()
    running.cancel()
    assert made.watch.status.problem is not None


async def test_a_requested_check_that_cannot_be_recorded_fails(scene):
    made = scene(CLOSED)
    made.sink.failure = AuditUnavailableError("the disk is full")
    with pytest.raises(AuditUnavailableError):
        await made.watch.check("ak_1")


async def test_mode_off_makes_no_checks(scene):
    """Neither periodic nor on request."""
    made = scene(OPEN, mode="off")
    await made.watch.run()
    with pytest.raises(ControlRefusedError, match=r"egress\.mode is off"):
        await made.watch.check("ak_1")
    assert made.verdicts() == {"closed": 0, "open": 0, "inconclusive": 0}
    assert made.sink.entries == []


ADMIN_KEY, STORED_KEY = make_key(b"a" * 37, admin=True)


class Services:
    """The part of `Services` that these routes use."""

    def __init__(self, watch: EgressWatch | None, metrics: Metrics) -> None:
        self.egress, self.metrics = watch, metrics
        self.wall = NO_WALL
        self.pool = SimpleNamespace(any_healthy=lambda: True)
        self.audit = SimpleNamespace(state=lambda: SimpleNamespace(failure=None))
        self.audit_health = AuditHealth
        self.identity = Authenticator(TenantDirectory((Tenant(name="operator", keys=(STORED_KEY,)),)))

    def tenants_warning(self) -> None:
        return None

    def forward_warning(self) -> None:
        return None

    def egress_status(self) -> EgressStatus:
        return self.egress.status if self.egress else EgressStatus(mode="off")


def client_of(made: Scene) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(ops.health)
    app.include_router(admin.router)
    app.state.services = Services(made.watch, made.metrics)

    async def refused(_request: Any, error: Exception) -> Any:
        assert isinstance(error, ApplianceError)
        return render(error)

    app.add_exception_handler(ApplianceError, refused)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", headers=headers)


async def test_readiness_follows_the_checks_in_strict(scene):
    """Not ready before the first check nor with open egress; ready again once it is closed."""
    made = scene(INCONCLUSIVE, OPEN, CLOSED)
    async with client_of(made) as client:
        for status, problem in [
            (503, "no egress check has been conclusive yet"),
            (503, "no egress check has been conclusive yet"),
            (503, "egress is possible: tcp 1.1.1.1:443 connected"),
            (200, "ok"),
        ]:
            answer = await client.get("/readyz")
            assert answer.status_code == status
            assert answer.json()["checks"]["egress"].startswith(problem)
            await made.watch.check("ak_1")


async def test_readiness_only_warns_in_warn(scene):
    """A gateway with open egress serves and warns."""
    made = scene(OPEN, mode="warn")
    await made.watch.check("ak_1")
    async with client_of(made) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["warnings"] == ["egress is possible: tcp 1.1.1.1:443 connected"]


async def test_readiness_has_no_egress_check_in_mode_off(scene):
    async with client_of(scene(OPEN, mode="off")) as client:
        answer = await client.get("/readyz")
    assert "egress" not in answer.json()["checks"]
    assert answer.json()["warnings"] == []


async def test_readiness_warns_of_a_kernel_without_the_wall(scene):
    """It was asked for, and the process can connect to any port."""
    client = client_of(scene(CLOSED))
    services = client._transport.app.state.services
    services.wall = Wall(is_up=False, detail="not up", warning="the wall is not up (no Landlock)")
    async with client:
        answer = await client.get("/readyz")
    assert answer.json()["warnings"] == ["the wall is not up (no Landlock)"]


async def test_an_admin_reads_the_last_check_and_requests_another(scene):
    """Both as in the report, and the answer names its entry."""
    made = scene(CLOSED, INCONCLUSIVE)
    async with client_of(made) as client:
        before = (await client.get("/admin/v1/egress")).json()
        assert before["mode"] == "strict"
        assert (before["last"], before["conclusive"]) == (None, None)
        first = (await client.post("/admin/v1/egress/check")).json()
        second = (await client.post("/admin/v1/egress/check")).json()
        after = (await client.get("/admin/v1/egress")).json()
    assert first.pop("entry") == second.pop("entry") == "0" * 26
    assert (first["verdict"], second["verdict"]) == ("closed", "inconclusive")
    assert (after["conclusive"], after["last"]) == (first, second)
    assert after["problem"] is None
    assert len(after["warnings"]) == 1
    assert [entry["actor"] for entry in made.sink.entries] == [STORED_KEY.key_id] * 2


async def test_a_requested_check_is_refused_in_mode_off(scene):
    async with client_of(scene(OPEN, mode="off")) as client:
        answer = await client.post("/admin/v1/egress/check")
    assert answer.status_code == 409
    assert "egress.mode is off" in answer.json()["error"]["message"]
