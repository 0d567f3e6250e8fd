"""The list describes every route completely, and the docs agree."""

import json
from pathlib import Path

import pytest

from appliance.infra.json_members import parse_members
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


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/chat/completions", {"messages": [{}, {}, {}]}, 1),
        ("/v1/chat/completions", {"messages": [{}], "n": 4}, 4),
        ("/v1/completions", {"prompt": "x"}, 1),
        ("/v1/completions", {"prompt": [1, 2, 3], "n": None}, 1),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 4, "best_of": 8}, 16),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "n": 0}, 2),
        ("/v1/responses", {"input": [{"role": "user"}, {"role": "user"}]}, 1),
        ("/v1/embeddings", {"input": ["x"] * 100, "n": 7}, 100),
        ("/v1/embeddings", {"input": []}, 1),
        ("/v2/rerank", {"query": "q", "documents": ["d"] * 30}, 30),
        ("/rerank", {"query": "q", "documents": {"content": [{}, {}]}}, 2),
        ("/v1/score", {"text_1": "q", "text_2": ["d"] * 5}, 5),
        ("/tokenize", {"prompt": "x"}, 1),
    ],
)
def test_sequences_are_inputs_times_answers(path: str, body: dict, sequences: int):
    assert ROUTES[path].sequences(parse_members(json.dumps(body))) == sequences


def test_docs_list_every_route_and_refused_member():
    page = PAGE.read_text(encoding="utf-8")
    codes = ("media_url_not_allowed", "parameter_not_allowed", "route_not_served", "too_many_sequences")
    for name in (*ROUTES, *REFUSED, *codes):
        assert name in page, name
