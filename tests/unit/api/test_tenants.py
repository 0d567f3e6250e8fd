"""Changes of tenants are recorded, in force when answered, and reveal no secret."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from appliance.api.services import Services
from appliance.app.http_app import create_admin_app
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.control.tenants.registrar import Registrar
from appliance.errors import AuditUnavailableError, InvalidApiKeyError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, LogSettings
from appliance.serving.pool import WorkerPool
from appliance.tenancy import Tenant, TenantDirectory, digest_key
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.limits.limiting import NO_LIMITS
from appliance.tenancy.roster import Roster
from appliance.tenancy.store import SqlTenantStore
from appliance.tenancy.watch import TenantWatch
from tests.fakes import audit_fields, uncounted_refusals
from tests.roster import roster_mac
from tests.unit.tenancy.states import ADMIN, ADMIN_KEY, KEY, STORED

NOW = 1_800_000_000.5
NOTHING: Any = None
ROUTES = [
    ("GET", "/admin/v1/tenants"),
    ("POST", "/admin/v1/tenants"),
    ("GET", "/admin/v1/tenants/acme"),
    ("PATCH", "/admin/v1/tenants/acme"),
    ("DELETE", "/admin/v1/tenants/acme"),
    ("POST", "/admin/v1/tenants/acme/keys"),
    ("POST", f"/admin/v1/keys/{STORED.key_id}/rotate"),
    ("POST", f"/admin/v1/keys/{STORED.key_id}/revoke"),
]
TENANTS = (Tenant(name="acme", keys=(STORED,)), Tenant(name="operator", models=(), keys=(ADMIN,)))


@dataclass(kw_only=True)
class Admin:
    """The admin API, its database and log, and a client with the admin key."""

    client: httpx.AsyncClient
    directory: TenantDirectory
    store: SqlTenantStore
    recorded: list[dict[str, Any]]
    failures: list[Exception]
    now: list[float]
    age: list[float]
    """Monotonic time since the tenants were read."""

    async def send(self, method: str, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """Send a request and return the answer; errors have OpenAI's shape."""
        content = json.dumps(body) if body else None
        response = await self.client.request(method, f"/admin/v1/{path}", content=content)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        if status >= 400:
            assert list(answer) == ["error"]
            assert list(answer["error"]) == ["message", "type", "param", "code"]
            return answer["error"]
        assert response.headers["cache-control"] == "no-store"
        return answer


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[Admin]:
    url = f"sqlite:///{tmp_path / 'audit.db'}"
    SqlAuditStore(url).close()
    recorded: list[dict[str, Any]] = []
    failures: list[Exception] = []
    now = [NOW]

    async def record(entry_type: EntryType, /, **fields: Any) -> None:
        if failures:
            raise failures.pop()
        if entry_type != EntryType.TENANTS_SEALED:
            recorded.append({"type": str(entry_type), **audit_fields(entry_type, fields)})

    async with AsyncExitStack() as stack:
        store = stack.enter_context(closing(SqlTenantStore(url, roster_mac(tmp_path))))
        directory = TenantDirectory(store.write(Roster(), TENANTS).tenants, clock=lambda: now[0])
        age = [0.0]
        watch = TenantWatch(
            store=store, directory=directory, logger=NOTHING, clock=lambda: age[0], stale_seconds=900
        )
        app = create_admin_app(
            Services(
                settings=ApiSettings(),
                tenants=directory,
                identity=Authenticator(directory, refuse=watch.refuse_if_stale),
                refused=uncounted_refusals(),
                pool=WorkerPool(),
                workers=NOTHING,
                gateway=SimpleNamespace(limits=NO_LIMITS),  # type: ignore[arg-type]
                audit=NOTHING,
                attribution=NOTHING,
                control=NOTHING,
                overrides=NOTHING,
                metrics=Metrics(CollectorRegistry()),
                logger=configure_logs(LogSettings(level="error"), terminal=False),
                clock=lambda: now[0],
                new_request_id=lambda: "ours",
                version="test",
                registrar=Registrar(
                    store=store, record=record, adopt=lambda roster: directory.replace(roster.tenants)
                ),
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
            directory=directory,
            store=store,
            recorded=recorded,
            failures=failures,
            now=now,
            age=age,
        )


async def test_every_caller_is_refused_once_revocations_may_be_unknown_for_too_long(admin: Admin):
    """With a clear answer that tells the client to try again, whatever its key is."""
    admin.age[0] = 900
    await admin.send("GET", "tenants")
    admin.age[0] = 901
    for key in (ADMIN_KEY, KEY, "nonsense"):
        response = await admin.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "tenants_unavailable")
        assert response.headers["x-should-retry"] == "true"
    error = await admin.send("GET", "tenants", 503)
    assert error["message"] == "Keys could not be checked for 901 s. Try again later."


@pytest.mark.parametrize("key", ["", KEY, "nonsense"], ids=["none", "tenant", "nonsense"])
async def test_every_route_needs_an_admin_key(admin: Admin, key):
    headers = {"Authorization": f"Bearer {key}"}
    for method, path in ROUTES:
        response = await admin.client.request(method, path, headers=headers, json={})
        assert response.status_code == 401, path
    assert (admin.recorded, admin.store.generation()) == ([], 1)


async def test_a_tenant_is_created_shown_changed_and_deleted(admin: Admin):
    limits = {"requests_per_minute": 60, "by_model": {"demo": {"concurrent_requests": 2}}}
    created = await admin.send("POST", "tenants", 201, name="new", models=["demo"], limits=limits)
    assert created == {
        "name": "new",
        "models": ["demo"],
        "speculation": "auto",
        "content": "none",
        "priority": "standard",
        "may": [],
        "limits": limits,
        "disabled": False,
        "keys": [],
    }
    assert await admin.send("GET", "tenants/new") == created
    listed = await admin.send("GET", "tenants")
    assert [tenant["name"] for tenant in listed["tenants"]] == ["acme", "new", "operator"]
    changed = await admin.send("PATCH", "tenants/new", limits={"requests_per_minute": None}, priority="batch")
    assert changed == {**created, "priority": "batch", "limits": {"by_model": limits["by_model"]}}
    assert await admin.send("DELETE", "tenants/new") == {"name": "new", "deleted": True}
    assert (await admin.send("GET", "tenants/new", 404))["code"] == "tenant_not_found"
    assert admin.recorded == [
        {"type": "tenant.created", "tenant": "new", "models": ["demo"], "actor": ADMIN.key_id},
        {"type": "tenant.changed", "tenant": "new", "changes": ["priority", "limits"], "actor": ADMIN.key_id},
        {"type": "tenant.deleted", "tenant": "new", "actor": ADMIN.key_id},
    ]


async def test_a_new_key_is_shown_once_and_works_at_once(admin: Admin):
    made = await admin.send(
        "POST", "tenants/acme/keys", 201, models=["demo"], expires_at="2027-12-31T00:00:00Z"
    )
    key = made.pop("key")
    assert made == {
        "key_id": key.split("-")[1],
        "tenant": "acme",
        "admin": False,
        "in_force": True,
        "models": ["demo"],
        "created_at": "2027-01-15T08:00:00Z",
        "expires_at": "2027-12-31T00:00:00Z",
    }
    caller = admin.directory.authenticate(key)
    assert (caller.may_use("demo"), caller.may_use("other")) == (True, False)
    said = json.dumps([await admin.send("GET", "tenants"), admin.recorded])
    for secret in (key, key[12:], digest_key(key), STORED.digest, ADMIN.digest):
        assert secret not in said


async def test_a_rotated_key_and_its_successor_overlap(admin: Admin):
    made = await admin.send("POST", f"keys/{STORED.key_id}/rotate", 201, overlap_seconds=60)
    assert made["replaces"] == STORED.key_id
    for key in (KEY, made["key"]):
        assert admin.directory.authenticate(key).tenant.name == "acme"
    admin.now[0] += 60
    assert admin.directory.authenticate(made["key"]).tenant.name == "acme"
    with pytest.raises(InvalidApiKeyError):
        admin.directory.authenticate(KEY)
    again = await admin.send("POST", f"keys/{STORED.key_id}/rotate", 409)
    assert (again["code"], "rotated already" in again["message"]) == ("tenant_conflict", True)
    assert [entry["type"] for entry in admin.recorded] == ["key.rotated"]


async def test_a_key_hands_on_only_scopes_that_it_has(admin: Admin):
    """Neither by creating a key nor by rotating one, whose successor it would get."""
    made = await admin.send("POST", "tenants/operator/keys", 201, admin=True, scopes=["tenants", "read"])
    assert made["scopes"] == ["read", "tenants"]
    assert admin.recorded[-1] == {
        "type": "key.created",
        "tenant": "operator",
        "key_id": made["key_id"],
        "admin": True,
        "scopes": ["read", "tenants"],
        "actor": ADMIN.key_id,
    }
    recorded, full = list(admin.recorded), admin.client.headers["authorization"]
    admin.client.headers["authorization"] = f"Bearer {made['key']}"
    for path, body in (
        ("tenants/operator/keys", {"admin": True}),
        ("tenants/operator/keys", {"admin": True, "scopes": ["read", "retention"]}),
        (f"keys/{ADMIN.key_id}/rotate", {}),
    ):
        assert (await admin.send("POST", path, 403, **body))["code"] == "missing_scope"
    assert admin.recorded == recorded
    await admin.send("POST", "tenants/acme/keys", 201)
    await admin.send("POST", "tenants/operator/keys", 201, admin=True, scopes=["read"])
    rotated = await admin.send("POST", f"keys/{made['key_id']}/rotate", 201)
    assert rotated["scopes"] == ["read", "tenants"]
    admin.client.headers["authorization"] = full
    shown = await admin.send("GET", "tenants/operator")
    assert {key["key_id"]: key.get("scopes") for key in shown["keys"]} == {
        ADMIN.key_id: None,
        made["key_id"]: ["read", "tenants"],
        rotated["key_id"]: ["read", "tenants"],
        admin.recorded[-2]["key_id"]: ["read"],
    }


async def test_a_revoked_key_is_refused_once_the_answer_is_sent(admin: Admin):
    revoked = await admin.send("POST", f"keys/{STORED.key_id}/revoke", reason="lost")
    assert (revoked["in_force"], revoked["revoked_at"]) == (False, "2027-01-15T08:00:00Z")
    with pytest.raises(InvalidApiKeyError):
        admin.directory.authenticate(KEY)
    assert admin.recorded == [
        {
            "type": "key.revoked",
            "tenant": "acme",
            "key_id": STORED.key_id,
            "reason": "lost",
            "actor": ADMIN.key_id,
        }
    ]


async def test_the_keys_of_a_disabled_tenant_are_not_in_force(admin: Admin):
    shown = await admin.send("PATCH", "tenants/acme", disabled=True)
    assert [key["in_force"] for key in shown["keys"]] == [False]
    with pytest.raises(InvalidApiKeyError):
        admin.directory.authenticate(KEY)


async def test_a_change_that_cannot_be_recorded_is_not_made(admin: Admin):
    admin.failures.append(AuditUnavailableError("the disk is full"))
    error = await admin.send("POST", f"keys/{STORED.key_id}/revoke", 503)
    assert error["code"] == "audit_unavailable"
    assert admin.directory.authenticate(KEY)
    assert admin.store.generation() == 1


SLIPS = [
    ("POST", "tenants", {"name": "acme"}, 409, "already"),
    ("POST", "tenants", {"name": 5}, 400, "name"),
    ("POST", "tenants", {"name": "A b"}, 400, "tenant name 'A b'"),
    ("POST", "tenants", {"name": "x", "keys": []}, 400, "keys is not a known member"),
    ("POST", "tenants", {"name": "x", "limits": {"tokens_per_day": -1}}, 400, "tokens_per_day"),
    ("POST", "tenants", {"name": "x", "models": ["\ud800"]}, 400, "models must be a list of names"),
    ("PATCH", "tenants/nobody", {"disabled": True}, 404, "no tenant 'nobody'"),
    ("PATCH", "tenants/acme", {"disabled": 1}, 400, "disabled must be true or false"),
    ("DELETE", "tenants/nobody", {}, 404, "no tenant 'nobody'"),
    ("POST", "tenants/nobody/keys", {}, 404, "no tenant 'nobody'"),
    ("POST", "tenants/acme/keys", {"models": "demo"}, 400, "models must be a list"),
    ("POST", "tenants/acme/keys", {"admin": "yes"}, 400, "admin"),
    ("POST", "tenants/acme/keys", {"scopes": ["read"]}, 400, "only an admin key has scopes"),
    ("POST", "tenants/acme/keys", {"admin": True, "scopes": []}, 400, "scopes must be a list"),
    ("POST", "tenants/acme/keys", {"admin": True, "scopes": ["all"]}, 400, "scopes must be read, tenants,"),
    ("POST", "tenants/acme/keys", {"expires_at": 1}, 400, "expires_at"),
    ("POST", "tenants/acme/keys", {"secret": 1}, 400, "secret"),
    ("POST", "keys/nonsense/rotate", {}, 404, "no key with this id"),
    ("POST", f"keys/{KEY}/revoke", {}, 404, "no key with this id"),
    ("POST", f"keys/{STORED.key_id}/rotate", {"overlap_seconds": -1}, 400, "overlap_seconds"),
    ("POST", f"keys/{STORED.key_id}/rotate", {"overlap_seconds": True}, 400, "overlap_seconds"),
    ("POST", f"keys/{STORED.key_id}/revoke", {"reason": "two\nlines"}, 400, "reason"),
    ("POST", f"keys/{STORED.key_id}/revoke", {"reason": "x" * 201}, 400, "reason"),
]


async def test_an_invalid_request_names_the_error_and_changes_nothing(admin: Admin):
    for method, path, body, status, words in SLIPS:
        error = await admin.send(method, path, status, **body)
        assert words in error["message"]
        assert KEY[12:] not in error["message"]
        assert (admin.recorded, admin.store.generation()) == ([], 1), body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = st.sampled_from(
    [
        "name",
        "models",
        "speculation",
        "content",
        "priority",
        "may",
        "limits",
        "disabled",
        "keys",
        "admin",
        "scopes",
    ]
)


async def test_no_body_causes_an_internal_error(admin: Admin):
    @given(st.sampled_from(ROUTES), st.dictionaries(MEMBERS | st.text(max_size=5), JSON, max_size=3))
    def look(route: tuple[str, str], body: dict[str, Any]) -> None:
        method, path = route
        if method != "DELETE":
            bodies.append((method, path, body))

    bodies: list[tuple[str, str, dict[str, Any]]] = []
    look()
    for method, path, body in bodies:
        response = await admin.client.request(method, path, content=json.dumps(body))
        assert response.status_code < 500, (method, path, body, response.text)
