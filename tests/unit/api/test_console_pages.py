"""Logins, forms and security headers of the console."""

import asyncio
import html
import io
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
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
from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import (
    create_signing_key,
    encode_keys,
    load_signing_key,
)
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.timestamping import TimestampLevel
from appliance.audit.verification import Progress, Stage
from appliance.audit.verify import ExitCode, parse_keys, verify_receipt
from appliance.audit.witness.witnessing import WitnessLevel
from appliance.control.override import SqlOverrideStore
from appliance.control.tenants.registrar import Registrar
from appliance.errors import AuditUnavailableError, ControlRefusedError
from appliance.gateway.attribution import Attribution
from appliance.gateway.cost.reader import UsageReader
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import (
    ApiSettings,
    AuditSettings,
    ConsoleSettings,
    CostSettings,
    LogSettings,
)
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.sovereignty.egress.egress_status import EgressStatus
from appliance.tenancy import AdminScope, Tenant, TenantDirectory, digest_key, make_key
from appliance.tenancy.allowances import BOUNDS, LARGEST, Limits
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.roster import Roster
from appliance.tenancy.store import SqlTenantStore
from tests.fakes import FakeControl, until
from tests.roster import roster_mac

ADMIN_KEY, STORED_ADMIN_KEY = make_key(b"a" * 37, admin=True)
KEY, STORED_KEY = make_key(b"t" * 37)
HOSTILE = "<script>alert(1)</script>"
HOSTILE_TENANT = Tenant(name=HOSTILE, keys=(STORED_KEY,), limits=Limits(requests_per_minute=60))
"""In no database: its name is not allowed."""
TENANTS = (Tenant(name="acme"), Tenant(name="operator", models=(), keys=(STORED_ADMIN_KEY,)))
WORKER = WorkerId("w1")
PAGES = ("", "/tenants", "/models", "/requests", "/audit", "/egress", "/chat")
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


class FakeWorkers:
    """Records who drained what; refuses to drain the last worker of a model."""

    def __init__(self) -> None:
        self.drains: list[tuple[str, bool, str, str]] = []

    async def drain(self, worker: str, *, actor: str, note: str, force: bool) -> None:
        if not force:
            raise ControlRefusedError("worker w1 is the last one")
        self.drains.append((worker, True, actor, note))

    async def undrain(self, worker: str, *, actor: str, note: str) -> None:
        self.drains.append((worker, False, actor, note))


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
    audit: AuditLog
    overrides: SqlOverrideStore
    workers: FakeWorkers
    control: FakeControl
    shown: str = ""
    """The page after the newest action."""

    async def act(self, path: str, **form: str) -> tuple[int, str]:
        """Send a form of a page, and return the status and what the next page says of it."""
        answer = await self.client.post(f"/console{path}", data={"csrf": await self.csrf(), **form})
        if answer.status_code != 303:
            return answer.status_code, answer.text
        self.shown = (await self.client.get(answer.headers["location"])).text
        found = re.search(r"data-notice>(.*?)</div>", self.shown, re.DOTALL)
        return answer.status_code, html.unescape(found[1]) if found else ""

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
    other = Worker(worker_id=WORKER, url="http://w2")
    pool.add(other)
    pool.update(WorkerSnapshot(worker=other, healthy=True))
    pool.update(
        WorkerSnapshot(
            worker=worker,
            healthy=True,
            models=(ServedModel(name=HOSTILE, max_model_len=None, created=0),),
        )
    )
    egress: Any = FakeEgress()
    verification: Any = FakeVerification()
    workers: Any = FakeWorkers()
    gateway: Any = SimpleNamespace(
        admission=SimpleNamespace(breaker=lambda _worker: "closed", slots=lambda _worker: 8)
    )
    url = f"sqlite:///{tmp_path / 'audit.db'}"
    async with AsyncExitStack() as stack:
        store = stack.enter_context(closing(SqlAuditStore(url)))
        tenant_store = stack.enter_context(closing(SqlTenantStore(url, roster_mac(tmp_path))))
        stored = tenant_store.write(Roster(), TENANTS).tenants
        tenants = TenantDirectory((*stored, HOSTILE_TENANT), clock=lambda: now[0])
        overrides = stack.enter_context(closing(SqlOverrideStore(url)))
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
            usage=UsageReader(database_url=url, settings=CostSettings(), time_zone="UTC"),
            witnesses=lambda: WitnessLevel(known=0, cosigned=0, size=0, time=0),
            timestamps=lambda: TimestampLevel(seconds=3600, size=1200, time=1_800_000_000, failures=2),
            open_log=lambda: SqlAuditStore(url),
            vkey=lambda: encode_keys(load_signing_key(tmp_path / "audit.key", settings.origin).verifier_keys),
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
                workers=workers,
                gateway=gateway,
                audit=audit,
                attribution=Attribution(label_key=bytes(16), clock=time.monotonic),
                control=control,
                overrides=overrides,
                metrics=metrics,
                logger=logger,
                clock=lambda: now[0],
                new_request_id=lambda: "ours",
                version="test",
                egress=egress,
                console=console,
                registrar=Registrar(
                    store=tenant_store,
                    record=audit.append,
                    adopt=lambda roster: tenants.replace((*roster.tenants, HOSTILE_TENANT)),
                ),
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
            audit=audit,
            overrides=overrides,
            workers=workers,
            control=control,
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
        if path not in {"/requests", "/audit", "/audit/live", "/egress", "/egress/live"}:
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


async def test_the_chat_page_names_the_listener_of_clients(site):
    await site.log_in()
    text = (await site.client.get("/console/chat")).text
    assert f'data-host="{ApiSettings().host}" data-port="{ApiSettings().port}"' in text


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


async def test_a_key_is_created_shown_once_and_in_force(site):
    """For some models and until a date; the log names its maker."""
    await site.log_in()
    status, said = await site.act("/tenants/acme/keys", models="demo, other", expires_at="2100-01-01")
    found = re.search(r"data-key[^>]*>(sk-[^<]+)<", said)
    assert (status, found is not None) == (303, True)
    page = (await site.client.get("/console/tenants/acme/keys")).text
    assert found[1] not in page
    (tenant,) = (each for each in site.tenants.tenants if each.name == "acme")
    (key,) = tenant.keys
    assert key.digest == digest_key(found[1])
    assert (key.models, key.expires_at) == (("demo", "other"), 4_102_444_800)
    assert key.key_id in page
    assert "2100-01-01 00:00:00 UTC" in page
    (entry,) = await site.entries("key.created")
    assert (entry["key_id"], entry["actor"]) == (key.key_id, STORED_ADMIN_KEY.key_id)
    assert "sk-" not in str(entry)


async def test_a_key_is_rotated_and_revoked(site):
    await site.log_in()
    await site.act("/tenants/acme/keys")
    (first,) = (each for each in site.tenants.tenants if each.name == "acme")
    key_id = first.keys[0].key_id
    _, said = await site.act(f"/tenants/acme/keys/{key_id}/rotate", overlap_hours="1")
    assert f"replaces the key {key_id}" in said
    assert "data-key" in said
    (after,) = (each for each in site.tenants.tenants if each.name == "acme")
    old = next(key for key in after.keys if key.key_id == key_id)
    assert old.expires_at == 1000 + 3600
    _, said = await site.act(f"/tenants/acme/keys/{key_id}/revoke", reason="left the ward")
    assert said == f"Revoked the key {key_id}."
    (entry,) = await site.entries("key.revoked")
    assert (entry["key_id"], entry["reason"]) == (key_id, "left the ward")


async def test_a_key_with_limits_that_may_make_keys_is_created_and_shown(site):
    """The list has its limits and permission, and who made the keys that it made."""
    await site.log_in()
    form = {"requests_per_minute": "60", "tokens_per_day": " 9 ", "concurrent_requests": "", "models": ""}
    assert (await site.act("/tenants/acme/keys", **form, manage_keys="on"))[0] == 303
    tenant = site.tenants.tenant("acme")
    (maker,) = tenant.keys
    assert (maker.limits, maker.manage_keys) == (Limits(requests_per_minute=60, tokens_per_day=9), True)
    (entry,) = await site.entries("key.created")
    assert (entry["limits"], entry["manage_keys"]) == (("requests_per_minute=60", "tokens_per_day=9"), True)
    page = (await site.client.get("/console/tenants/acme/keys")).text
    assert "requests_per_minute=60, tokens_per_day=9" in page
    assert page.count("may make keys") == 1
    assert "made by" not in page
    await site.act("/tenants/acme/keys")
    (plain,) = (key for key in site.tenants.tenant("acme").keys if key.key_id != maker.key_id)
    assert (plain.limits, plain.manage_keys) == (Limits(), False)
    minted = replace(make_key(b"t" * 37)[1], made_by=maker.key_id)
    others = [each for each in site.tenants.tenants if each.name != "acme"]
    site.tenants.replace((tenant.with_keys((maker, minted)), *others))
    page = (await site.client.get("/console/tenants/acme/keys")).text
    assert f"made by {maker.key_id}" in page
    assert page.count(">valid<") == 2
    ended = replace(maker, revoked_at=1)
    site.tenants.replace((tenant.with_keys((ended, minted)), *others))
    page = (await site.client.get("/console/tenants/acme/keys")).text
    assert (page.count(">maker ended<"), page.count(">valid<")) == (1, 0)


async def test_a_limit_that_is_no_number_makes_no_key(site):
    """It must not become a key without that limit; those that exist stay."""
    await site.log_in()
    await site.act("/tenants/acme/keys")
    before = site.tenants.tenants
    wrong = ("many", "-1", "1.5", "1e3", "\u0663", "9" * 17, str(LARGEST + 1), "9" * 5000)
    for name, number in zip((*BOUNDS, *BOUNDS), wrong, strict=False):
        status, said = await site.act("/tenants/acme/keys", **{name: number, "manage_keys": "on"})
        assert (status, f"{name} must be a whole number" in said) == (303, True), said
    assert site.tenants.tenants == before
    assert len(await site.entries("key.created")) == 1


async def test_what_cannot_be_done_is_said_on_the_page(site):
    """In one line; nothing is changed."""
    await site.log_in()
    for path, form, words in (
        ("/tenants/acme/keys", {"expires_at": "soon"}, "must be a time such as"),
        ("/tenants/nobody/keys", {}, "There is no tenant"),
        ("/tenants/acme/keys/aaaaaaaa/revoke", {}, "There is no key with this id"),
        (
            f"/tenants/operator/keys/{STORED_ADMIN_KEY.key_id}/rotate",
            {"overlap_hours": "x"},
            "overlap_seconds",
        ),
        ("/workers/w1/drain", {}, "is the last one"),
        ("/workers/w9/drain", {}, "No worker has this id"),
        ("/workers/w1/override", {"mode": "faster"}, "`mode` must be"),
        ("/workers/w1/override", {"mode": "target_only", "minutes": "x"}, "`seconds` must be"),
        ("/workers/w1/override", {"mode": "speculative", "draft_tokens": "0"}, "`draft_tokens` must be"),
    ):
        status, said = await site.act(path, **form)
        assert (status, words in said) == (303, True), (path, said)
    assert all(not tenant.keys for tenant in site.tenants.tenants if tenant.name == "acme")
    assert await site.overrides.list() == ()
    assert site.workers.drains == []


def typed(page: str) -> dict[str, str]:
    """The values of text fields by the id, without empty ones, and the ids of checked boxes."""
    found = {}
    for tag in re.findall(r"<input [^>]*>", page):
        attributes = dict(re.findall(r'([a-z-]+)="([^"]*)"', tag))
        if attributes.get("value") and "id" in attributes:
            found[attributes["id"]] = html.unescape(attributes["value"])
        elif " checked" in tag:
            found[attributes.get("id") or attributes["name"]] = "checked"
    return found


async def test_a_form_that_was_refused_keeps_what_was_typed(site):
    """Open, on the next page alone, and in no other form."""
    await site.log_in()
    untouched = (await site.client.get("/console/tenants/acme/keys")).text
    wrong = {"expires_at": "soon", "models": 'a, "<b>"', "tokens_per_day": "9", "manage_keys": "on"}
    await site.act("/tenants/acme/keys", **wrong)
    assert typed(site.shown) == typed(untouched) | {
        "expires": "soon",
        "models": 'a, "<b>"',
        "limit-tokens_per_day": "9",
        "manage-keys": "checked",
    }
    assert "<b>" not in site.shown
    assert typed((await site.client.get("/console/tenants/acme/keys")).text) == typed(untouched)
    await site.act("/tenants/acme/keys", models="")
    (key,) = site.tenants.tenant("acme").keys
    assert typed(site.shown) == typed(untouched) | {f"overlap-{key.key_id}": "24"}
    await site.act("/workers/w1/drain", note="fan")
    assert typed(site.shown) == {"minutes": "60", "drain-note": "fan"}
    assert re.findall(r"<details[^>]* open><summary>(\w+)", site.shown) == ["Drain"]
    wrong = {"mode": "speculative", "draft_tokens": "0", "minutes": "5", "note": "test"}
    await site.act("/workers/w1/override", **wrong)
    assert typed(site.shown) == {"draft-tokens": "0", "minutes": "5", "override-note": "test"}
    assert '<option value="speculative" selected>' in site.shown


async def test_a_worker_is_drained_overridden_and_recycled(site):
    """By the operator that is logged in; a later page says nothing of it."""
    await site.log_in()
    actor = STORED_ADMIN_KEY.key_id
    assert "no new requests" in (await site.act("/workers/w1/drain", force="yes", note="fan"))[1]
    assert "gets requests again" in (await site.act("/workers/w1/undrain"))[1]
    assert site.workers.drains == [("w1", True, actor, "fan"), ("w1", False, actor, "")]
    _, said = await site.act("/workers/w1/override", mode="target_only", minutes="5", note="test")
    assert "target-only until 1970-01-01 00:21:40 UTC" in said
    (order,) = await site.overrides.list()
    assert (order.worker, order.expires_at) == ("w1", 1300.0)
    assert f"set by {actor}: test" in (await site.client.get("/console/workers/w1/live")).text
    assert "Remove the override" in (await site.client.get("/console/workers/w1")).text
    assert "the monitor decides again" in (await site.act("/workers/w1/override", mode="auto"))[1]
    assert await site.overrides.list() == ()
    assert "restarted" in (await site.act("/workers/w1/recycle", draft="without", note="decay"))[1]
    (recycled,) = site.control.recycles
    assert recycled == {"worker": "w1", "with_draft": False, "note": "decay", "actor": actor}
    assert "data-notice" not in (await site.client.get("/console/workers/w1")).text


@pytest.mark.parametrize(
    ("scope", "allowed", "refused"),
    [
        (AdminScope.READ, (), ("/tenants/acme/keys", "/workers/w1/drain", "/workers/w1/override")),
        (AdminScope.TENANTS, ("/tenants/acme/keys",), ("/workers/w1/drain", "/workers/w1/recycle")),
        (AdminScope.WORKERS, ("/workers/w1/undrain",), ("/tenants/acme/keys",)),
    ],
)
async def test_actions_need_their_scope(site, scope, allowed, refused):
    """The forms are not there, and sending one anyway does nothing."""
    key, stored = make_key(b"s" * 37, admin=True, scopes=frozenset({AdminScope.READ, scope}))
    site.tenants.replace((*site.tenants.tenants, Tenant(name="some", keys=(stored,))))
    await site.log_in(key)
    pages = [
        (await site.client.get(f"/console{path}")).text for path in ("/tenants/acme/keys", "/workers/w1")
    ]
    for path in refused:
        assert f'action="/console{path}"' not in "".join(pages)
        status, said = await site.act(path)
        assert (status, "lacks the scope" in said) == (403, True), path
    for path in allowed:
        status, said = await site.act(path)
        assert (status, "lacks the scope" in said) == (303, False), path
    assert site.control.recycles == []


async def test_a_request_is_looked_up_verified_and_the_reading_recorded(site):
    """By its id or by an entry's index; the receipt and the entry are what `verify.py` takes."""
    intent = await site.audit.append(EntryType.CONSOLE_LOGIN, key_id="abc", client="private")
    await until(lambda: (latest := site.store.latest_checkpoint()) is not None and latest.size > intent.index)
    await site.log_in()
    text = (await site.client.get(f"/console/requests?id={intent.index}")).text
    assert "<code>console.login</code>" in text
    assert re.search(r"data-verdict>valid<", text)
    proof = await site.client.get(f"/console/requests/receipt?index={intent.index}")
    leaf = await site.client.get(f"/console/requests/receipt?index={intent.index}&part=entry")
    assert f'filename="entry-{intent.index}.tlog-proof"' in proof.headers["content-disposition"]
    assert (
        verify_receipt(proof.content, leaf.content, parse_keys(site.console.vkey()), None).exit_code
        is ExitCode.VALID
    )
    readings = [fields["operation"] for fields in await site.entries("audit.read")]
    assert readings == ["show", "receipt", "receipt"]
    for name in ("no-such-request", "999999", "x" * 200):
        answer = await site.client.get("/console/requests", params={"id": name})
        assert (answer.status_code, 'role="alert"' in answer.text) == (404, True)
    assert len(await site.entries("audit.read")) == len(readings)


async def test_nothing_is_shown_if_the_reading_cannot_be_recorded(site, monkeypatch):
    intent = await site.audit.append(EntryType.CONSOLE_LOGIN, key_id="abc", client="private")
    await site.log_in()

    async def fail(*_given: object, **_fields: object) -> None:
        raise AuditUnavailableError("the disk is full")

    monkeypatch.setattr(site.audit, "append", fail)
    answer = await site.client.get(f"/console/requests?id={intent.index}")
    assert (answer.status_code, "the disk is full" in answer.text) == (503, True)
    assert "console.login" not in answer.text
