"""The OpenAPI document describes every operation and no other."""

import json

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from appliance.app.http_app import ADMIN_ROUTERS, API_ROUTERS
from appliance.serving.dialects.routes import ROUTES
from docs.openapi import OPEN, OPERATIONS, openapi_document

WITHOUT_BODY = {
    ("post", "/v1/batches/{batch_id}/cancel"),
    ("post", "/admin/v1/workers/reload"),
    ("post", "/admin/v1/egress/check"),
    ("post", "/admin/v1/audit/approvals/{approval}"),
}
"""Operations that change state and read no body."""


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI(openapi_url=None)
    for router in (*API_ROUTERS, *ADMIN_ROUTERS):
        app.include_router(router)
    return app


@pytest.fixture
def document(app) -> dict:
    return openapi_document(app.routes, "1.2.3")


def operations(document: dict) -> dict[tuple[str, str], dict]:
    return {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_is_described_and_no_other(app, document):
    reachable = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    assert set(operations(document)) == reachable | {("post", path) for path in ROUTES}


def test_every_described_operation_exists(document):
    assert set(OPERATIONS) <= set(operations(document))


def test_every_request_body_has_a_valid_schema(document):
    for (method, path), operation in operations(document).items():
        body = operation.get("requestBody")
        assert (body is None) == (method in {"get", "delete"} or (method, path) in WITHOUT_BODY), path
        for content in (body or {"content": {}})["content"].values():
            Draft202012Validator.check_schema(content["schema"])


def test_operations_name_their_key_and_the_shape_of_their_errors(document):
    """Only health and metrics need no key; errors have the shape of the route's family."""
    schemes = document["components"]["securitySchemes"]
    for (_, path), operation in operations(document).items():
        if path in OPEN:
            assert "security" not in operation
            continue
        (wanted,) = operation["security"][0]
        assert wanted in schemes
        assert (wanted == "admin") == path.startswith("/admin/")
        schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"]
        assert schema.endswith("/AnthropicError" if path.startswith("/v1/messages") else "/Error")
        assert schema.rpartition("/")[2] in document["components"]["schemas"]


def test_every_operation_is_in_a_group(document):
    """No route of administrators among those of tenants, and no group without a route."""
    groups = {}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            (tag,) = operation["tags"]
            groups.setdefault(tag, set()).add(path)
    assert list(groups.keys() - {tag["name"] for tag in document["tags"]}) == []
    assert len(groups) == len(document["tags"])
    assert not [path for path in groups["Inference"] if path.startswith("/admin/")]


def test_the_document_is_deterministic_json(app, document):
    assert json.loads(json.dumps(openapi_document(app.routes, "1.2.3"))) == document
    assert document["info"]["version"] == "1.2.3"
