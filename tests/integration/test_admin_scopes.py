"""
What one administrator can do with a key, and cannot do alone: a gateway process under the two-person rule.

The log is verified when the gateway has stopped.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from appliance.api.scopes import SCOPES
from appliance.audit import verify
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.entry_types import EntryType
from appliance.tenancy import AdminScope
from demo.process import ApplianceProcess
from tests.command import run_command
from tests.fakes import FakeWorker, chat, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_SECONDS = 100
ENVIRONMENT = {"APPLIANCE_AUDIT__TWO_PERSON": "true", "APPLIANCE_AUDIT__PAYLOAD_RETENTION_DAYS": "30"}


class Site:
    """The gateway, its database, and a client for any key."""

    def __init__(self, data: Path, worker: FakeWorker) -> None:
        self.data = data
        self._environment = {"APPLIANCE_POOL__URLS": json.dumps([worker.url]), **ENVIRONMENT}
        self.client = httpx.AsyncClient(verify=False, trust_env=False, timeout=PATIENCE_SECONDS)
        self.store = SqlPayloadStore(f"sqlite:///{data / 'audit.db'}")
        self.process: ApplianceProcess

    async def start(self) -> None:
        self.process = ApplianceProcess("gateway", data=self.data, environment=self._environment)
        await asyncio.to_thread(self.process.wait_ready)
        await until_answered(lambda: self.client.get(f"{self.process.url}/readyz"), but_not=503)

    async def stop(self) -> None:
        assert await asyncio.to_thread(self.process.stop) == 0, "".join(self.process.output)
        self.process.process.stdout.close()

    async def send(self, key: str, method: str, path: str, **body: Any) -> httpx.Response:
        """Send a request to the admin API."""
        url, headers = f"{self.process.admin_url}/admin/v1/{path}", {"Authorization": f"Bearer {key}"}
        return await self.client.request(method, url, headers=headers, json=body or None)

    async def done(self, key: str, method: str, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = await self.send(key, method, path, **body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def refused(self, key: str, method: str, path: str, code: str, **body: Any) -> str:
        """The message of a request that is refused with this code."""
        error = (await self.send(key, method, path, **body)).json()["error"]
        assert error["code"] == code, error
        return error["message"]

    async def command(self, *words: object, data: Path | None = None, expecting: int = 0) -> str:
        """What a command printed: its output, or its error."""
        done = await asyncio.to_thread(run_command, *words, "--data", data or self.data)
        assert done.returncode == expecting, done.stdout + done.stderr
        return done.stdout if expecting == 0 else done.stderr

    async def admin_key(self, *scopes: str) -> str:
        """A key that a command makes, once the gateway knows it."""
        options = [word for scope in scopes for word in ("--scope", scope)]
        key = (await self.command("key", "create", "operator", "--admin", *options)).strip()
        await until_answered(lambda: self.send(key, "GET", "status"), but_not=401)
        return key

    async def tenant_with_content(self, name: str) -> str:
        """A tenant of which one request and its answer are kept."""
        await self.command("tenant", "create", name, "--content", "encrypted")
        key = (await self.command("key", "create", name)).strip()
        url, headers = f"{self.process.url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
        await until_answered(lambda: self.client.post(url, headers=headers, json=chat()), but_not=401)
        await until(lambda: self.kept(name) == 2)
        return name

    def kept(self, tenant: str) -> int:
        return sum(payload.tenant == tenant for payload in self.store.all())

    def entries(self, entry_type: EntryType, **fields: str) -> list[dict[str, Any]]:
        """The entries of a type with these members."""
        found = (entry for _, entry in self.store.entries(entry_type))
        return [entry for entry in found if fields.items() <= entry.items()]


async def until_answered(send: Callable[[], Awaitable[httpx.Response]], *, but_not: int) -> None:
    """Send until the answer has another status: a command's changes are in force after a poll."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if (await send()).status_code != but_not:
                return
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory) -> AsyncIterator[Site]:
    data, worker = tmp_path_factory.mktemp("scopes") / "data", FakeWorker()
    async with worker.serving():
        site = Site(data, worker)
        await site.start()
        with closing(site.store):
            yield site
            await site.stop()
            await site.client.aclose()
            erased = site.entries(EntryType.ERASURE)
    await site.command(
        "audit", "verify", expecting=verify.ExitCode.ERASED if erased else verify.ExitCode.VALID
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ada(site) -> str:
    """The key of an administrator, made by a command."""
    return await site.admin_key()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ben(site) -> str:
    """The key of another administrator."""
    return await site.admin_key()


def id_of(key: str) -> str:
    return key.split("-")[1]


# Scopes.


@pytest.mark.parametrize("scope", AdminScope)
async def test_a_key_opens_the_routes_of_its_scope_and_no_others(site, scope):
    key = await site.admin_key(scope)
    for route, needed in SCOPES.items():
        method, path = route.split()
        path = path.removeprefix("/admin/v1/").replace("{name}", "demo" if method == "GET" else "nobody")
        answer = await site.send(key, method, path.replace("{", "").replace("}", ""))
        if needed is not scope:
            assert answer.status_code == 403, route
            assert answer.json()["error"]["code"] == "missing_scope"
            assert f"lacks the scope `{needed}`" in answer.json()["error"]["message"]
        elif method == "GET":
            assert answer.status_code == 200, (route, answer.text)
        else:
            assert answer.status_code not in {401, 403}, route
            assert answer.status_code < 500, (route, answer.text)


async def test_a_command_says_in_one_line_which_scope_its_key_lacks(site, tmp_path):
    (tmp_path / "admin.key").write_text(await site.admin_key("read"))
    words = ("audit", "hold", "--tenant", "demo", "--reason", "case 7", "--url", site.process.admin_url)
    complaint = await site.command(*words, data=tmp_path, expecting=1)
    assert "lacks the scope `retention`" in complaint
    assert complaint.count("\n") == 1


# Two persons.


async def requested(site: Site, key: str, tenant: str) -> str:
    """The id of a request to erase everything of a tenant."""
    answer = await site.done(key, "POST", "audit/erasures", 202, tenant=tenant, basis="contract ended")
    return answer["approval"]


async def rotated(site: Site, by: str, key: str) -> str:
    """The successor of a key, which its caller gets."""
    return (await site.done(by, "POST", f"keys/{id_of(key)}/rotate", 201))["key"]


async def minted(site: Site, by: str) -> str:
    return (await site.done(by, "POST", "tenants/operator/keys", 201, admin=True))["key"]


async def by_itself(site, ada, ben):
    return ada, ada


async def by_its_successor(site, ada, ben):
    mine = await site.admin_key()
    return mine, await rotated(site, mine, mine)


async def by_the_key_it_replaced(site, ada, ben):
    mine = await site.admin_key()
    return await rotated(site, mine, mine), mine


async def by_a_key_it_made(site, ada, ben):
    return ada, await minted(site, ada)


async def by_a_key_of_a_key_it_made(site, ada, ben):
    return ada, await minted(site, await minted(site, ada))


async def by_the_key_that_made_it(site, ada, ben):
    return await minted(site, ada), ada


async def by_another_key_of_the_same_maker(site, ada, ben):
    return await minted(site, ada), await minted(site, ada)


async def by_the_successor_of_anothers_key(site, ada, ben):
    return ada, await rotated(site, ada, await site.admin_key())


@pytest.mark.parametrize(
    "keys",
    [
        by_itself,
        by_its_successor,
        by_the_key_it_replaced,
        by_a_key_it_made,
        by_a_key_of_a_key_it_made,
        by_the_key_that_made_it,
        by_another_key_of_the_same_maker,
        by_the_successor_of_anothers_key,
    ],
    ids=lambda way: way.__name__,
)
async def test_one_administrator_cannot_erase_alone(site, ada, ben, keys):
    tenant = await site.tenant_with_content(keys.__name__.replace("_", "-"))
    requester, approver = await keys(site, ada, ben)
    approval = await requested(site, requester, tenant)
    assert site.kept(tenant) == 2
    await site.refused(approver, "POST", f"audit/approvals/{approval}", "control_refused")
    await site.refused(requester, "POST", f"audit/approvals/{approval}", "control_refused")
    assert (site.kept(tenant), site.entries(EntryType.ERASURE, tenant=tenant)) == (2, [])
    await site.done(requester, "DELETE", f"audit/approvals/{approval}")
    await site.refused(ben, "POST", f"audit/approvals/{approval}", "control_refused")
    assert site.kept(tenant) == 2


@pytest.mark.parametrize("how", ["made", "rotated", "by command"])
async def test_no_key_that_is_newer_than_the_request_approves_it(site, ada, ben, how):
    tenant = await site.tenant_with_content(f"newer-{how.replace(' ', '-')}")
    approval = await requested(site, ada, tenant)
    if how == "made":
        newer = await minted(site, ada)
    elif how == "rotated":
        newer = await rotated(site, ada, await site.admin_key())
    else:
        newer = await site.admin_key()
    await site.refused(newer, "POST", f"audit/approvals/{approval}", "control_refused")
    assert site.kept(tenant) == 2
    await site.done(ada, "DELETE", f"audit/approvals/{approval}")


@pytest.mark.parametrize("scope", ["read", "tenants", "workers", "drafts"])
async def test_only_a_key_with_the_scope_retention_approves(site, ada, scope):
    other = await site.admin_key(scope)
    approval = await requested(site, ada, "nobody")
    await site.refused(other, "POST", f"audit/approvals/{approval}", "missing_scope")
    await site.refused(other, "DELETE", f"audit/approvals/{approval}", "missing_scope")
    await site.done(ada, "DELETE", f"audit/approvals/{approval}")


async def test_two_administrators_erase_and_the_log_names_both(site, ada, ben):
    """Also if the gateway was restarted in between."""
    tenant = await site.tenant_with_content("erased-by-two")
    approval = await requested(site, ada, tenant)
    (entry,) = site.entries(EntryType.APPROVAL_REQUESTED, id=approval)
    assert (entry["operation"], entry["tenant"], entry["legal_basis"], entry["actor"]) == (
        "erase",
        tenant,
        "contract ended",
        id_of(ada),
    )
    await site.stop()
    await site.start()
    (pending,) = (await site.done(ben, "GET", "audit/approvals"))["approvals"]
    assert (pending["approval"], pending["tenant"], pending["actor"]) == (approval, tenant, id_of(ada))
    done = await site.done(ben, "POST", f"audit/approvals/{approval}")
    assert (done["operation"], done["tenant"], done["payloads"]) == ("erase", tenant, 2)
    assert site.kept(tenant) == 0
    (erasure,) = site.entries(EntryType.ERASURE, tenant=tenant)
    assert (erasure["actor"], erasure["approved_by"]) == (id_of(ada), id_of(ben))
    (closed,) = site.entries(EntryType.APPROVAL_CLOSED, approval=approval)
    assert (closed["outcome"], closed["actor"]) == ("approved", id_of(ben))
    await site.refused(ben, "POST", f"audit/approvals/{approval}", "control_refused")


async def test_a_hold_is_released_by_two(site, ada, ben):
    tenant = await site.tenant_with_content("held")
    await site.done(ada, "POST", "audit/holds", 201, tenant=tenant, reason="case 7")
    answer = await site.done(ada, "POST", "audit/holds/releases", 202, tenant=tenant, reason="case closed")
    assert (await site.done(ada, "GET", "audit/holds"))["holds"] == {tenant: "case 7"}
    erasure = await requested(site, ben, tenant)
    message = await site.refused(ada, "POST", f"audit/approvals/{erasure}", "control_refused")
    assert "legal hold" in message
    await site.done(ben, "POST", f"audit/approvals/{answer['approval']}")
    (released,) = site.entries(EntryType.HOLD_RELEASED, tenant=tenant)
    assert (released["reason"], released["actor"], released["approved_by"]) == (
        "case closed",
        id_of(ada),
        id_of(ben),
    )
    # What the hold prevented is still pending.
    assert (await site.done(ada, "POST", f"audit/approvals/{erasure}"))["payloads"] == 2


async def test_only_content_within_its_retention_is_pruned_by_two(site, ada, ben):
    """Older content is pruned by a timer, as the settings say."""
    tenant = await site.tenant_with_content("pruned")
    assert await site.done(ada, "POST", "audit/prunes", before="2020-01-01") == {"erased": []}
    answer = await site.done(ada, "POST", "audit/prunes", 202, before="2999-01-01")
    assert site.kept(tenant) == 2
    await site.refused(ada, "POST", f"audit/approvals/{answer['approval']}", "control_refused")
    done = await site.done(ben, "POST", f"audit/approvals/{answer['approval']}")
    assert [each["payloads"] for each in done["erased"] if each["tenant"] == tenant] == [2]
    (erasure,) = site.entries(EntryType.ERASURE, tenant=tenant)
    assert (erasure["actor"], erasure["approved_by"]) == (id_of(ada), id_of(ben))


async def test_the_commands_of_two_administrators(site, ben, tmp_path):
    """Each has a directory with a key of their own."""
    tenant = await site.tenant_with_content("erased-by-commands")
    (tmp_path / "admin.key").write_text(ben)
    url = ("--url", site.process.admin_url)
    erase = ("audit", "erase", "--tenant", tenant, "--basis", "contract ended", "--yes", *url)
    said = await site.command(*erase)
    assert "nothing is done yet" in said
    approval = said.split()[-1]
    assert f"approval={approval}\toperation=erase\t" in await site.command("audit", "approvals", *url)
    shown = await site.command("audit", "approve", approval, *url, data=tmp_path, expecting=1)
    assert f"\tlegal_basis=contract ended\ttenant={tenant}\n" in shown
    assert shown.endswith("Aborted.\n")
    assert site.kept(tenant) == 2
    complaint = await site.command("audit", "approve", approval, "--yes", *url, expecting=1)
    assert "the administrator who requested it cannot approve it" in complaint
    assert complaint.count("\n") == 1
    said = await site.command("audit", "approve", approval, "--yes", *url, data=tmp_path)
    assert f"{tenant}: 2 payloads erased" in said
    assert site.kept(tenant) == 0
    approval = (await site.command(*erase)).split()[-1]
    assert f"{approval} is withdrawn" in await site.command("audit", "withdraw", approval, *url)
    assert await site.command("audit", "approvals", *url) == ""


async def test_many_named_requests_are_refused_and_few_are_recorded_by_name(site, ada):
    """What is approved fits into one entry."""
    named = [f"{number:026d}" for number in range(61)]
    message = await site.refused(
        ada, "POST", "audit/erasures", "invalid_request", tenant="demo", basis="b", requests=named
    )
    assert "at most 60" in message
    answer = await site.done(
        ada, "POST", "audit/erasures", 202, tenant="demo", basis="ü" * 200, requests=named[:60]
    )
    (entry,) = site.entries(EntryType.APPROVAL_REQUESTED, id=answer["approval"])
    assert entry["requests"] == named[:60]
    await site.done(ada, "DELETE", f"audit/approvals/{answer['approval']}")
