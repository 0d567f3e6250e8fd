"""The admin API shows control, and records an override before it is in force."""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from appliance.api.services import Services
from appliance.app.http_app import create_admin_app
from appliance.audit.entry import decode
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.control.changes import SpeculationChange
from appliance.control.override import Override, SqlOverrideStore
from appliance.gateway.attribution import Attribution
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, AuditSettings, LogSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel, Worker, WorkerId
from appliance.speculation.evidence import Acceptance
from appliance.speculation.state import MonitorState
from appliance.speculation.values import EngineReading, Reason, SpecDecodeCounters, SpeculationMode
from appliance.tenancy import Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import FakeControl, FakeView, StallingStore, uncounted_refusals

NOW = 1_800_000_000.5
ADMIN_KEY, STORED_ADMIN_KEY = make_key(b"a" * 37, admin=True)
KEY, STORED_KEY = make_key(b"t" * 37)
ROUTES = [
    ("GET", "/admin/v1/status"),
    ("GET", "/admin/v1/speculation"),
    ("GET", "/admin/v1/speculation/events"),
    ("PUT", "/admin/v1/speculation/override"),
    ("POST", "/admin/v1/workers/w1/recycle"),
    ("POST", "/admin/v1/audit/reads"),
]


@dataclass(kw_only=True)
class Admin:
    """The admin API with its services, and a client with the key."""

    client: httpx.AsyncClient
    pool: WorkerPool
    control: FakeControl
    overrides: SqlOverrideStore
    attribution: Attribution
    audit_store: StallingStore
    now: list[float]

    async def get(self, path: str) -> dict[str, Any]:
        response = await self.client.get(f"/admin/v1/{path}")
        assert response.status_code == 200, response.text
        return response.json()

    async def override(self, **body: Any) -> httpx.Response:
        return await self.client.put("/admin/v1/speculation/override", json=body)

    def recorded(self) -> list[dict[str, Any]]:
        """The overrides in the audit log."""
        entries = [decode(leaf.leaf) for leaf in self.audit_store.leaves(0, 1000)]
        return [dict(entry.fields) for entry in entries if entry.type == "speculation.overridden"]


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    create_signing_key(tmp_path / "audit.key")
    settings = AuditSettings(append_timeout_seconds=1.0)
    url = f"sqlite:///{tmp_path / 'audit.db'}"
    pool, now, control = WorkerPool(), [NOW], FakeControl()
    for name in ("w1", "w2"):
        pool.add(Worker(worker_id=WorkerId(name), url=f"http://{name}"))
    async with AsyncExitStack() as stack:
        audit_store = StallingStore(stack.enter_context(closing(SqlAuditStore(url))))
        overrides = stack.enter_context(closing(SqlOverrideStore(url)))
        audit = await stack.enter_async_context(
            AuditLog.open(
                store=audit_store,
                signer=load_signing_key(tmp_path / "audit.key", settings.origin),
                settings=settings,
                sealed_head_path=tmp_path / "audit.head",
                clock=lambda: now[0],
                version="test",
            )
        )
        stack.callback(audit_store.release)
        attribution = Attribution(label_key=bytes(16), clock=time.monotonic, min_drafts=1)
        nothing: Any = None
        tenants = TenantDirectory(
            (Tenant(name="operator", keys=(STORED_ADMIN_KEY,)), Tenant(name="t", keys=(STORED_KEY,)))
        )
        app = create_admin_app(
            Services(
                settings=ApiSettings(),
                tenants=tenants,
                identity=Authenticator(tenants),
                refused=uncounted_refusals(),
                pool=pool,
                workers=nothing,
                gateway=nothing,
                audit=audit,
                attribution=attribution,
                control=control,
                overrides=overrides,
                metrics=Metrics(CollectorRegistry()),
                logger=configure_logs(LogSettings(level="error"), terminal=False),
                clock=lambda: now[0],
                new_request_id=lambda: "ours",
                version="test",
            )
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app),
                base_url="http://appliance",
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            )
        )
        yield Admin(
            client=client,
            pool=pool,
            control=control,
            overrides=overrides,
            attribution=attribution,
            audit_store=audit_store,
            now=now,
        )


def seen(admin: Admin) -> None:
    """Store a scrape of w1."""
    counters = SpecDecodeCounters(
        drafts=100, draft_tokens=300, accepted_tokens=167, accepted_per_position=(80, 57, 30)
    )
    snapshot = admin.pool.snapshot(WorkerId("w1"))
    assert snapshot is not None
    state = MonitorState(
        mode=SpeculationMode.SPECULATIVE, reason=Reason.HEALTHY, acceptance=Acceptance(total=counters)
    )
    reading = EngineReading(
        controllable=True, epoch="e", largest_batch=64, table=((1, 4, 3), (5, 64, 0)), batch=6
    )
    models = (ServedModel(name="demo", max_model_len=None, created=1),)
    snapshot = replace(snapshot, decision=state.decision, figures=state.figures)
    admin.pool.update(replace(snapshot, healthy=True, models=models, reading=reading))
    admin.control.views["w1"] = FakeView()


def change(sequence: int) -> SpeculationChange:
    return SpeculationChange(
        sequence=sequence,
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


@pytest.mark.parametrize("key", ["", KEY, "nonsense"], ids=["none", "tenant", "nonsense"])
async def test_every_route_needs_an_admin_key(admin: Admin, key):
    headers = {"Authorization": f"Bearer {key}"}
    for method, path in ROUTES:
        response = await admin.client.request(method, path, headers=headers, json={})
        assert response.status_code == 401, path
    assert not admin.recorded()


async def test_a_worker_is_shown_with_its_mode_and_reason(admin: Admin):
    seen(admin)
    shown = await admin.get("speculation")
    assert [worker["worker"] for worker in shown["workers"]] == ["w1", "w2"]
    assert shown["workers"][0] == {
        "worker": "w1",
        "models": ["demo"],
        "healthy": True,
        "admission": "admitted",
        "avoided": False,
        "speculates": True,
        "controllable": True,
        "problems": [],
        "missing_capabilities": {},
        "mode": "speculative",
        "reason": "healthy",
        "since": 1_800_000_000.0,
        "table": [[1, 4, 3], [5, 64, 0]],
        "batch": 6,
        "draft_tokens": 0,
        "acceptance_length": 2.67,
        "acceptance_rate": 0.557,
        "acceptance_rate_per_position": [0.8, 0.57, 0.3],
        "window_drafts": 100,
        "buckets": [
            {
                "bucket": 1,
                "draft_tokens": 3,
                "reason": "healthy",
                "break_even": 1.31,
                "break_evens": {"3": 1.31},
                "payoff": 0.25,
                "tokens_per_second": {"0": 78.0, "3": 118.04},
            },
            {
                "bucket": 2,
                "draft_tokens": 3,
                "reason": "healthy",
                "break_even": None,
                "break_evens": {"3": 1.31},
                "payoff": None,
                "tokens_per_second": {"0": 78.0, "3": 118.04},
            },
        ],
        "exploration_share": 0.004,
        "override": None,
    }


async def test_a_worker_that_was_never_scraped_is_shown(admin: Admin):
    worker = (await admin.get("speculation"))["workers"][1]
    assert (worker["controllable"], worker["acceptance_length"], worker["buckets"]) == (False, None, [])


async def test_an_infinite_number_is_shown_as_null(admin: Admin):
    seen(admin)
    admin.control.views["w1"] = FakeView(since=float("-inf"))
    worker = (await admin.get("speculation"))["workers"][0]
    assert worker["since"] is None


async def test_why_a_worker_cannot_be_controlled_is_shown(admin: Admin):
    seen(admin)
    admin.control.views["w1"] = FakeView(controllable=False, problems=("no plugin",))
    worker = (await admin.get("speculation"))["workers"][0]
    assert (worker["controllable"], worker["problems"]) == (False, ["no plugin"])


async def test_the_traffic_that_wastes_draft_tokens_is_shown(admin: Admin):
    for number in range(12):
        admin.attribution.record(
            tenant=f"t{number}", model="demo", template="tpl", context="0-1k",
            drafts=100, draft_tokens=300, accepted_tokens=10 * number, completion_tokens=100,
        )  # fmt: skip
    shown = (await admin.get("speculation"))["attribution"]
    assert [row["tenant"] for row in shown["offenders"]] == [f"t{number}" for number in range(10)]
    assert shown["offenders"][1]["acceptance_length"] == 1.1
    assert len(shown["by_tenant"]) == 12
    assert [row["value"] for row in shown["by_template"]] == ["tpl"]
    assert [row["requests"] for row in shown["by_context"]] == [12]


async def test_an_override_is_recorded_and_in_force_when_it_is_answered(admin: Admin):
    response = await admin.override(worker="w1", mode="target_only", seconds=120, note="drift, ticket 7")
    assert response.status_code == 200
    ordered = {
        "worker": "w1",
        "mode": "target_only",
        "draft_tokens": None,
        "actor": STORED_ADMIN_KEY.key_id,
        "note": "drift, ticket 7",
        "since": NOW,
        "expires_at": NOW + 120,
    }
    assert response.json() == {"worker": "w1", "override": ordered}
    assert await admin.overrides.list() == (Override(**{**ordered, "mode": SpeculationMode.TARGET_ONLY}),)
    assert admin.recorded() == [
        {
            "actor": STORED_ADMIN_KEY.key_id,
            "worker": "w1",
            "mode": "target_only",
            "until": "2027-01-15T08:02:00.500Z",
            "note": "drift, ticket 7",
        }
    ]


async def test_an_override_is_shown_at_its_workers_until_it_expires(admin: Admin):
    await admin.override(worker="*", mode="target_only", seconds=60)
    await admin.override(worker="w2", mode="speculative", seconds=120)

    async def modes() -> list[str | None]:
        workers = (await admin.get("speculation"))["workers"]
        return [worker["override"] and worker["override"]["mode"] for worker in workers]

    assert await modes() == ["target_only", "speculative"]
    admin.now[0] += 60
    assert await modes() == [None, "speculative"]
    assert [order["worker"] for order in (await admin.get("speculation"))["overrides"]] == ["w2"]


async def test_auto_removes_an_override_and_is_recorded(admin: Admin):
    await admin.override(worker="w1", mode="target_only")
    response = await admin.override(worker="w1", mode="auto")
    assert response.json() == {"worker": "w1", "override": None}
    assert await admin.overrides.list() == ()
    assert admin.recorded()[-1] == {"actor": STORED_ADMIN_KEY.key_id, "worker": "w1", "mode": "auto"}


async def test_an_override_of_a_worker_that_left_can_be_removed(admin: Admin):
    await admin.overrides.put(
        Override(
            worker="gone", mode=SpeculationMode.TARGET_ONLY, actor="k", note="", since=NOW, expires_at=NOW + 9
        )
    )
    assert (await admin.override(worker="gone", mode="target_only")).status_code == 404
    assert (await admin.override(worker="gone", mode="auto")).status_code == 200
    assert (await admin.override(worker="gone", mode="auto")).status_code == 404
    assert await admin.overrides.list() == ()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_request"),
        (b"[]", "invalid_json"),
        (b'{"worker": "\xff"}', "invalid_json"),
        (b'{"worker": "*", "mode": "off"}', "invalid_request"),
        (b'{"worker": "*", "mode": "target_only", "seconds": 59}', "invalid_request"),
        (b'{"worker": "w9", "mode": "target_only"}', "worker_not_found"),
    ],
)
async def test_an_invalid_override_changes_and_records_nothing(admin: Admin, body, code):
    response = await admin.client.put("/admin/v1/speculation/override", content=body)
    assert response.status_code in {400, 404}
    assert response.json()["error"]["code"] == code
    assert "\n" not in response.json()["error"]["message"]
    assert await admin.overrides.list() == ()
    assert not admin.recorded()


async def test_an_override_that_cannot_be_recorded_is_not_in_force(admin: Admin):
    admin.audit_store.refused.add("speculation.overridden")
    response = await admin.override(worker="*", mode="target_only")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "audit_unavailable")
    assert await admin.overrides.list() == ()


async def test_an_override_is_not_in_force_before_it_is_recorded(admin: Admin):
    admin.audit_store.held.add("speculation.overridden")
    asking = asyncio.create_task(admin.override(worker="*", mode="target_only"))
    await asyncio.sleep(0.05)
    assert await admin.overrides.list() == ()
    admin.audit_store.release()
    assert (await asking).status_code == 200
    assert len(await admin.overrides.list()) == 1


async def test_workers_are_shown_if_the_overrides_cannot_be_read(admin: Admin, tmp_path: Path):
    seen(admin)
    await admin.override(worker="*", mode="target_only")
    with closing(sqlite3.connect(tmp_path / "audit.db")) as connection:
        connection.execute("DROP TABLE speculation_override")
    shown = await admin.get("speculation")
    assert "no such table" in shown["failure"]
    assert (shown["workers"][0]["mode"], shown["workers"][0]["override"]) == ("speculative", None)


async def test_an_override_that_cannot_be_stored_is_an_error_and_can_be_retried(admin: Admin, tmp_path: Path):
    await admin.override(worker="*", mode="target_only")
    with closing(sqlite3.connect(tmp_path / "audit.db")) as connection:
        connection.execute("ALTER TABLE speculation_override RENAME TO lost")
    response = await admin.override(worker="*", mode="speculative")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "control_unavailable")
    assert response.headers["x-should-retry"] == "true"
    with closing(sqlite3.connect(tmp_path / "audit.db")) as connection:
        connection.execute("ALTER TABLE lost RENAME TO speculation_override")
    assert (await admin.override(worker="*", mode="speculative")).status_code == 200


@pytest.mark.parametrize(
    ("body", "with_draft", "note"),
    [
        (b"", True, ""),
        (b"{}", True, ""),
        (b'{"with_draft": false, "note": "free its memory"}', False, "free its memory"),
    ],
)
async def test_a_recycle_names_the_actor(admin: Admin, body, with_draft, note):
    response = await admin.client.post("/admin/v1/workers/w1/recycle", content=body)
    assert response.status_code == 202
    asked = {"worker": "w1", "with_draft": with_draft, "note": note, "actor": STORED_ADMIN_KEY.key_id}
    assert admin.control.recycles == [asked]


@pytest.mark.parametrize(
    ("worker", "body", "status"),
    [
        ("w9", {}, 404),
        ("w1", {"with_draft": "no"}, 400),
        ("w1", {"note": "x" * 201}, 400),
        ("w1", {"draft": True}, 400),
    ],
)
async def test_an_invalid_recycle_is_not_started(admin: Admin, worker, body, status):
    response = await admin.client.post(f"/admin/v1/workers/{worker}/recycle", json=body)
    assert (response.status_code, admin.control.recycles) == (status, [])


async def test_a_refusal_of_the_control_loop_is_a_conflict_with_its_reason(admin: Admin):
    admin.control.refusal = "It is the last worker of its model."
    response = await admin.client.post("/admin/v1/workers/w1/recycle", json={})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["message"]) == (
        409,
        "control_refused",
        "It is the last worker of its model.",
    )


async def test_events_are_the_newest_256_after_a_sequence_number(admin: Admin):
    admin.control.changes = [change(number) for number in range(1, 401)]
    events = (await admin.get("speculation/events"))["events"]
    assert [event["sequence"] for event in events] == list(range(145, 401))
    shown = await admin.get("speculation/events?after=399")
    assert shown["now"] == NOW
    assert shown["events"] == [
        {
            "sequence": 400,
            "time": "2027-01-15T08:00:00.000+00:00",
            "worker": "w1",
            "model": "demo",
            "mode": "target_only",
            "previous_mode": "speculative",
            "reason": "collapsed",
            "table": ["1-64: 0"],
            "avoided": False,
            "acceptance_length": 1.071,
            "drafts": 32,
        }
    ]


async def test_events_after_an_invalid_number_are_refused(admin: Admin):
    for after in ("-1", "x", "1.5", "", "9" * 40, "٣"):
        response = await admin.client.get("/admin/v1/speculation/events", params={"after": after})
        assert response.status_code == 400, after
        assert json.loads(response.text)["error"]["param"] == "after"


READ = {"account": "alice", "operation": "tail", "start": 0, "end": 1}


async def test_a_read_is_durable_before_it_is_answered(admin: Admin):
    response = await admin.client.post("/admin/v1/audit/reads", json={**READ, "purpose": "review"})
    assert response.status_code == 201
    (leaf,) = admin.audit_store.leaves(response.json()["index"], response.json()["index"] + 1)
    entry = decode(leaf.leaf)
    assert (entry.id, entry.type) == (response.json()["entry"], "audit.read")
    assert entry.fields == {
        "actor": "cli:alice",
        "operation": "tail",
        "start": 0,
        "end": 1,
        "purpose": "review",
        "key_id": STORED_ADMIN_KEY.key_id,
    }


MALFORMED = [
    {"account": ""},
    {"account": None},
    {"account": "a" * 65},
    {"operation": "erase"},
    {"start": -1},
    {"start": True},
    {"start": 2},
    {"end": "1"},
    {"end": 2**53},
    {"purpose": "two\nlines"},
    {"prompt": "secret"},
]


async def test_a_malformed_read_is_refused(admin: Admin):
    for wrong in MALFORMED:
        response = await admin.client.post("/admin/v1/audit/reads", json={**READ, **wrong})
        assert response.status_code == 400, wrong
    assert not [leaf for leaf in admin.audit_store.leaves(0, 1000) if leaf.type == "audit.read"]
