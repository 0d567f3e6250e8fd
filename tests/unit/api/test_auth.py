"""Which callers reach which routes, and how refusals are recorded."""

import asyncio
import io
import itertools
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.routing import Route

from appliance.api import admin, scopes
from appliance.api.auth import admin_caller, tenant_caller
from appliance.api.refusals import RefusedCallers
from appliance.api.scopes import ADMIN, SCOPES
from appliance.app.http_app import ADMIN_ROUTERS, API_ROUTERS
from appliance.audit.entry import encode, new_entry
from appliance.audit.entry_types import EntryType
from appliance.errors import AuditUnavailableError, InvalidApiKeyError, MissingScopeError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LogSettings, TlsSettings
from appliance.tenancy import AdminScope, Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.identity.certificates import EXTENSION, ClientCertificate

RANDOM = random.Random(9)
KEY, STORED = make_key(RANDOM.randbytes(37))
ADMIN_KEY, STORED_ADMIN = make_key(RANDOM.randbytes(37), admin=True)
TENANTS = (Tenant(name="acme", keys=(STORED,)), Tenant(name="operator", keys=(STORED_ADMIN,)))
TLS = TlsSettings(
    certificate_file="c.pem", key_file="c.key", client_ca_file="ca.pem", client_tenants={"cn:a": "acme"}
)


SECONDS = itertools.count(1_800_000_000)


class Entries:
    """The audit log, which can be unavailable at once or later."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []
        self.pending: list[asyncio.Future[Any]] = []
        self.is_full = False

    def submit(self, entry_type: EntryType, **fields: Any) -> asyncio.Future[Any]:
        if self.is_full:
            raise AuditUnavailableError("full")
        encode(new_entry("log", entry_type, fields, clock=lambda: 1.0, random_bytes=bytes))
        self.taken.append((str(entry_type), fields))
        self.pending.append(asyncio.get_running_loop().create_future())
        return self.pending[-1]


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def services(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        logger = configure_logs(LogSettings(format="json"), terminal=False)
    audit, metrics = Entries(), Metrics(CollectorRegistry())
    return SimpleNamespace(
        identity=Authenticator(TenantDirectory(TENANTS), tls=TLS),
        metrics=metrics,
        audit=audit,
        refused=RefusedCallers(audit=audit, metrics=metrics, logger=logger, clock=lambda: next(SECONDS)),
    )


STATUS = "/admin/v1/status"


def request(services: Any, key: str | None, path: str = STATUS, **scope: Any) -> Request:
    """A request that was routed to `path`."""
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    app = SimpleNamespace(state=SimpleNamespace(services=services))
    state = {"request_id": "the id"}
    routed = {"method": scope.pop("method", "GET"), "route": SimpleNamespace(path=path)}
    return Request({"type": "http", "headers": headers, "app": app, "state": state, **routed, **scope})


async def test_each_kind_of_key_opens_its_own_routes(services):
    """An admin's key calls no models, a tenant's does not administer."""
    assert (await tenant_caller(request(services, KEY))).tenant.name == "acme"
    assert (await admin_caller(request(services, ADMIN_KEY))).tenant.name == "operator"
    for caller, key in ((tenant_caller, ADMIN_KEY), (admin_caller, KEY)):
        with pytest.raises(InvalidApiKeyError):
            await caller(request(services, key))


async def test_a_client_certificate_identifies_a_tenant(services):
    """It never gives admin access."""
    extensions = {EXTENSION: ClientCertificate(("cn:a",))}
    assert (await tenant_caller(request(services, None, extensions=extensions))).tenant.name == "acme"
    with pytest.raises(InvalidApiKeyError):
        await admin_caller(request(services, None, extensions=extensions))


async def refuse(services: Any, *keys: str | None, caller: Any = tenant_caller) -> None:
    for key in keys:
        with pytest.raises(InvalidApiKeyError):
            await caller(request(services, key, client=("10.0.0.7", 1)))


async def test_a_refusal_is_counted_and_logged_without_the_credential(services, log):
    await refuse(services, None, KEY[:-1] + "!", "eyJh.eyJzdWIi.c2ln", ADMIN_KEY)
    written = log.getvalue()
    for reason in ("no_credential", "api_key", "tokens_not_accepted", "role"):
        labels = {"reason": reason}
        assert services.metrics.registry.get_sample_value("appliance_callers_refused_total", labels) == 1
        assert f'"reason": "{reason}"' in written
    assert written.count('"request_id": "the id"') == 4
    assert KEY[3:20] not in written
    assert "eyJ" not in written


async def test_an_admin_key_with_scopes_opens_only_their_routes(services):
    key, stored = make_key(RANDOM.randbytes(37), admin=True, scopes=frozenset({AdminScope.READ}))
    services.identity = Authenticator(TenantDirectory((Tenant(name="auditor", keys=(stored,)),)))
    assert (await admin_caller(request(services, key))).key.key_id == stored.key_id
    with pytest.raises(MissingScopeError, match="lacks the scope `retention`"):
        await admin_caller(request(services, key, "/admin/v1/audit/erasures", method="POST"))


async def test_a_route_without_a_scope_is_refused(services):
    """Also to a key with every scope."""
    with pytest.raises(KeyError):
        await admin_caller(request(services, ADMIN_KEY, "/admin/v1/forgotten"))


def test_every_route_of_the_admin_api_has_one_scope():
    app = FastAPI(openapi_url=None)
    for router in (*API_ROUTERS, *ADMIN_ROUTERS):
        app.include_router(router)
    routes = [route for route in app.routes if isinstance(route, Route) and route.path.startswith(ADMIN)]
    assert len(routes) > 20
    assert sorted(SCOPES) == sorted(f"{method} {route.path}" for route in routes for method in route.methods)
    assert sum(map(len, scopes._ROUTES.values())) == len(SCOPES)


def test_every_route_below_the_admin_path_asks_for_an_admin():
    """A route whose handler lacks the dependency would be open to every caller."""
    for route in admin.router.routes:
        dependencies = [each.call for each in route.dependant.dependencies]
        assert dependencies == [admin_caller], route.path


async def test_refused_callers_are_one_audit_entry_for_each_surface(services):
    """With their number by reason and by class of address, and the time of the first and the last."""
    await refuse(services, *[KEY + "x"] * 8, None, None)
    await refuse(services, KEY, KEY, None, caller=admin_caller)
    services.refused.report()
    (kind, api), (_, admin) = services.audit.taken
    assert kind == "callers.refused"
    assert (api["surface"], api["count"]) == ("api", 10)
    assert (api["reasons"], api["clients"]) == (["api_key: 8", "no_credential: 2"], ["private: 10"])
    assert api["since"] < api["until"]
    assert (admin["surface"], admin["reasons"]) == ("admin", ["no_credential: 1", "role: 2"])
    services.refused.report()
    assert len(services.audit.taken) == 2


async def test_a_flood_of_refused_callers_leads_to_a_bounded_number_of_entries_and_lines(services, log):
    """Whatever the rate: the first line of a reason at once, and then how many followed."""
    for _ in range(5000):
        await refuse(services, None, KEY + "x")
    assert log.getvalue().count("\n") == 2
    services.refused.report()
    assert [fields["count"] for _, fields in services.audit.taken] == [10_000]
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(line["event"], line.get("count")) for line in lines] == [
        ("caller_refused", None),
        ("caller_refused", None),
        ("callers_refused", 5000),
        ("callers_refused", 5000),
    ]


async def test_refusals_stay_counted_while_the_audit_log_is_unavailable(services):
    """In the memory of one entry for each surface, whether it refuses them at once or fails later."""
    services.audit.is_full = True
    await refuse(services, None)
    services.refused.report()
    services.audit.is_full = False
    await refuse(services, KEY + "x")
    services.refused.report()
    services.audit.pending[0].set_exception(AuditUnavailableError("lost"))
    await asyncio.sleep(0)
    await refuse(services, None)
    services.refused.report()
    assert [fields["count"] for _, fields in services.audit.taken] == [2, 3]
    assert services.audit.taken[-1][1]["reasons"] == ["api_key: 1", "no_credential: 2"]


async def test_refusals_are_reported_when_the_gateway_stops(services):
    running = asyncio.create_task(services.refused.run())
    await asyncio.sleep(0)
    await refuse(services, None)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [fields["count"] for _, fields in services.audit.taken] == [1]
