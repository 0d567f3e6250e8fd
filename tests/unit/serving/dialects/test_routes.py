"""The list describes every route completely, and the docs agree."""

from pathlib import Path

import pytest

from appliance.serving.dialects.policy import REFUSED
from appliance.serving.dialects.routes import ROUTES, dialect_at
from appliance.serving.error_text import ErrorText

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "openai-api.md"
EVERY = pytest.mark.parametrize("path", ROUTES)


@EVERY
def test_every_message_carrier_is_checked(path: str):
    """Messages may contain images."""
    route = ROUTES[path]
    for name in ("messages", "input", "query", "documents"):
        assert name not in {member for names in route.needs for member in names} or name in route.carriers


@EVERY
def test_gateway_error_has_the_routes_shape(path: str):
    """Before and after the route is known."""
    error = ErrorText(status=404, kind="invalid_request_error", message="m")
    assert ROUTES[path].dialect.error_body(error) == dialect_at(path).error_body(error)


@EVERY
def test_only_generating_routes_stream(path: str):
    assert ROUTES[path].dialect.streams == ROUTES[path].dialect.generates


def test_docs_list_every_route_and_refused_member():
    page = PAGE.read_text(encoding="utf-8")
    for name in (*ROUTES, *REFUSED, "media_url_not_allowed", "parameter_not_allowed", "route_not_served"):
        assert name in page, name
