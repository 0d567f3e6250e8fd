"""The body of a request for a new batch."""

import pytest

from appliance.errors import InvalidRequestError
from appliance.gateway.batch.request import ENDPOINTS, parse_batch_request
from appliance.serving.dialects.routes import ROUTES

LEAST = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


def test_request_of_the_openai_client_is_parsed():
    order = parse_batch_request(
        {
            **LEAST,
            "metadata": {"ward": "7"},
            "output_expires_after": {"anchor": "created_at", "seconds": 7200},
        }
    )
    assert (order.input_file_id, order.endpoint) == ("file-1", "/v1/chat/completions")
    assert (order.completion_window, order.window_seconds) == ("24h", 86_400)
    assert (order.metadata, order.output_seconds) == ({"ward": "7"}, 7200)


def test_absent_members_have_defaults():
    """Metadata and expiry are optional; null means absent."""
    order = parse_batch_request({**LEAST, "metadata": None, "output_expires_after": None})
    assert (order.metadata, order.output_seconds) == ({}, None)


@pytest.mark.parametrize(("window", "seconds"), [("1h", 3600), ("24h", 86_400), ("14d", 1_209_600)])
def test_a_window_may_be_hours_or_days(window, seconds):
    """A weekend is longer than OpenAI's only value, 24 hours."""
    assert parse_batch_request({**LEAST, "completion_window": window}).window_seconds == seconds


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": 7}, "input_file_id"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"endpoint": ["/v1/completions"]}, "endpoint"),
        ({"completion_window": None}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"completion_window": "24"}, "completion_window"),
        ({"metadata": ["x"]}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": 7200}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 7200}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "output_expires_after"),
        ({"priority": 1}, "priority"),
    ],
)
def test_invalid_member_is_refused_by_name(change, param):
    with pytest.raises(InvalidRequestError) as caught:
        parse_batch_request({**LEAST, **change})
    assert caught.value.param == param


def test_every_endpoint_is_accepted():
    """Those that the error message lists; each is a route with a body."""
    assert set(ENDPOINTS) <= set(ROUTES)
    assert {parse_batch_request({**LEAST, "endpoint": endpoint}).endpoint for endpoint in ENDPOINTS} == set(
        ENDPOINTS
    )
