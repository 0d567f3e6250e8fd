"""Which callers reach which routes, and how refusals are recorded."""

import io
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from appliance.api.auth import admin_caller, tenant_caller
from appliance.errors import InvalidApiKeyError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LogSettings, TlsSettings
from appliance.tenancy import Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.identity.certificates import EXTENSION, ClientCertificate

RANDOM = random.Random(9)
KEY, STORED = make_key(RANDOM.randbytes(37))
ADMIN_KEY, STORED_ADMIN = make_key(RANDOM.randbytes(37), admin=True)
TENANTS = (Tenant(name="acme", keys=(STORED,)), Tenant(name="operator", keys=(STORED_ADMIN,)))
TLS = TlsSettings(
    certificate_file="c.pem", key_file="c.key", client_ca_file="ca.pem", client_tenants={"cn:a": "acme"}
)


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def services(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        logger = configure_logs(LogSettings(format="json"), terminal=False)
    return SimpleNamespace(
        identity=Authenticator(TenantDirectory(TENANTS), tls=TLS),
        metrics=Metrics(CollectorRegistry()),
        logger=logger,
    )


def request(services: Any, key: str | None, **scope: Any) -> Request:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    app = SimpleNamespace(state=SimpleNamespace(services=services))
    state = {"request_id": "the id"}
    return Request({"type": "http", "headers": headers, "app": app, "state": state, **scope})


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


async def test_a_refusal_is_counted_and_logged_without_the_credential(services, log):
    for key in (None, KEY[:-1] + "!", "eyJh.eyJzdWIi.c2ln"):
        with pytest.raises(InvalidApiKeyError):
            await tenant_caller(request(services, key))
    written = log.getvalue()
    for reason in ("no_credential", "api_key", "tokens_not_accepted"):
        labels = {"reason": reason}
        assert services.metrics.registry.get_sample_value("appliance_callers_refused_total", labels) == 1
        assert f'"reason": "{reason}"' in written
    assert written.count('"request_id": "the id"') == 3
    assert KEY[3:20] not in written
    assert "eyJ" not in written
