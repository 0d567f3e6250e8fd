"""The list of routes, and the answer to a defect."""

import asyncio
import dataclasses
import io
import json
import sys
from contextlib import suppress
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from appliance.api.request_middleware import is_plain
from appliance.api.services import Services
from appliance.app.http_app import create_admin_app, create_app
from appliance.errors import AuditEntryError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings, LogSettings
from appliance.serving.pool import WorkerPool
from appliance.tenancy import TenantDirectory
from appliance.tenancy.identity.authenticator import Authenticator
from tests.fakes import uncounted_refusals

ROUTES = {  # of the API listener
    ("/healthz", "GET"),
    ("/readyz", "GET"),
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/embeddings", "POST"),
    ("/rerank", "POST"),
    ("/v1/rerank", "POST"),
    ("/v2/rerank", "POST"),
    ("/score", "POST"),
    ("/v1/score", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name:path}", "GET"),
    ("/v1/files", "POST"),
    ("/v1/files", "GET"),
    ("/v1/files/{file_id}", "GET"),
    ("/v1/files/{file_id}", "DELETE"),
    ("/v1/files/{file_id}/content", "GET"),
    ("/v1/batches", "POST"),
    ("/v1/batches", "GET"),
    ("/v1/batches/{batch_id}", "GET"),
    ("/v1/batches/{batch_id}/cancel", "POST"),
    ("/v1/appliance/keys", "GET"),
    ("/v1/appliance/keys", "POST"),
    ("/v1/appliance/keys/{key_id}", "DELETE"),
    ("/v1/appliance/keys/{key_id}/rotate", "POST"),
}
ADMIN_ROUTES = {  # of the admin listener alone
    ("/metrics", "GET"),
    ("/admin/v1/status", "GET"),
    ("/admin/v1/audit/reads", "POST"),
    ("/admin/v1/audit/erasures", "POST"),
    ("/admin/v1/audit/prunes", "POST"),
    ("/admin/v1/audit/approvals", "GET"),
    ("/admin/v1/audit/approvals/{approval}", "POST"),
    ("/admin/v1/audit/approvals/{approval}", "DELETE"),
    ("/admin/v1/audit/holds", "GET"),
    ("/admin/v1/audit/holds", "POST"),
    ("/admin/v1/audit/holds/releases", "POST"),
    ("/admin/v1/tenants", "GET"),
    ("/admin/v1/tenants", "POST"),
    ("/admin/v1/tenants/{name}", "GET"),
    ("/admin/v1/tenants/{name}", "PATCH"),
    ("/admin/v1/tenants/{name}", "DELETE"),
    ("/admin/v1/tenants/{name}/keys", "POST"),
    ("/admin/v1/keys/{key_id}/rotate", "POST"),
    ("/admin/v1/keys/{key_id}/revoke", "POST"),
    ("/admin/v1/speculation", "GET"),
    ("/admin/v1/speculation/events", "GET"),
    ("/admin/v1/speculation/override", "PUT"),
    ("/admin/v1/workers", "GET"),
    ("/admin/v1/workers/reload", "POST"),
    ("/admin/v1/workers/{worker}/drain", "POST"),
    ("/admin/v1/workers/{worker}/undrain", "POST"),
    ("/admin/v1/workers/{worker}/recycle", "POST"),
    ("/admin/v1/drafts", "GET"),
    ("/admin/v1/drafts/promotions", "POST"),
    ("/admin/v1/drafts/rollbacks", "POST"),
    ("/admin/v1/egress", "GET"),
    ("/admin/v1/egress/check", "POST"),
    # FastAPI's own: a description of the routes above, without a page that loads scripts.
}
"""All routes; a new one is added here on purpose."""


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


@pytest.fixture
def services(log: io.StringIO, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> Services:
    """Of an application without anything behind it."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        logger = configure_logs(LogSettings(format="json"), terminal=False)
    nothing: Any = None
    return Services(
        settings=ApiSettings(),
        tenants=TenantDirectory(()),
        identity=Authenticator(TenantDirectory(())),
        refused=uncounted_refusals(),
        pool=WorkerPool(),
        workers=nothing,
        gateway=nothing,
        audit=nothing,
        attribution=nothing,
        control=nothing,
        overrides=nothing,
        metrics=metrics,
        logger=logger,
        clock=nothing,
        new_request_id=lambda: "ours",
        version="test",
    )


@pytest.fixture
def app(services: Services) -> FastAPI:
    """The application of the API listener."""
    return create_app(services)


@pytest.fixture
def admin_app(services: Services) -> FastAPI:
    return create_admin_app(services)


async def get(
    app: FastAPI, path: str, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    sent: list[dict[str, Any]] = []

    received = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        """The request; then the client stays."""
        for message in received:
            return message
        return await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "client": ("127.0.0.1", 1),
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "server": ("127.0.0.1", 8080),
    }  # fmt: skip
    with suppress(ZeroDivisionError):  # Starlette hands a crash on to the server once it has answered
        await app(scope, receive, send)
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], found, b"".join(message.get("body", b"") for message in rest)


def test_the_frameworks_documentation_pages_are_off(app: FastAPI):
    """They would load scripts from a content delivery network."""
    assert app.openapi_url is None


@pytest.mark.parametrize("create", [create_app, create_admin_app])
async def test_documentation_is_served_under_its_policy_if_it_was_built(create, services, tmp_path):
    (tmp_path / "index.html").write_text("<p>Read me</p>", encoding="utf-8")
    (tmp_path / "content-security-policy.txt").write_text("default-src 'none'\n", encoding="utf-8")
    app = create(dataclasses.replace(services, documentation=tmp_path))
    status, headers, body = await get(app, "/docs/index.html")
    assert (status, body) == (200, b"<p>Read me</p>")
    assert headers["content-security-policy"] == "default-src 'none'"
    assert (await get(app, "/docs"))[1]["location"] == "/docs/index.html"
    status, _, body = await get(app, "/docs/nothing.html")
    assert (status, json.loads(body)["error"]["code"]) == (404, "route_not_found")
    assert (await get(create(services), "/docs/index.html"))[0] == 404


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    return {(route.path, method) for route in app.routes for method in route.methods}


def test_only_the_listed_routes_exist(app: FastAPI, admin_app: FastAPI):
    """The admin listener also answers those of the API, for the console's chat page and the drill."""
    assert routes_of(app) == ROUTES
    assert routes_of(admin_app) == ROUTES | ADMIN_ROUTES


@pytest.mark.parametrize("path", [*sorted({path for path, _ in ADMIN_ROUTES}), "/console", "/console/login"])
async def test_tenants_reach_no_route_of_administrators(app: FastAPI, path: str):
    """The API listener answers as for any path that does not exist, also without a key."""
    status, _, body = await get(app, path)
    assert (status, json.loads(body)["error"]["code"]) == (404, "route_not_found")


@pytest.mark.parametrize(
    "path",
    ["/%61dmin/v1/status", "/admin%2fv1/status", "/admin%2Fv1%2Fstatus", "/admin%5cv1", "/x%5Cy", "/x\\y",
     "//admin/v1", "/v1//models", "/v1/../admin/v1", "/v1/./models", "/v1/%2e%2e/admin", "/v1/.", "/v1/%2E",
     "/%2e", "/v1/models/%7Ex", "/v1/models/a%5Fb", "/v1/models/a%2Db", "/v1/models/%30", "/v1/models/%7a",
     "/v1/models/..%2Fadmin", "/v1/models/a%2F%2Fb", "/v1/models%2Fa", "/v1/files%2Fa", "/v1/models/%",
     "/v1/models/%4", "/v1/models/%zz", "/v1/models/%00", "/v1/models/%0a", "/v1/models/%7F", "*", "admin"],
)  # fmt: skip
async def test_a_path_that_a_proxy_may_read_differently_is_refused(app, admin_app, metrics, path: str):
    """On both listeners, before anybody is authenticated."""
    for number, each in enumerate((app, admin_app), start=1):
        status, headers, body = await get(each, path)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_path")
        assert headers["x-request-id"] == "ours"
        counted = metrics.registry.get_sample_value("appliance_errors_total", {"code": "invalid_request"})
        assert counted == number


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/models/", "/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/org%2fname:7b",
     "/v1/models/a%3A7b", "/v1/models/a:7b", "/v1/models/a%20b", "/v1/models/%E5%90%8D", "/v1/models/a..b",
     "/v1/models/a%25b", "/v1/models/.a", "/v1/models/a%2Bb+c", "/v1/files/file-0123_x~.jsonl",
     "/admin/v1/workers/10.0.0.5%3A8000/drain"],
)  # fmt: skip
def test_a_path_with_escapes_that_it_needs_is_plain(path: str):
    """OpenAI's clients escape the slash in a model's name."""
    assert is_plain(path.encode())


def test_requests_are_never_redirected(app: FastAPI):
    """A path with an extra slash does not exist."""
    assert app.router.redirect_slashes is False


@pytest.mark.parametrize("error", [ZeroDivisionError("a detail"), AuditEntryError("a detail")])
async def test_a_defect_is_answered_logged_and_counted(app: FastAPI, log, metrics: Metrics, error: Exception):
    """The client gets an id and no detail; the log has the traceback under that id."""

    @app.get("/crash")
    async def crash(_request: Request) -> None:
        raise error

    status, headers, body = await get(app, "/crash")
    content = json.loads(body)["error"]
    assert (status, content["type"], content["code"]) == (500, "server_error", "internal_error")
    assert "a detail" not in content["message"]
    assert headers["x-request-id"] == "ours"
    (line,) = map(json.loads, log.getvalue().splitlines())
    assert (line["event"], line["request_id"], line["error"]) == (
        "request_crashed",
        "ours",
        type(error).__name__,
    )
    assert "in crash" in line["exception"]
    assert ("a detail" in line["exception"]) is isinstance(error, AuditEntryError)
    assert metrics.registry.get_sample_value("appliance_errors_total", {"code": "internal_error"}) == 1


async def test_a_crash_echoes_the_clients_own_id(app: FastAPI, log):
    """The log has both ids."""

    @app.get("/crash")
    async def crash(_request: Request) -> None:
        raise ZeroDivisionError

    _, headers, _ = await get(app, "/crash", {"X-Request-Id": "theirs"})
    assert headers["x-request-id"] == "theirs"
    line = json.loads(log.getvalue())
    assert (line["request_id"], line["client_request_id"]) == ("ours", "theirs")


async def test_every_answer_has_an_id(app: FastAPI):
    """Also the answers of no route."""
    for path in ("/healthz", "/nowhere", "/v1/models"):
        _, headers, _ = await get(app, path)
        assert headers["x-request-id"] == "ours"


async def test_refusals_are_counted_by_their_code(app: FastAPI, metrics: Metrics):
    """So that an alert distinguishes wrong keys from a broken worker."""
    await get(app, "/v1/models")
    assert metrics.registry.get_sample_value("appliance_errors_total", {"code": "invalid_api_key"}) == 1


async def test_a_wrong_method_gets_the_allowed_ones(app: FastAPI, admin_app: FastAPI):
    """As RFC 9110 demands of a 405."""
    status, headers, _ = await get(app, "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    status, headers, _ = await get(admin_app, "/admin/v1/speculation/override")
    assert (status, headers["allow"]) == (405, "PUT")
    status, headers, _ = await get(admin_app, "/admin/v1/audit/erasures")
    assert (status, headers["allow"]) == (405, "POST")
