"""
The whole gateway on a real socket, with a real audit log, in front of scripted workers.

Every test ends by closing the log, exporting it and running the auditor's verifier.
"""

import asyncio
import io
import json
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry, generate_latest

from appliance.api.http.server import Server, bind, make_server
from appliance.api.http.tls import open_tls
from appliance.api.refusals import RefusedCallers
from appliance.api.services import Services
from appliance.app.http_app import create_admin_app, create_app
from appliance.audit import verify
from appliance.audit.content.payloads import SqlPayloadStore, export_payloads
from appliance.audit.durability.guarded import observe_audit
from appliance.audit.entry import decode, new_entry_id
from appliance.audit.export import export_log
from appliance.audit.log import AuditLog
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.control.changes import ChangeLog
from appliance.control.loop import ControlLoop, ControlParts
from appliance.control.override import SqlOverrideStore
from appliance.control.recycle import RecycleParts, Recycler
from appliance.control.worker_list import WorkerList
from appliance.gateway.admission import AdmissionControl
from appliance.gateway.attribution import Attribution
from appliance.gateway.body_parsers import BodyParsers
from appliance.gateway.capture import open_content
from appliance.gateway.gateway import Gateway, GatewayPolicy
from appliance.gateway.intents import IntentRecorder
from appliance.gateway.outcomes import OutcomeRecorder
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import (
    DEMO_DRAFT,
    DEMO_TARGET,
    AdmissionSettings,
    ApiSettings,
    AuditSettings,
    LogSettings,
    MonitorSettings,
    OidcSettings,
    PoolSettings,
    RecycleSettings,
    Settings,
    TlsSettings,
)
from appliance.serving.client import WorkerClient
from appliance.serving.discovery import Discovery
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.pool import WorkerPool
from appliance.serving.restart import RestartClient
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_tls import WorkerTls
from appliance.tenancy import ContentPolicy, SpeculationPolicy, Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.identity.files import keep_renewed
from appliance.tenancy.identity.provider import open_provider
from demo.process import ApplianceProcess
from tests.fakes import CONTROL_TOKEN, FakeWorker, StallingStore, until
from tests.integration.browser import Browser, browsing
from tests.integration.collector import Collector, traced
from tests.integration.speculation_admin import PRICES, QUIET, cost_report, verify_log
from tests.sole_lease import SoleLease

RANDOM = random.Random(31)
KEY, STORED_KEY = make_key(RANDOM.randbytes(37))
SCOPED_KEY, STORED_SCOPED_KEY = make_key(RANDOM.randbytes(37))
ADMIN_KEY, STORED_ADMIN_KEY = make_key(RANDOM.randbytes(37), admin=True)
CAREFUL_KEY, STORED_CAREFUL_KEY = make_key(RANDOM.randbytes(37))
ARCHIVE_KEY, STORED_ARCHIVE_KEY = make_key(RANDOM.randbytes(37))
NOTARY_KEY, STORED_NOTARY_KEY = make_key(RANDOM.randbytes(37))
NARROW_KEY, STORED_NARROW_KEY = make_key(RANDOM.randbytes(37), models=("other",))
TENANTS = (
    Tenant(name="acme", keys=(STORED_KEY, STORED_NARROW_KEY)),
    Tenant(name="scoped", models=("other",), keys=(STORED_SCOPED_KEY,)),
    Tenant(name="operator", models=(), keys=(STORED_ADMIN_KEY,)),
    Tenant(name="careful", keys=(STORED_CAREFUL_KEY,), speculation=SpeculationPolicy.OFF),
    Tenant(name="archive", keys=(STORED_ARCHIVE_KEY,), content=ContentPolicy.ENCRYPTED),
    Tenant(name="notary", keys=(STORED_NOTARY_KEY,), content=ContentPolicy.DIGEST),
)


@dataclass(frozen=True)
class Pair:
    """Weights a real worker can serve."""

    target: Path
    draft: Path


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser of all tests of a file."""
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as made:
        yield made


@pytest.fixture(scope="session")
def demo_models() -> Pair:
    return Pair(target=DEMO_TARGET, draft=DEMO_DRAFT)


@pytest.fixture(scope="session")
def traces() -> Iterator[Collector]:
    """Everything the shared appliance has traced."""
    with Collector().listening() as collector:
        yield collector


@pytest.fixture(scope="session")
def appliance(tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[ApplianceProcess]:
    """
    `appliance up` on the demo pair, with a real worker: one for all tests of the xdist group "appliance".

    It observes: a controlled worker may change the number of draft tokens between two requests, and with
    the shape of its steps the rounding, so that texts would not always be equal to the byte.
    """
    environment = traced(traces, APPLIANCE_MONITOR__CONTROL="observe")
    data = tmp_path_factory.mktemp("up") / "data"
    with ApplianceProcess("up", data=data, environment=environment) as process:
        yield process
    assert process.process.returncode == 0, "".join(process.output)


@pytest.fixture(scope="session")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApplianceProcess]:
    """
    The same, but it controls its worker and knows what it costs: for the xdist group "controlled".

    It is stopped in order: the times before and after it are all that the cost report misses.
    """
    data = tmp_path_factory.mktemp("controlled") / "data"
    with ApplianceProcess("up", data=data, environment={**QUIET, **PRICES}) as process:
        yield process
    assert process.process.returncode == 0, "".join(process.output)
    assert verify_log(data) == 0
    assert {gap["kind"] for gap in json.loads(cost_report(data, "--json"))["missing"]} == {"nobody_there"}


@dataclass
class Running:
    """A serving gateway, and its worker."""

    url: str
    admin_url: str
    workers: list[FakeWorker]
    pool: WorkerPool
    control: ControlLoop
    audit: AuditLog
    store: StallingStore
    attribution: Attribution
    metrics: Metrics
    session: aiohttp.ClientSession
    client: openai.AsyncOpenAI
    directory: Path
    log: io.StringIO
    server: Server
    key: str = KEY
    scoped_key: str = SCOPED_KEY
    """Of a tenant that may use the model `other` only."""
    narrow_key: str = NARROW_KEY
    """Of a tenant that may use every model, and itself for the model `other` only."""
    admin_key: str = ADMIN_KEY
    careful_key: str = CAREFUL_KEY
    """Of a tenant whose requests must not be speculated."""
    archive_key: str = ARCHIVE_KEY
    """Of a tenant whose content is kept, encrypted."""
    notary_key: str = NOTARY_KEY
    """Of a tenant whose content is committed to."""
    verdict: verify.ExitCode = verify.ExitCode.VALID
    """The expected report of the verifier."""

    @property
    def worker(self) -> FakeWorker:
        """The first worker."""
        return self.workers[0]

    async def post(
        self,
        body: dict[str, Any] | bytes,
        *,
        path: str = "/v1/chat/completions",
        key: str | None = KEY,
        **headers: str,
    ) -> "Reply":
        """Post a body and read the whole answer."""
        async with self.asking(body, path=path, key=key, **headers) as response:
            return Reply(response.status, response.headers.copy(), await response.read())

    async def get(self, path: str, *, key: str | None = None, **headers: str) -> "Reply":
        """Get a page."""
        async with self.session.get(self.at(path), headers=_headers(key, headers)) as response:
            return Reply(response.status, response.headers.copy(), await response.read())

    def asking(
        self,
        body: dict[str, Any] | bytes,
        *,
        path: str = "/v1/chat/completions",
        key: str | None = KEY,
        **headers: str,
    ) -> Any:
        """Post a body and give the answer once its head is there."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(self.at(path), data=data, headers=_headers(key, headers))

    def at(self, path: str) -> str:
        """The URL of a path, on the listener that is for it."""
        is_admin = path.startswith(("/admin/", "/metrics", "/console"))
        return (self.admin_url if is_admin else self.url) + path

    def move(self, name: str, url: str) -> None:
        """Have a healthy worker reached at another URL."""
        seen = self.pool.snapshot(WorkerId(name))
        assert seen is not None
        moved = replace(seen, worker=replace(seen.worker, url=url))
        self.pool.add(moved.worker)
        self.pool.update(moved)

    def entries(self, *types: str) -> list[dict[str, Any]]:
        """Return the fields of every entry of these types so far, with its index and type."""
        return [
            {"index": leaf.index, "type": leaf.type, **decode(leaf.leaf).fields}
            for leaf in self.store.leaves(0, 10_000)
            if not types or leaf.type in types
        ]

    async def outcome(self, count: int = 1) -> dict[str, Any]:
        """Wait until so many requests have ended, and return how the last one did."""
        await until(lambda: len(self.entries("request.outcome", "request.aborted")) >= count)
        return self.entries("request.outcome", "request.aborted")[count - 1]

    async def events(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for log lines of this event."""
        await until(lambda: len(self.logged(name)) >= count)
        return self.logged(name)

    def logged(self, name: str) -> list[dict[str, Any]]:
        """Return the log lines of this event."""
        lines = map(json.loads, self.log.getvalue().splitlines())
        return [line for line in lines if line["event"] == name]


@dataclass
class Reply:
    """An answer, read to its end."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error in it, once its shape is checked."""
        content = json.loads(self.body)
        assert list(content) == ["error"]
        error = content["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["code"] is None or isinstance(error["code"], str)
        return error


def _headers(key: str | None, more: dict[str, str]) -> dict[str, str]:
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return {"Content-Type": "application/json", **headers}


Serve = Callable[..., Awaitable[Running]]


@pytest.fixture
async def serve(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrote: Callable[[str, str], None],
) -> AsyncIterator[Serve]:
    """Start a gateway in front of some workers; at the end, verify its whole log."""
    caplog.set_level(logging.DEBUG)
    started: list[Running] = []
    create_signing_key(tmp_path / "audit.key")
    signer = load_signing_key(tmp_path / "audit.key", AuditSettings().origin)
    async with AsyncExitStack() as stack:

        async def start(
            *workers: FakeWorker,
            audit: dict | None = None,
            tls: TlsSettings | None = None,
            oidc: OidcSettings | None = None,
            admission: AdmissionSettings | None = None,
            routing: PoolSettings | None = None,
            **settings: Any,
        ) -> Running:
            api = ApiSettings(port=0, admin_port=0, drain_seconds=1, **settings)
            running = await stack.enter_async_context(
                _running(
                    list(workers),
                    api,
                    AuditSettings(**(audit or {})),
                    tmp_path,
                    monkeypatch,
                    tls=tls or TlsSettings(),
                    oidc=oidc or OidcSettings(),
                    admission=admission or AdmissionSettings(worker_wait_seconds=0),
                    routing=routing or PoolSettings(),
                )
            )
            started.append(running)
            return running

        yield start
    for running in started:
        wrote("operator log", running.log.getvalue())
        wrote("metrics", generate_latest(running.metrics.registry).decode())
        export_log(running.store, tmp_path / "export", vkey=signer.vkey)
        with closing(SqlPayloadStore(f"sqlite:///{tmp_path / 'audit.db'}")) as payloads:
            export_payloads(payloads, tmp_path / "export")
        verdict = verify.main([str(tmp_path / "export"), "--key", signer.vkey])
        assert verdict == running.verdict
        running.store.store.close()


@pytest.fixture
async def running(serve: Serve) -> Running:
    """A gateway in front of one worker."""
    return await serve(FakeWorker())


@asynccontextmanager
async def _running(
    workers: list[FakeWorker],
    api: ApiSettings,
    audit_settings: AuditSettings,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tls: TlsSettings,
    oidc: OidcSettings,
    admission: AdmissionSettings,
    routing: PoolSettings,
) -> AsyncIterator[Running]:
    metrics = Metrics(CollectorRegistry())
    store = StallingStore(SqlAuditStore(f"sqlite:///{directory / 'audit.db'}"))
    log = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        logger = configure_logs(LogSettings(level="debug", format="json"), terminal=False)
    pool = WorkerPool()
    async with AsyncExitStack() as stack:
        for number, worker in enumerate(workers, start=1):
            worker.token = CONTROL_TOKEN
            await stack.enter_async_context(worker.serving())
            pool.add(Worker(worker_id=WorkerId(f"w{number}"), url=worker.url))
        audit = await stack.enter_async_context(
            AuditLog.open(
                store=store,
                signer=load_signing_key(directory / "audit.key", audit_settings.origin),
                settings=audit_settings,
                sealed_head_path=directory / "audit.head",
                clock=time.time,  # noqa: TID251 - this is a composition root too
                version="test",
                on_commit=metrics.record_audit_commit,
            )
        )
        stack.callback(store.release)
        worker_tls = WorkerTls(routing)
        counts = await stack.enter_async_context(SpeculationClient.open(token=CONTROL_TOKEN, tls=worker_tls))
        content = await stack.enter_async_context(
            open_content(
                database=f"sqlite:///{directory / 'audit.db'}",
                keys_directory=directory / "payload-keys",
                settings=audit_settings,
                log=audit,
                clock=time.time,  # noqa: TID251 - as above
                random_bytes=os.urandom,
            )
        )
        observe_audit(metrics, audit.state)
        client = await stack.enter_async_context(
            WorkerClient.open(token=CONTROL_TOKEN, tls=worker_tls, connect_seconds=2.0)
        )
        overrides = SqlOverrideStore(f"sqlite:///{directory / 'audit.db'}")
        stack.callback(overrides.close)
        attribution = Attribution(label_key=bytes(16), clock=time.monotonic, min_drafts=1)
        gateway = Gateway(
            pool=pool,
            admission=AdmissionControl(
                pool=pool,
                settings=admission,
                pool_settings=routing,
                metrics=metrics,
                clock=time.monotonic,
            ),
            client=client,
            intents=IntentRecorder(
                audit=audit,
                attribution=attribution,
                captures=content.captures,
                logger=logger,
            ),
            outcomes=OutcomeRecorder(
                audit=audit,
                attribution=attribution,
                captures=content.captures,
                metrics=metrics,
                logger=logger,
                clock=time.monotonic,
                count=counts.usage,
            ),
            metrics=metrics,
            clock=time.monotonic,
            policy=GatewayPolicy(
                keep_alive_seconds=api.keep_alive_seconds,
                silence_seconds=api.silence_seconds,
                origin=audit_settings.origin,
            ),
            bodies=stack.enter_context(closing(BodyParsers())),
        )
        wall_clock = time.time  # noqa: TID251 - as above
        control = ControlLoop(
            ControlParts(
                pool=pool,
                client=client,
                speculation=await stack.enter_async_context(
                    SpeculationClient.open(token=CONTROL_TOKEN, tls=worker_tls)
                ),
                lease=SoleLease(),
                overrides=overrides,
                recycler=Recycler(
                    RecycleParts(
                        pool=pool,
                        client=client,
                        own={},
                        others=await stack.enter_async_context(
                            RestartClient.open(token=CONTROL_TOKEN, tls=worker_tls)
                        ),
                        audit=audit,
                        metrics=metrics,
                        logger=logger,
                    ),
                    settings=RecycleSettings(),
                    clock=time.monotonic,
                ),
                changes=ChangeLog(audit=audit, metrics=metrics, logger=logger, clock=wall_clock),
                metrics=metrics,
                logger=logger,
            ),
            settings=MonitorSettings(),
            clock=time.monotonic,
            wall_clock=wall_clock,
        )
        await control.tick()
        tenants = TenantDirectory(TENANTS)
        provider = open_provider(oidc, logger=logger, clock=wall_clock)
        encryption = open_tls(tls, logger=logger, clock=wall_clock)
        renewing = asyncio.create_task(
            keep_renewed([part for part in (provider, encryption) if part is not None], seconds=0.05)
        )
        stack.callback(renewing.cancel)
        services = Services(
            settings=api,
            tenants=tenants,
            identity=Authenticator(tenants, provider=provider, tls=tls),
            refused=RefusedCallers(audit=audit, metrics=metrics, logger=logger, clock=wall_clock),
            pool=pool,
            workers=WorkerList(
                pool=pool,
                discovery=Discovery(pool=pool, urls=(), discover=None, seconds=5.0, logger=logger),
                settings=Settings(),
                read_settings=Settings,
                record=audit.append,
                logger=logger,
            ),
            gateway=gateway,
            audit=audit,
            attribution=attribution,
            control=control,
            overrides=overrides,
            metrics=metrics,
            logger=logger,
            clock=wall_clock,
            new_request_id=lambda: new_entry_id(time.time_ns() // 10**6, RANDOM.randbytes(10)),
            version="test",
            retention=content.retention,
        )
        server = make_server(create_app(services), api, tls=encryption, metrics=metrics)
        admin = make_server(create_admin_app(services), api.admin_listener, tls=encryption, metrics=metrics)
        scheme = "https" if encryption else "http"
        url = await stack.enter_async_context(_listening(server, api, scheme))
        admin_url = await stack.enter_async_context(_listening(admin, api.admin_listener, scheme))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        openai_client = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key=KEY,
                max_retries=0,
                # No certificates to load, which takes longer than most tests.
                http_client=httpx.AsyncClient(verify=False, trust_env=False),
            )
        )
        yield Running(
            url=url,
            admin_url=admin_url,
            workers=workers,
            pool=pool,
            control=control,
            audit=audit,
            attribution=attribution,
            store=store,
            metrics=metrics,
            session=session,
            client=openai_client,
            directory=directory,
            log=log,
            server=server,
        )


@asynccontextmanager
async def _listening(server: Server, api: ApiSettings, scheme: str) -> AsyncIterator[str]:
    listener = bind(api)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        try:
            await until(lambda: server.started)
            yield f"{scheme}://{host}:{port}"
        finally:
            server.should_exit = True
