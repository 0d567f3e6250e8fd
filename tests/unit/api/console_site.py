"""The console's pages with real parts where a test gives them, for a logged-in operator."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from appliance.api.console.console import Console
from appliance.api.console.history import History
from appliance.api.console.operators import COOKIE
from appliance.api.console.sessions import LoginAttempts, Sessions
from appliance.api.services import Services
from appliance.app.http_app import create_admin_app
from appliance.drafts.promotion.promoter import Promoter
from appliance.gateway.attribution import Attribution
from appliance.gateway.cost.reader import UsageReader
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, ConsoleSettings, CostSettings, LogSettings
from appliance.serving.pool import WorkerPool
from appliance.tenancy import AdminScope, Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import FakeControl

HOSTILE = "<script>alert(1)</script>"


@asynccontextmanager
async def logged_in(
    *,
    usage: UsageReader | None = None,
    pool: WorkerPool | None = None,
    promoter: Promoter | None = None,
    scope: AdminScope = AdminScope.READ,
    acts: AdminScope | None = None,
    now: float = 0.0,
    control: FakeControl | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A browser whose operator has a key of that scope, and of `acts`."""
    key, stored = make_key(b"k" * 37, admin=True, scopes=frozenset({scope, acts or scope}))
    tenants = TenantDirectory((Tenant(name="operator", models=(), keys=(stored,)),))
    pool, control = pool or WorkerPool(), control or FakeControl()
    logger, metrics = configure_logs(LogSettings(level="error"), terminal=False), Metrics(CollectorRegistry())
    sessions = Sessions(idle_seconds=60, longest_seconds=300, clock=time.monotonic)
    nothing: Any = None
    any_control: Any = control
    console = Console(
        settings=ConsoleSettings(),
        sessions=sessions,
        attempts=LoginAttempts(clock=time.monotonic),
        history=History(pool=pool, control=any_control, clock=time.monotonic, logger=logger),
        verification=nothing,
        usage=usage or UsageReader(database_url="sqlite://", settings=CostSettings(), time_zone="UTC"),
        witnesses=nothing,
        timestamps=nothing,
        open_log=nothing,
        vkey=nothing,
        clock=time.monotonic,
    )
    app = create_admin_app(
        Services(
            settings=ApiSettings(),
            tenants=tenants,
            identity=Authenticator(tenants),
            refused=nothing,
            pool=pool,
            workers=nothing,
            gateway=nothing,
            audit=nothing,
            attribution=Attribution(label_key=bytes(16), clock=time.monotonic),
            control=any_control,
            overrides=nothing,
            metrics=metrics,
            logger=logger,
            clock=lambda: now,
            new_request_id=lambda: "ours",
            version="test",
            console=console,
            promoter=promoter,
        )
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=("10.0.0.1", 1)),
        base_url="http://appliance",
        cookies={COOKIE: sessions.begin(key)},
    ) as client:
        yield client
