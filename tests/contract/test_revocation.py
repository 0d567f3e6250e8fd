"""Two real gateways on one database: both apply a change made at one of them, without a restart."""

import asyncio
import json
import time

import aiohttp
import pytest
import pytest_asyncio

from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.tenancy import make_key
from tests.contract.test_gateways_on_postgresql import BODY, command, serving_role, two_gateways
from tests.fakes import FakeWorker

pytestmark = pytest.mark.asyncio(loop_scope="module")

REVOKED_SECONDS = 5.0
"""Ten times `tenants.poll_seconds`: a busy machine is slow, not wrong."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(postgres, tmp_path_factory):
    """Two gateways in front of one worker, and the database they share, also as its owner."""
    url, owner = await serving_role(postgres, "revoking")
    worker = FakeWorker()
    async with (
        worker.serving(),
        two_gateways(tmp_path_factory.mktemp("revoking"), url, worker.url) as (first, second),
    ):
        yield first, second, url, owner


async def status(session, gateway, key):
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{gateway.url}/v1/chat/completions", json=BODY, headers=headers) as answer:
        await answer.read()
        return answer.status


async def seconds_until(session, gateway, key, wanted):
    """How long it takes until a key is answered with a status."""
    started = time.monotonic()
    async with asyncio.timeout(60):
        while await status(session, gateway, key) != wanted:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)
    return time.monotonic() - started


async def ready(session, gateway):
    async with session.get(f"{gateway.url}/readyz") as answer:
        return json.loads(await answer.read())


async def test_revoked_key_is_invalid_on_every_gateway_and_the_log_names_the_actor(gateways):
    """By command and by admin API; new keys and disabled tenants likewise."""
    first, second, url, _ = gateways
    admin = {"Authorization": f"Bearer {(first.directory / 'admin.key').read_text().strip()}"}
    async with aiohttp.ClientSession() as session:
        key = await command(first, url, "key", "create", "demo")
        for gateway in gateways[:2]:
            await seconds_until(session, gateway, key, 200)
        await command(second, url, "key", "revoke", key.split("-")[1], "--reason", "lost")
        for gateway in gateways[:2]:
            assert await seconds_until(session, gateway, key, 401) < REVOKED_SECONDS

        path = f"{first.admin_url}/admin/v1/tenants/demo/keys"
        async with session.post(path, headers=admin) as answer:
            made = await answer.json()
        assert await status(session, first, made["key"]) == 200
        await seconds_until(session, second, made["key"], 200)
        path = f"{first.admin_url}/admin/v1/keys/{made['key_id']}/revoke"
        async with session.post(path, headers=admin) as answer:
            assert answer.status == 200
        assert await status(session, first, made["key"]) == 401
        assert await seconds_until(session, second, made["key"], 401) < REVOKED_SECONDS
        assert await status(session, second, first.key) == 200

        async with session.patch(
            f"{second.admin_url}/admin/v1/tenants/demo", json={"disabled": True}, headers=admin
        ) as answer:
            assert answer.status == 200
        assert await status(session, second, first.key) == 401
        assert await seconds_until(session, first, first.key, 401) < REVOKED_SECONDS
    store = SqlAuditStore(url)
    entries = [decode(leaf.leaf) for leaf in store.leaves(0, 10_000)]
    store.close()
    said = [
        (str(entry.type), entry.fields["actor"])
        for entry in entries
        if "actor" in entry.fields and entry.type != EntryType.TENANTS_SEALED
    ]
    admin_id = admin["Authorization"].split("-")[1]
    assert [(kind, actor if actor == admin_id else actor[:4]) for kind, actor in said] == [
        ("tenant.created", "cli:"),
        ("key.created", "cli:"),
        ("tenant.created", "cli:"),
        ("key.created", "cli:"),
        ("key.created", "cli:"),
        ("key.revoked", "cli:"),
        ("key.created", admin_id),
        ("key.revoked", admin_id),
        ("tenant.changed", admin_id),
    ]
    for secret in (key, made["key"], first.key):
        assert secret not in repr(entries)


async def test_a_key_that_was_put_into_the_database_opens_nothing_and_shows(gateways, execute):
    """Gateways keep the tenants they read last, change nothing, and say which command to run."""
    first, second, _, owner = gateways
    text, key = make_key(b"intruder" * 5, admin=True)
    intruder = {"Authorization": f"Bearer {text}"}
    admin = {"Authorization": f"Bearer {(first.directory / 'admin.key').read_text().strip()}"}
    execute(
        owner,
        "INSERT INTO api_keys (key_id, tenant, digest, admin) "
        f"VALUES ('{key.key_id}', 'operator', '{key.digest}', true)",
    )
    execute(owner, "UPDATE tenancy_generation SET generation = generation + 1")
    async with aiohttp.ClientSession() as session:
        for gateway in (first, second):
            async with asyncio.timeout(60):
                while "not written with the MAC key" not in str((await ready(session, gateway))["warnings"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            path = f"{gateway.admin_url}/admin/v1/tenants"
            async with session.get(path, headers=intruder) as answer:
                assert answer.status == 401
            async with session.post(path, json={"name": "mine"}, headers=admin) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "tenants_unavailable")
        execute(owner, f"DELETE FROM api_keys WHERE key_id = '{key.key_id}'")
        execute(owner, "UPDATE tenancy_generation SET generation = generation - 1")
        for gateway in (first, second):
            async with asyncio.timeout(60):
                while (await ready(session, gateway))["warnings"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


async def test_while_tenants_cannot_be_read_the_last_known_are_served_and_it_shows(gateways, execute):
    """Serving does not depend on reading them; readiness and metrics say since when."""
    first, second, url, owner = gateways
    await command(first, url, "tenant", "create", "served")
    served = await command(first, url, "key", "create", "served")
    async with aiohttp.ClientSession() as session:
        await seconds_until(session, second, served, 200)
        execute(owner, "ALTER TABLE tenancy_generation RENAME TO tenancy_elsewhere")

        async def warned(expected):
            async with asyncio.timeout(60):
                while bool((await ready(session, second))["warnings"]) is not expected:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        await warned(expected=True)
        (warning,) = (await ready(session, second))["warnings"]
        assert "tenants and keys were last read" in warning
        assert "could not be read" in warning
        assert await status(session, second, served) == 200
        async with session.get(f"{second.admin_url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        (age,) = [line for line in lines if line.startswith("appliance_tenants_age_seconds ")]
        assert float(age.split()[1]) > 1
        execute(owner, "ALTER TABLE tenancy_elsewhere RENAME TO tenancy_generation")
        await warned(expected=False)
        key = await command(first, url, "key", "create", "served")
        await seconds_until(session, second, key, 200)
