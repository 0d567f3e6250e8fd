"""`appliance workers`: commands reach the gateway, and the output matches its state."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from appliance.api.http.server import bind, make_server
from appliance.api.services import Services
from appliance.app.http_app import create_admin_app
from appliance.cli import cli
from appliance.cli.workers import states_of
from appliance.control.worker_list import WorkerList
from appliance.errors import ConfigurationError
from appliance.gateway.admission import AdmissionControl
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, load_settings
from appliance.serving.discovery import Discovery
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel
from appliance.tenancy import Tenant, TenantDirectory, make_key
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import audit_fields, uncounted_refusals

ADMIN_KEY, STORED_ADMIN_KEY = make_key(b"a" * 37, admin=True)
KEY, STORED_KEY = make_key(b"b" * 37)
NOTHING: Any = None
DEMO = ServedModel(name="demo", max_model_len=None, created=0)


@dataclass(kw_only=True)
class Gateway:
    """A gateway with two workers in its own thread, and the commands that use it."""

    url: str
    data: Path
    pool: WorkerPool
    file: Path
    entries: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def run(self, *words: str) -> str:
        """The output of a command."""
        arguments = ["workers", *words, "--url", self.url, "--data", str(self.data)]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, arguments)
        assert result.exit_code == 0, result.exception
        return result.output

    def refusal(self, *words: str) -> str:
        """The one line of an error."""
        arguments = ["workers", *words, "--url", self.url, "--data", str(self.data)]
        result = CliRunner().invoke(cli, arguments)
        assert isinstance(result.exception, ConfigurationError), result.output
        return str(result.exception)

    def ask(self, method: str, path: str, body: dict | None = None, key: str = ADMIN_KEY) -> tuple[int, Any]:
        """The admin API's answer."""
        request = urllib.request.Request(
            f"{self.url}/admin/v1/{path}",
            data=json.dumps(body).encode() if body is not None else None,
            method=method,
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def write(self, *names: str) -> None:
        urls = ", ".join(f"'http://{name}:1'" for name in names)
        self.file.write_text(f"pool:\n  urls: [{urls}]\n", encoding="utf-8")


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    (tmp_path / "admin.key").write_text(ADMIN_KEY + "\n")
    pool, metrics, entries = WorkerPool(), Metrics(CollectorRegistry()), []
    running = Gateway(url="", data=tmp_path, pool=pool, file=tmp_path / "settings.yaml", entries=entries)
    running.write("a", "b")
    settings = load_settings(running.file, environment={})
    logger = structlog.wrap_logger(structlog.ReturnLogger())

    async def record(entry_type: Any, /, **fields: Any) -> None:
        entries.append((str(entry_type), audit_fields(entry_type, fields)))

    workers = WorkerList(
        pool=pool,
        discovery=Discovery(pool=pool, urls=settings.pool.urls, discover=None, seconds=5.0, logger=logger),
        settings=settings,
        read_settings=lambda: load_settings(running.file, environment={}),
        record=record,
        logger=logger,
    )
    admission = AdmissionControl(
        pool=pool,
        settings=settings.admission,
        pool_settings=settings.pool,
        metrics=metrics,
        clock=time.monotonic,
    )
    for name in ("a:1", "b:1"):
        pool.update(replace(pool.snapshot(name), healthy=True, models=(DEMO,)))
    api = ApiSettings(port=0)
    listener = bind(api)
    tenants = TenantDirectory(
        (Tenant(name="operator", keys=(STORED_ADMIN_KEY,)), Tenant(name="t", keys=(STORED_KEY,)))
    )
    app = create_admin_app(
        Services(
            settings=api,
            tenants=tenants,
            identity=Authenticator(tenants),
            refused=uncounted_refusals(),
            pool=pool,
            workers=workers,
            gateway=SimpleNamespace(admission=admission),
            audit=NOTHING,
            attribution=NOTHING,
            control=NOTHING,
            overrides=NOTHING,
            metrics=metrics,
            logger=logger,
            clock=time.time,  # noqa: TID251 - a composition root
            new_request_id=lambda: "ours",
            version="test",
        )
    )
    server = make_server(app, api)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    host, port = listener.getsockname()[:2]
    running.url = f"http://{host}:{port}"
    yield running
    while not server.started:
        time.sleep(0.01)
    server.should_exit = True
    thread.join()
    listener.close()


def test_list_shows_workers_and_their_requests(gateway: Gateway):
    """By name, with their problems."""
    gateway.pool.begin("a:1")
    gateway.pool.report_unreachable("b:1")
    lines = gateway.run("list").splitlines()
    first, second = (next(line for line in lines if name in line) for name in ("a:1", "b:1"))
    assert [cell.strip() for cell in first.split("│")[1:-1]] == [
        "a:1", "demo", "1", "264", "0", "takes requests",
    ]  # fmt: skip
    assert "down" in second
    listed = json.loads(gateway.run("list", "--json"))
    assert [(worker["worker"], worker["in_flight"]) for worker in listed] == [("a:1", 1), ("b:1", 0)]


def test_worker_is_drained_and_undrained(gateway: Gateway):
    """The answer has the number of running requests; both commands are recorded."""
    gateway.pool.begin("a:1")
    said = gateway.run("drain", "a:1", "--note", "new fan")
    assert said == "a:1 receives no more requests; in flight: 1\n"
    assert not gateway.pool.snapshot("a:1").takes_requests
    assert "drained" in gateway.run("list")
    assert gateway.run("undrain", "a:1") == "a:1: takes requests\n"
    assert [entry_type for entry_type, _ in gateway.entries] == ["worker.drained"] * 2
    assert gateway.entries[0][1] == {
        "worker": "a:1", "drained": True, "actor": STORED_ADMIN_KEY.key_id, "note": "new fan",
    }  # fmt: skip


def test_the_last_worker_needs_force(gateway: Gateway):
    """The refusal names the model that would have no worker."""
    gateway.run("drain", "a:1")
    assert "last one that serves demo" in gateway.refusal("drain", "b:1")
    gateway.run("drain", "b:1", "--force")
    assert not gateway.pool.any_healthy()


def test_reload_reports_joined_and_left_workers(gateway: Gateway):
    """An invalid file is refused with the reason."""
    assert gateway.run("reload") == "no worker joined or left\n"
    gateway.write("b", "c")
    assert gateway.run("reload") == "c:1 joined\na:1 left\n"
    gateway.file.write_text("pool: {urls: [nonsense]}", encoding="utf-8")
    assert "'nonsense' is not a base URL" in gateway.refusal("reload")
    assert [seen.worker.worker_id for seen in gateway.pool.snapshots] == ["b:1", "c:1"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "workers/unknown/drain", {}, 404, "worker_not_found"),
        ("POST", "workers/unknown/undrain", {}, 404, "worker_not_found"),
        ("POST", "workers/a:1/drain", {"force": "yes"}, 400, "invalid_request"),
        ("POST", "workers/a:1/drain", {"forced": True}, 400, "invalid_request"),
        ("POST", "workers/a:1/undrain", {"note": "two\nlines"}, 400, "invalid_request"),
        ("GET", "workers/a:1/drain", None, 405, "method_not_allowed"),
    ],
)
def test_invalid_command_changes_no_worker(gateway: Gateway, method, path, body, status, code):
    """In OpenAI's error format."""
    answer = gateway.ask(method, path, body)
    assert (answer[0], answer[1]["error"]["code"]) == (status, code)
    assert gateway.entries == []
    assert all(seen.takes_requests for seen in gateway.pool.snapshots)


def test_only_an_admin_key_opens_it(gateway: Gateway):
    """A tenant gets no information about workers."""
    for method, path in (("GET", "workers"), ("POST", "workers/reload"), ("POST", "workers/a:1/drain")):
        assert gateway.ask(method, path, {} if method == "POST" else None, key=KEY)[0] == 401


def test_every_state_of_a_worker_is_shown():
    """In the admin API's words."""
    worker = {
        "healthy": False, "drained": True, "leaving": True, "avoided": True, "admission": "canary",
        "breaker": "half_open",
    }  # fmt: skip
    assert states_of(worker) == ["down", "drained", "leaving", "avoided", "canary", "breaker half_open"]
