"""It tells of every operation, and of nothing else."""

import json

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from appliance.api.document import OPEN, openapi_document
from appliance.api.operations import OPERATIONS
from appliance.app.http_app import ROUTERS
from appliance.serving.dialects.routes import ROUTES

WITHOUT_BODY = {
    ("post", "/v1/batches/{batch_id}/cancel"),
    ("post", "/admin/v1/workers/reload"),
    ("post", "/admin/v1/egress/check"),
}
"""Operations that change something and read nothing."""


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI(openapi_url=None)
    for router in ROUTERS:
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


def test_every_route_is_described_and_nothing_else(app, document):
    """A new route appears by itself."""
    reachable = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    assert set(operations(document)) == reachable | {("post", path) for path in ROUTES}


def test_what_is_said_of_operations_is_said_of_some_that_exist(document):
    """A route that goes takes its description along."""
    assert set(OPERATIONS) <= set(operations(document))


def test_every_body_that_is_read_is_described(document):
    """By a schema that is one."""
    for (method, path), operation in operations(document).items():
        body = operation.get("requestBody")
        assert (body is None) == (method in {"get", "delete"} or (method, path) in WITHOUT_BODY), path
        for content in (body or {"content": {}})["content"].values():
            Draft202012Validator.check_schema(content["schema"])


def test_keys_and_errors_are_told_of(document):
    """Everything but health and metrics asks for a key, and errors have their family's shape."""
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


def test_it_is_the_same_each_time(app, document):
    """And plain JSON."""
    assert json.loads(json.dumps(openapi_document(app.routes, "1.2.3"))) == document
    assert document["info"]["version"] == "1.2.3"
