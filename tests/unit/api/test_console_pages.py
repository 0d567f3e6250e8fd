"""Logins, forms and security headers of the console."""

import asyncio
import io
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from appliance.api.console.console import Console
from appliance.api.console.headers import HEADERS
from appliance.api.console.history import History
from appliance.api.console.sessions import LoginAttempts, Sessions
from appliance.api.refusals import RefusedCallers
from appliance.api.services import Services
from appliance.app.http_app import create_admin_app
from appliance.audit.entry import decode
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.timestamping import TimestampLevel
from appliance.audit.verification import Progress, Stage
from appliance.audit.verify import ExitCode
from appliance.audit.witness.witnessing import WitnessLevel
from appliance.gateway.attribution import Attribution
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, AuditSettings, ConsoleSettings, LogSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.sovereignty.egress.egress_status import EgressStatus
from appliance.tenancy import AdminScope, Tenant, TenantDirectory, make_key
from appliance.tenancy.allowances import Limits
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import FakeControl, until

ADMIN_KEY, STORED_ADMIN_KEY = make_key(b"a" * 37, admin=True)
KEY, STORED_KEY = make_key(b"t" * 37)
HOSTILE = "<script>alert(1)</script>"
PAGES = ("", "/tenants", "/audit", "/egress", "/chat")
LIVE = ("/overview/live", "/tenants/live", "/audit/live", "/egress/live")


class FakeEgress:
    """Records who requested a check."""

    status = EgressStatus(mode="warn")

    def __init__(self) -> None:
        self.actors: list[str] = []

    async def check(self, actor: str) -> None:
        self.actors.append(actor)


class FakeVerification:
    """Records its start."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.started = 0

    def start(self) -> bool:
        self.started += 1
        return True


@dataclass(kw_only=True)
class Site:
    """The console and a browser without a cookie."""

    client: httpx.AsyncClient
    console: Console
    tenants: TenantDirectory
    metrics: Metrics
    egress: FakeEgress
    verification: FakeVerification
    now: list[float]
    log: io.StringIO
    refused: RefusedCallers
    store: SqlAuditStore

    async def entries(self, entry_type: str) -> list[Any]:
        """The fields of the entries of a type, once there are some."""
        await until(lambda: any(leaf.type == entry_type for leaf in self.store.leaves(0, 1000)))
        return [decode(leaf.leaf).fields for leaf in self.store.leaves(0, 1000) if leaf.type == entry_type]

    async def log_in(self, key: str = ADMIN_KEY, **headers: str) -> httpx.Response:
        return await self.client.post("/console/login", data={"key": key}, headers=headers or None)

    async def csrf(self) -> str:
        page = await self.client.get("/console/audit")
        found = re.search(r'name="csrf" value="([^"]+)"', page.text)
        assert found is not None
        return found[1]


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    create_signing_key(tmp_path / "audit.key")
    settings, now, log = AuditSettings(), [1000.0], io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        logger = configure_logs(LogSettings(format="json"), terminal=False)
    pool, control, metrics = WorkerPool(), FakeControl(), Metrics(CollectorRegistry())
    worker = Worker(worker_id=WorkerId(HOSTILE), url="http://w1")
    pool.add(worker)
    pool.update(
        WorkerSnapshot(
            worker=worker,
            healthy=True,
            models=(ServedModel(name=HOSTILE, max_model_len=None, created=0),),
        )
    )
    tenants = TenantDirectory(
        (
            Tenant(name="operator", models=(), keys=(STORED_ADMIN_KEY,)),
            Tenant(name=HOSTILE, keys=(STORED_KEY,), limits=Limits(requests_per_minute=60)),
        )
    )
    egress: Any = FakeEgress()
    verification: Any = FakeVerification()
    nothing: Any = None
    async with AsyncExitStack() as stack:
        store = stack.enter_context(closing(SqlAuditStore(f"sqlite:///{tmp_path / 'audit.db'}")))
        audit = await stack.enter_async_context(
            AuditLog.open(
                store=store,
                signer=load_signing_key(tmp_path / "audit.key", settings.origin),
                settings=settings,
                sealed_head_path=tmp_path / "audit.head",
                clock=lambda: now[0],
                version="test",
            )
        )
        console = Console(
            settings=ConsoleSettings(),
            sessions=Sessions(idle_seconds=60, longest_seconds=300, clock=lambda: now[0]),
            attempts=LoginAttempts(attempts=3, seconds=60, clock=lambda: now[0]),
            history=History(pool=pool, control=control, clock=lambda: now[0], logger=logger),
            verification=verification,
            witnesses=lambda: WitnessLevel(known=0, cosigned=0, size=0, time=0),
            timestamps=lambda: TimestampLevel(seconds=3600, size=1200, time=1_800_000_000, failures=2),
            clock=lambda: now[0],
        )
        refused = RefusedCallers(audit=audit, metrics=metrics, logger=logger, clock=lambda: now[0])
        app = create_admin_app(
            Services(
                settings=ApiSettings(),
                tenants=tenants,
                identity=Authenticator(tenants),
                refused=refused,
                pool=pool,
                workers=nothing,
                gateway=nothing,
                audit=audit,
                attribution=Attribution(label_key=bytes(16), clock=time.monotonic),
                control=control,
                overrides=nothing,
                metrics=metrics,
                logger=logger,
                clock=lambda: now[0],
                new_request_id=lambda: "ours",
                version="test",
                egress=egress,
                console=console,
            )
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app, client=("10.0.0.1", 1)),
                base_url="http://appliance",
                headers={"Origin": "http://appliance"},
            )
        )
        yield Site(
            client=client,
            console=console,
            tenants=tenants,
            metrics=metrics,
            egress=egress,
            verification=verification,
            now=now,
            log=log,
            refused=refused,
            store=store,
        )


async def test_every_page_needs_a_login(site):
    """Pages redirect to the login, live fragments and forms are refused."""
    for path in PAGES:
        answer = await site.client.get(f"/console{path}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    for path in LIVE:
        assert (await site.client.get(f"/console{path}")).status_code == 401
    for path in ("/audit/verify", "/egress/check", "/logout"):
        assert (await site.client.post(f"/console{path}")).status_code == 303
    assert site.verification.started == 0
    assert site.egress.actors == []


async def test_an_admin_key_gives_access_to_every_page(site):
    answer = await site.log_in()
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/console" in cookie
    assert "Secure" not in cookie
    assert ADMIN_KEY not in cookie
    for path in (*PAGES, *LIVE):
        assert (await site.client.get(f"/console{path}")).status_code == 200, path


async def test_the_cookie_is_secure_if_connections_are_encrypted(site):
    answer = await site.client.post("https://appliance/console/login", data={"key": ADMIN_KEY})
    assert "Secure" in answer.headers["set-cookie"]


async def test_a_wrong_key_is_refused_counted_and_logged(site):
    """A tenant's key is answered like an unknown one; the credential is written nowhere."""
    wrong, tenants = await site.log_in("sk-wrong"), await site.log_in(KEY)
    assert wrong.status_code == tenants.status_code == 401
    assert wrong.text == tenants.text
    assert "set-cookie" not in wrong.headers
    written = site.log.getvalue()
    assert written.count('"caller_refused"') == written.count('"detail": "console"') == 2
    assert site.metrics.registry.get_sample_value("appliance_callers_refused_total", {"reason": "api_key"})
    assert KEY not in written
    assert "sk-wrong" not in written


async def test_logins_are_in_the_audit_log(site):
    """Each with the id of its key; those that failed are counted, also while their address has to wait."""
    await site.log_in()
    (login,) = await site.entries("console.login")
    assert login == {"key_id": STORED_ADMIN_KEY.key_id, "client": "private"}
    for _ in range(10):
        await site.log_in("sk-wrong")
    await site.log_in(KEY)
    site.refused.report()
    (refused,) = await site.entries("callers.refused")
    assert (refused["surface"], refused["count"]) == ("console", 11)
    assert list(refused["reasons"]) == ["api_key: 10", "role: 1"]
    assert list(refused["clients"]) == ["private: 11"]


async def test_concurrent_logins_are_counted(site):
    """None is accepted because it began before the others had failed."""
    begun, go_on = [], asyncio.Event()
    body = b"key=sk-wrong"

    async def slowly() -> AsyncIterator[bytes]:
        begun.append(True)
        await go_on.wait()
        yield body

    length = {"Content-Length": str(len(body))}
    tries = [
        asyncio.create_task(site.client.post("/console/login", content=slowly(), headers=length))
        for _ in range(8)
    ]
    await until(lambda: len(begun) == len(tries), 10)
    go_on.set()
    codes = [answer.status_code for answer in await asyncio.gather(*tries)]
    assert (codes.count(401), codes.count(429)) == (3, 5)


async def test_too_many_failed_logins_cause_a_wait(site):
    """No longer than `Retry-After`."""
    for _ in range(3):
        await site.log_in("sk-wrong")
    refused = await site.log_in("sk-wrong")
    assert refused.status_code == 429
    site.now[0] += int(refused.headers["retry-after"])
    assert (await site.log_in("sk-wrong")).status_code == 401


async def test_failed_logins_do_not_lock_an_operator_out(site):
    """Behind a proxy all clients share one address."""
    for _ in range(4):
        await site.log_in("sk-wrong")
    assert (await site.log_in()).status_code == 303


async def test_forms_of_other_sites_are_refused(site):
    """With or without a cookie, the login included."""
    assert (await site.log_in(Origin="http://evil")).status_code == 403
    await site.log_in()
    csrf = await site.csrf()
    for data, headers in (
        ({}, {}),
        ({"csrf": "x"}, {}),
        ({"csrf": csrf}, {"Origin": "http://evil"}),
        ({"csrf": csrf}, {"Sec-Fetch-Site": "cross-site"}),
    ):
        answer = await site.client.post("/console/egress/check", data=data, headers=headers)
        assert answer.status_code == 403
    assert site.egress.actors == []


async def test_an_action_names_the_operator(site):
    """The audit log names the console and the key, as the admin API does."""
    await site.log_in()
    csrf = await site.csrf()
    assert (await site.client.post("/console/egress/check", data={"csrf": csrf})).status_code == 303
    assert (await site.client.post("/console/audit/verify", data={"csrf": csrf})).status_code == 303
    assert site.egress.actors == [f"console:{STORED_ADMIN_KEY.key_id}"]
    assert site.verification.started == 1


async def test_a_key_of_scope_read_sees_every_page_and_changes_nothing(site):
    key, stored = make_key(b"r" * 37, admin=True, scopes=frozenset({AdminScope.READ}))
    site.tenants.replace((*site.tenants.tenants, Tenant(name="auditor", keys=(stored,))))
    await site.log_in(key)
    for path in (*PAGES, *LIVE):
        assert (await site.client.get(f"/console{path}")).status_code == 200, path
    assert "the scope <code>workers</code>" in (await site.client.get("/console/egress")).text
    csrf = await site.csrf()
    refused = await site.client.post("/console/egress/check", data={"csrf": csrf})
    assert (refused.status_code, "lacks the scope `workers`" in refused.text) == (403, True)
    assert site.egress.actors == []
    assert (await site.client.post("/console/audit/verify", data={"csrf": csrf})).status_code == 303
    assert (await site.client.post("/console/logout", data={"csrf": csrf})).status_code == 303


async def test_a_key_without_the_scope_read_sees_no_page(site):
    key, stored = make_key(b"w" * 37, admin=True, scopes=frozenset({AdminScope.WORKERS}))
    site.tenants.replace((*site.tenants.tenants, Tenant(name="machine", keys=(stored,))))
    await site.log_in(key)
    for path in (*PAGES, *LIVE):
        refused = await site.client.get(f"/console{path}")
        assert (refused.status_code, "lacks the scope `read`" in refused.text) == (403, True)
        assert HOSTILE not in refused.text
        assert "&lt;script&gt;" not in refused.text


async def test_a_session_ends_by_time_revocation_and_logout(site):
    await site.log_in()
    site.now[0] += 60
    assert (await site.client.get("/console")).headers["location"] == "/console/login?ended=1"
    await site.log_in()
    await site.client.post("/console/logout", data={"csrf": await site.csrf()})
    assert (await site.client.get("/console")).status_code == 303
    await site.log_in()
    assert (await site.client.get("/console")).status_code == 200
    site.tenants.replace(())
    assert (await site.client.get("/console/overview/live")).status_code == 401


async def test_names_are_escaped(site):
    """Of tenants, models and workers."""
    await site.log_in()
    for path in (*PAGES, *LIVE):
        text = (await site.client.get(f"/console{path}")).text
        assert HOSTILE not in text
        if path not in {"/audit", "/audit/live", "/egress", "/egress/live"}:
            assert "&lt;script&gt;" in text, path


async def test_headers_let_browsers_run_only_our_files(site):
    """On every answer, errors included; no page has an inline script, style or external address."""
    await site.log_in()
    paths = (*PAGES, *LIVE, "/login", "/static/console.css", "/static/console.js", "/nothing")
    for path in paths:
        answer = await site.client.get(f"/console{path}")
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, path
        assert "unsafe" not in answer.headers["content-security-policy"]
    for path in (*PAGES, "/login"):
        text = (await site.client.get(f"/console{path}")).text
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|https?://", text), path
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))
    assert "content-security-policy" not in (await site.client.get("/healthz")).headers


async def test_only_listed_static_files_are_served(site):
    for name, status in (("../pages.py", 404), ("..%2fpages.py", 400), ("pages.py", 404), ("", 404)):
        assert (await site.client.get(f"/console/static/{name}")).status_code == status
    assert (await site.client.get("/console/static/console.js")).headers["content-type"].startswith("text/j")


async def test_every_state_of_a_verification_is_shown(site):
    await site.log_in()
    at = 990.0
    for progress, words in (
        (Progress(), "Not verified from here yet"),
        (Progress(began=at, stage=Stage.COPYING, entries=10, copied=4), "4 of 10 entries read"),
        (Progress(began=at, stage=Stage.CHECKING, entries=10), "checking every hash"),
        (Progress(began=at, stage=Stage.FAILED, failure="<b>no room"), "&lt;b&gt;no room"),
        (
            Progress(began=at, stage=Stage.DONE, verdict=ExitCode.INVALID, problems=("entry 3 <x>",)),
            "entry 3 &lt;x&gt;",
        ),
        (
            Progress(began=at, stage=Stage.DONE, verdict=ExitCode.INCOMPLETE, open_requests=2),
            "2 requests have no outcome entry",
        ),
    ):
        site.verification.progress = progress
        assert words in (await site.client.get("/console/audit")).text


async def test_without_the_console_its_paths_do_not_exist(site):
    app = create_admin_app(
        SimpleNamespace(  # type: ignore[arg-type]
            console=None, documentation=None, metrics=Metrics(CollectorRegistry()), settings=ApiSettings(),
            files=None, new_request_id=lambda: "ours", gateway=None,
        )
    )  # fmt: skip
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
        for path in ("", "/login", "/static/console.js"):
            assert (await client.get(f"/console{path}")).status_code == 404


async def test_how_far_the_log_is_time_stamped_is_shown(site):
    await site.log_in()
    shown = (await site.client.get("/console/audit")).text
    assert "1,200 entries at" in shown
    assert "2 requests failed since" in shown
