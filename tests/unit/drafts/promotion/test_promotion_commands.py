"""Promotions over HTTP and on the command line, with a real promoter."""

import json
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import typer
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from appliance.api.services import Services
from appliance.app.http_app import create_admin_app
from appliance.cli.common import admin_client
from appliance.cli.draft import promote as cli
from appliance.errors import ConfigurationError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, LogSettings
from appliance.serving.pool import WorkerPool
from appliance.tenancy import Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import uncounted_refusals
from tests.unit.drafts.promotion.promotion_cluster import OWN, PromotionCluster
from tests.unit.drafts.registry.site import Site

KEY, STORED = make_key(b"a" * 37, admin=True)
TENANT_KEY, TENANT_STORED = make_key(b"t" * 37)


@pytest.fixture
async def cluster(tmp_path):
    site = Site.open(tmp_path / "site")
    site.add(site.draft("new"))
    made = PromotionCluster(site=site)
    made.evaluated(site.registry.revisions()[0].digest)
    await made.gateway.run()
    yield made
    await made.gateway.close()


def client_of(promoter) -> httpx.AsyncClient:
    nothing: Any = None
    tenants = TenantDirectory(
        (Tenant(name="operator", keys=(STORED,)), Tenant(name="t", keys=(TENANT_STORED,)))
    )
    app = create_admin_app(
        Services(
            settings=ApiSettings(),
            tenants=tenants,
            identity=Authenticator(tenants),
            refused=uncounted_refusals(),
            pool=WorkerPool(),
            workers=nothing,
            gateway=nothing,
            audit=nothing,
            attribution=nothing,
            control=nothing,
            overrides=nothing,
            metrics=Metrics(CollectorRegistry()),
            logger=configure_logs(LogSettings(level="error"), terminal=False),
            clock=nothing,
            new_request_id=lambda: "ours",
            version="test",
            promoter=promoter,
        )
    )
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://appliance/admin/v1",
        headers={"Authorization": f"Bearer {KEY}"},
    )


async def test_promotion_and_rollback_over_http(cluster):
    """The key id is the actor; the state is served while it runs."""
    draft = cluster.site.registry.revisions()[0].digest
    async with client_of(cluster.gateway.promoter) as client:
        begun = await client.post("/drafts/promotions", json={"draft": draft[7:15]})
        assert begun.status_code == 202, begun.text
        assert (begun.json()["stage"], begun.json()["incumbent"]) == ("begun", OWN)
        await cluster.gateway.until_over()
        shown = (await client.get("/drafts")).json()
        assert shown["acting"]
        assert [worker["draft"] for worker in shown["workers"]] == [draft] * 3
        assert shown["standings"][0]["draft"] == draft
        assert (shown["promotions"][0]["stage"], shown["promotions"][0]["over"]) == ("promoted", True)
        back = await client.post("/drafts/rollbacks", json={"reason": "slow", "to": "none"})
        assert (back.status_code, back.json()["kind"]) == (202, "rollback")
        await cluster.gateway.until_over()
    assert cluster.drafts() == [OWN] * 3
    assert {entry["actor"] for entry in cluster.entries} == {STORED.key_id}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("promotions", {}, 400),
        ("promotions", {"draft": ""}, 400),
        ("promotions", {"draft": 1}, 400),
        ("promotions", {"draft": "ffff"}, 404),
        ("promotions", {"draft": "x", "without_evaluation": ""}, 400),
        ("promotions", {"draft": "x", "without_evaluation": 1}, 400),
        ("promotions", {"draft": "x", "allow_downtime": "yes"}, 400),
        ("promotions", {"draft": "x", "force": True}, 400),
        ("rollbacks", {}, 400),
        ("rollbacks", {"reason": " "}, 400),
        ("rollbacks", {"reason": "a\nb"}, 400),
        ("rollbacks", {"reason": "slow", "to": 3}, 400),
        ("rollbacks", {"reason": "slow"}, 409),
        ("rollbacks", {"reason": "slow", "model": "another"}, 409),
    ],
)
async def test_invalid_request_begins_nothing(cluster, path, body, status):
    async with client_of(cluster.gateway.promoter) as client:
        answer = await client.post(f"/drafts/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert (cluster.entries, cluster.requests) == ([], [])


async def test_tenant_key_may_not_promote(cluster):
    async with client_of(cluster.gateway.promoter) as client:
        for method, path in (("GET", ""), ("POST", "/promotions"), ("POST", "/rollbacks")):
            headers = {"Authorization": f"Bearer {TENANT_KEY}"}
            answer = await client.request(method, f"/drafts{path}", headers=headers)
            assert answer.status_code == 401


async def test_gateway_without_a_promoter_answers_409():
    async with client_of(None) as client:
        assert (await client.get("/drafts")).status_code == 409


class Scripted:
    """A gateway that replies from a list and repeats its last reply."""

    def __init__(self, *answers: dict) -> None:
        self.answers, self.asked = list(answers), []

    async def request(self, method: str, path: str, body: dict | None = None) -> dict:
        self.asked.append((method, path, body))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def get(self, path: str) -> dict:
        return await self.request("GET", path)


def promotion(*stages: str, **more) -> dict:
    steps = [
        {"at": f"t{number}", "stage": stage, "text": f"step {number}"} for number, stage in enumerate(stages)
    ]
    numbers = {
        "drafts": 0,
        "acceptance_length": None,
        "previous_acceptance_length": None,
        "speed_ratio": None,
    }
    return {
        "kind": "promotion",
        "promotion_id": "P1",
        "stage": stages[-1],
        "timeline": steps,
        "waits": None,
        "over": stages[-1] in {"promoted", "refused", "rolled_back"},
        "draft": OWN,
        "reason": None,
        "numbers": numbers,
        "began": "2026-11-22T10:00:00.000Z",
        **more,
    }


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run one command against a scripted gateway."""
    monkeypatch.setattr(cli, "POLL_SECONDS", 0.0)
    app = typer.Typer()
    for name, function in cli.COMMANDS.items():
        app.command(name=name)(function)

    def run(gateway: Scripted, *arguments: str):
        @asynccontextmanager
        async def open_admin(settings, url, **options):
            yield gateway

        for module in (cli, admin_client):
            monkeypatch.setattr(module, "open_admin", open_admin)
        return CliRunner().invoke(app, [*arguments, "--data", str(tmp_path)])

    return run


def seen(*promotions: dict) -> dict:
    return {"standings": [], "workers": [], "promotions": list(promotions)}


def test_promote_prints_each_step_once_and_exits_0_if_promoted(command):
    gateway = Scripted(
        promotion("begun"),
        seen(promotion("begun", "canary")),
        seen(promotion("begun", "canary", "trial")),
        seen(promotion("begun", "canary", "trial", "promoted")),
    )
    done = command(gateway, "promote", "abc", "--without-evaluation", "a patient waits")
    assert done.exit_code == 0, done.output
    assert [line.rpartition("step ")[2] for line in done.output.splitlines() if "step" in line] == list(
        "0123"
    )
    asked = {"draft": "abc", "allow_downtime": False, "without_evaluation": "a patient waits"}
    assert gateway.asked[0] == ("POST", "drafts/promotions", asked)


def test_promote_exits_1_if_the_draft_is_refused(command):
    done = command(Scripted(promotion("begun"), seen(promotion("begun", "refused"))), "promote", "abc")
    assert done.exit_code == 1


def test_no_wait_returns_once_the_promotion_has_begun(command):
    gateway = Scripted(promotion("begun"))
    done = command(gateway, "promote", "abc", "--no-wait")
    assert (done.exit_code, len(gateway.asked)) == (0, 1)


def test_rollback_needs_a_reason(command):
    assert command(Scripted({}), "rollback").exit_code == 2
    gateway = Scripted(promotion("returning"), seen(promotion("returning", "rolled_back")))
    done = command(gateway, "rollback", "--reason", "slow", "--to", "none")
    assert done.exit_code == 0, done.output
    body = {"reason": "slow", "to": "none", "model": None, "allow_downtime": False}
    assert gateway.asked[0] == ("POST", "drafts/rollbacks", body)


def test_status_shows_workers_timeline_and_numbers(command):
    numbers = {
        "drafts": 900,
        "acceptance_length": 2.5,
        "previous_acceptance_length": 2.4,
        "speed_ratio": 1.04,
    }
    answer = {
        "standings": [{"target": OWN, "draft": None, "previous": [OWN]}],
        "workers": [
            {"worker": "a", "target": OWN, "draft": "", "models": ["demo"]},
            {"worker": "b", "target": "", "draft": "", "models": []},
        ],
        "promotions": [
            promotion("begun", "trial", numbers=numbers, waits="worker b is down"),
            promotion("begun", "refused", reason="its drafts collapsed"),
        ],
    }
    done = command(Scripted(answer), "status")
    assert done.exit_code == 0, done.output
    for words in (
        "of the settings is in service",
        "step 1",
        "2.500 against 2.400",
        "worker b is down",
        "collapsed",
    ):
        assert words in done.output
    assert json.loads(command(Scripted(answer), "status", "--json").output) == answer


def test_refusal_of_the_gateway_is_shown(command):
    class Refusing(Scripted):
        async def request(self, method, path, body=None):
            raise ConfigurationError("the gateway refused (409): worker a is the only one")

    done = command(Refusing({}), "promote", "abc")
    assert isinstance(done.exception, ConfigurationError)
