"""Tenants' routes for keys that they make: who may call them, what is refused, what the log says."""

from dataclasses import replace

import pytest

from appliance.infra.logs import configure_logs
from appliance.infra.settings import LogSettings, OidcSettings
from appliance.tenancy.edits import LONGEST_BY_TOKEN_SECONDS
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.identity.provider import open_provider
from appliance.tenancy.identity.tokens import subject_id
from appliance.tenancy.moments import format_moment
from tests.clock import Clock
from tests.identity_provider import AUDIENCE, ISSUER, Provider, publish
from tests.unit.api.test_tenants import NOW, Admin, admin
from tests.unit.tenancy.states import ADMIN, ADMIN_KEY, KEY, STORED

__all__ = ["admin"]
PATH = "/v1/appliance/keys"


async def send(admin: Admin, key: str, method: str, status: int, path: str = "", /, **body):
    answer = await admin.client.request(
        method, PATH + path, json=body or None, headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == status, answer.text
    return answer.json()


async def manager(admin: Admin) -> str:
    made = await admin.send("POST", "tenants/acme/keys", 201, manage_keys=True, models=["demo"])
    return made["key"]


async def test_a_key_without_the_permission_is_refused(admin):
    for method, path in (("GET", ""), ("POST", ""), ("POST", f"/{STORED.key_id}/rotate")):
        refused = await send(admin, KEY, method, 403, path)
        assert refused["error"]["code"] == "missing_scope"
    await send(admin, KEY, "DELETE", 403, f"/{STORED.key_id}")


async def test_a_made_key_is_within_its_maker_and_ends_with_it(admin):
    key = await manager(admin)
    maker_id = key.split("-")[1]
    refused = await send(admin, key, "POST", 400, models=["other"])
    assert refused["error"]["code"] == "key_exceeds_maker"
    await send(admin, key, "POST", 400, manage_keys=True)
    made = await send(admin, key, "POST", 201, models=["demo"], limits={"requests_per_minute": 5})
    created = admin.recorded[-1]
    assert created["actor"] == created["made_by"] == maker_id
    assert created["limits"] == ["requests_per_minute=5"]
    assert [each["key_id"] for each in (await send(admin, key, "GET", 200))["keys"]] == [made["key_id"]]
    await send(admin, made["key"], "GET", 403)
    await admin.send("POST", f"keys/{maker_id}/revoke")
    await send(admin, made["key"], "GET", 401)


async def test_a_manager_reaches_only_its_own_keys(admin):
    key, other = await manager(admin), await manager(admin)
    made = await send(admin, key, "POST", 201)
    for method, path in (("DELETE", ""), ("POST", "/rotate")):
        await send(admin, other, method, 404, f"/{made['key_id']}{path}")
        await send(admin, key, method, 404, f"/{STORED.key_id}{path}")
    assert (await send(admin, other, "GET", 200))["keys"] == []
    rotated = await send(admin, key, "POST", 201, f"/{made['key_id']}/rotate", overlap_seconds=0)
    assert admin.recorded[-1]["made_by"] == key.split("-")[1]
    await send(admin, key, "DELETE", 200, f"/{rotated['key_id']}")
    await send(admin, rotated["key"], "GET", 401)


LIMITS = {"requests_per_minute": 60, "by_model": {"demo": {"tokens_per_day": 100}}}
BEYOND = [
    ("models", {"models": ["demo", "other"]}),
    ("models", {"models": ["*"]}),
    ("limits", {"limits": {"requests_per_minute": 61}}),
    ("limits", {"limits": {"by_model": {"demo": {"tokens_per_day": 101}}}}),
    ("limits", {"limits": {"tokens_per_month": 1001}}),
    ("expires_at", {"expires_at": format_moment(int(NOW) + 1001)}),
]
UNREADABLE = [
    {"models": "demo"},
    {"limits": {"requests_per_minute": "1"}},
    {"limits": {"requests_per_minute": -1}},
    {"limits": {"requests_per_second": 1}},
    {"limits": {"by_model": {f"{number}{'m' * 254}": {"tokens_per_day": 1} for number in range(8)}}},
    {"limits": {"by_model": {'"' * (250 + more): {"tokens_per_day": 1} for more in range(4)}}},
    {"expires_at": "never"},
    {"made_by": STORED.key_id},
    {"admin": True},
    {"scopes": ["read"]},
    {"manage_keys": True},
    {"key_id": "aaaaaaaa"},
    {"tenant": "operator"},
]


async def test_a_key_beyond_its_maker_is_refused_whatever_is_tried(admin):
    """By creation and by rotation; nothing is recorded or made."""
    await admin.send("PATCH", "tenants/acme", limits={"tokens_per_month": 1000})
    bounds = {"models": ["demo"], "limits": LIMITS, "expires_at": format_moment(int(NOW) + 1000)}
    maker = await admin.send("POST", "tenants/acme/keys", 201, manage_keys=True, **bounds)
    made = await send(admin, maker["key"], "POST", 201, limits={"requests_per_minute": 60})
    assert (made["models"], made["expires_at"]) == (["demo"], bounds["expires_at"])
    assert not made.get("manage_keys")
    before = admin.store.generation(), list(admin.recorded)
    for param, body in BEYOND:
        refused = (await send(admin, maker["key"], "POST", 400, **body))["error"]
        assert (refused["code"], refused["param"]) == ("key_exceeds_maker", param)
    for body in UNREADABLE:
        refused = (await send(admin, maker["key"], "POST", 400, **body))["error"]
        assert refused["code"] != "key_exceeds_maker", body
    late = format_moment(int(NOW) + 1001)
    await send(admin, maker["key"], "POST", 400, f"/{made['key_id']}/rotate", expires_at=late)
    for more in ({"models": ["demo"]}, {"limits": {}}, {"manage_keys": True}):
        await send(admin, maker["key"], "POST", 400, f"/{made['key_id']}/rotate", **more)
    for method, path in (("GET", ""), ("POST", ""), ("DELETE", f"/{made['key_id']}")):
        await send(admin, made["key"], method, 403, path)
    assert (admin.store.generation(), admin.recorded) == before


async def test_a_made_key_does_no_more_than_its_maker_does_later(admin):
    """The maker's models shrink after it has made the key."""
    key = await manager(admin)
    made = await send(admin, key, "POST", 201, models=["demo"])
    assert admin.directory.authenticate(made["key"]).may_use("demo")
    maker = admin.directory.authenticate(key).key
    roster = admin.store.read()
    (acme, operator) = roster.tenants
    narrower = tuple(replace(each, models=()) if each == maker else each for each in acme.keys)
    admin.directory.replace((acme.with_keys(narrower), operator))
    assert not admin.directory.authenticate(made["key"]).may_use("demo")


async def answered(admin: Admin, key: str, method: str, path: str):
    """All that a caller can see of an answer."""
    answer = await admin.client.request(method, PATH + path, headers={"Authorization": f"Bearer {key}"})
    return answer.status_code, answer.content, sorted(answer.headers.multi_items())


async def test_keys_of_others_are_answered_like_keys_that_do_not_exist(admin):
    """Of another maker, tenant or administrator, and the caller's own; none is touched."""
    await admin.send("POST", "tenants", 201, name="other", models=["demo"])
    elsewhere = await admin.send("POST", "tenants/other/keys", 201, manage_keys=True)
    theirs = await send(admin, elsewhere["key"], "POST", 201)
    key, beside = await manager(admin), await manager(admin)
    besides = await send(admin, beside, "POST", 201)
    revoked = await send(admin, elsewhere["key"], "POST", 201)
    await send(admin, elsewhere["key"], "DELETE", 200, f"/{revoked['key_id']}")
    before = admin.store.read()
    others = (
        STORED.key_id, ADMIN.key_id, elsewhere["key_id"], theirs["key_id"], revoked["key_id"],
        besides["key_id"], key.split("-")[1], "jwt:0123456789abcdef", theirs["key"], "a" * 2000,
    )  # fmt: skip
    for method, rest in (("DELETE", ""), ("POST", "/rotate")):
        unknown = await answered(admin, key, method, f"/aaaaaaaa{rest}")
        assert unknown[0] == 404
        for other in others:
            assert await answered(admin, key, method, f"/{other}{rest}") == unknown, other
    forbidden = await answered(admin, KEY, "DELETE", "/aaaaaaaa")
    assert forbidden[0] == 403
    for other in others:
        assert await answered(admin, KEY, "DELETE", f"/{other}") == forbidden, other
        assert (await answered(admin, ADMIN_KEY, "DELETE", f"/{other}"))[0] == 401
    assert admin.store.read() == before


async def test_an_idle_permission_ends_with_the_key_that_has_it(admin):
    """Also between the request and the change: a maker that was revoked or rotated meanwhile makes no key."""
    key = await manager(admin)
    rotated = await admin.send("POST", f"keys/{key.split('-')[1]}/rotate", 201, overlap_seconds=60)
    refused = await send(admin, key, "POST", 409)
    assert "use its successor" in refused["error"]["message"]
    await send(admin, rotated["key"], "POST", 201)
    stale = admin.directory.tenants
    await admin.send("POST", f"keys/{rotated['key_id']}/revoke")
    admin.directory.replace(stale)
    assert "may no longer" in (await send(admin, rotated["key"], "POST", 409))["error"]["message"]


@pytest.fixture
def provider(admin, tmp_path):
    """Let tokens call, those with a role make keys, and those with another role be administrators."""
    made = Provider()
    settings = OidcSettings(
        jwks_file=publish(tmp_path / "keys.json", made),
        issuer=ISSUER,
        audience=AUDIENCE,
        admin_claim="roles",
        admin_values=("admin",),
        manage_claim="roles",
        manage_values=("keys",),
    )
    opened = open_provider(settings, logger=configure_logs(LogSettings(), terminal=False), clock=Clock(1e6))
    state = admin.client._transport.app.state
    state.services = replace(state.services, identity=Authenticator(admin.directory, provider=opened))
    return made


async def test_a_tokens_subject_makes_keys_with_an_expiry_within_ninety_days(admin, provider):
    """They stay the subject's: a later token of it reaches them, another subject's does not."""
    token = provider.token(roles=["keys"])
    for body in (
        {},
        {"models": ["demo"]},
        {"expires_at": format_moment(int(NOW) + LONGEST_BY_TOKEN_SECONDS + 1)},
    ):
        refused = (await send(admin, token, "POST", 400, **body))["error"]
        assert (refused["code"], refused["param"]) == ("key_exceeds_maker", "expires_at")
    latest = format_moment(int(NOW) + LONGEST_BY_TOKEN_SECONDS)
    made = await send(admin, token, "POST", 201, expires_at=latest)
    subject = subject_id("jwt", ISSUER, "ada")
    assert (made["made_by"], made["expires_at"]) == (subject, latest)
    assert (admin.recorded[-1]["actor"], admin.recorded[-1]["made_by"]) == (subject, subject)
    assert admin.directory.authenticate(made["key"]).tenant.name == "acme"
    rotated = await send(
        admin, provider.token(roles=["keys"], jti="2"), "POST", 201, f"/{made['key_id']}/rotate"
    )
    assert rotated["expires_at"] == latest
    late = format_moment(int(NOW) + LONGEST_BY_TOKEN_SECONDS + 1)
    await send(admin, token, "POST", 400, f"/{rotated['key_id']}/rotate", expires_at=late)
    other = provider.token(roles=["keys"], sub="ben")
    assert (await send(admin, other, "GET", 200))["keys"] == []
    await send(admin, other, "DELETE", 404, f"/{rotated['key_id']}")
    await send(
        admin, provider.token(roles=["keys"], tenant="operator"), "DELETE", 404, f"/{rotated['key_id']}"
    )
    await send(admin, provider.token(), "DELETE", 403, f"/{rotated['key_id']}")
    await send(admin, provider.token(roles=["keys", "admin"]), "DELETE", 401, f"/{rotated['key_id']}")
    await send(admin, token, "DELETE", 200, f"/{rotated['key_id']}")
