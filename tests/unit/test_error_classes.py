"""Promises of the error classes, their table, and their HTTP responses."""

import inspect
import json
from http import HTTPStatus

import pytest

from appliance import errors
from appliance.api.error_responses import (
    RETRY_SECONDS,
    UNEXPECTED_MESSAGE,
    WRONG_METHOD,
    error_response,
    render,
)
from appliance.errors import ERROR_TABLE, UNEXPECTED, spec_of

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ApplianceError) and kind is not errors.ApplianceError
]
NEVER_SHOWN = {
    errors.ConfigurationError,  # stops a start
    errors.WorkerStartError,  # stops a start
    errors.CostUnavailableError,  # stops a command
    errors.AuditError,  # a base
    errors.AuditEntryError,  # a defect
    errors.AuditRollbackError,  # stops a start
    errors.AuditVerificationError,  # stops a start or a command
    errors.MalformedCheckpointError,  # stops a start or a command
    errors.AuditKeyError,  # stops a start
    errors.ForwardError,  # no request waits for the SIEM
    errors.BundleError,  # a base
    errors.DraftError,  # a base
    errors.BundleRefusedError,  # stops a command
    errors.BundleRollbackError,  # stops a command
    errors.BundleIncompleteError,  # stops a command
    errors.BundleStorageError,  # stops a command
}
"""Errors that no request can meet.  A class that is not listed needs an entry in the table."""


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_table_or_listed_as_never_shown(kind: type[errors.ApplianceError]):
    """A new error class needs a decision about its status."""
    assert (spec_of(kind("x")) is UNEXPECTED) == (kind in NEVER_SHOWN)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_documented(kind: type[errors.ApplianceError]):
    """Each class states when it is raised."""
    assert kind.__doc__
    assert kind.__doc__.strip().endswith(".")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_response_has_all_four_members(kind: type[errors.ApplianceError]):
    """Clients parse message, type, param and code; a missing one breaks some of them."""
    response = render(kind("what went wrong"))
    body = json.loads(response.body)
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["code"], str)
    assert body["error"]["param"] is None
    assert response.media_type == "application/json"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.InvalidRequestError, 400, "invalid_request"),
        (errors.InvalidApiKeyError, 401, "invalid_api_key"),
        (errors.ModelNotFoundError, 404, "model_not_found"),
        (errors.RouteNotFoundError, 404, "route_not_found"),
        (errors.WorkerNotFoundError, 404, "worker_not_found"),
        (errors.ControlRefusedError, 409, "control_refused"),
        (errors.BodyTooLargeError, 413, "body_too_large"),
        (errors.LimitReachedError, 429, "rate_limit_exceeded"),
        (errors.RequestOverLimitError, 429, "request_over_limit"),
        (errors.BudgetUsedUpError, 429, "insufficient_quota"),
        (errors.LimitsUnavailableError, 503, "limits_unavailable"),
        (errors.WorkerFailedError, 502, "worker_failed"),
        (errors.NoWorkerAvailableError, 503, "no_worker_available"),
        (errors.ControlUnavailableError, 503, "control_unavailable"),
        (errors.DraftNotFoundError, 404, "draft_not_found"),
        (errors.DraftRefusedError, 409, "draft_refused"),
        (errors.DraftStorageError, 503, "draft_storage"),
        (errors.AuditUnavailableError, 503, "audit_unavailable"),
        (errors.AuditForkError, 503, "audit_unavailable"),
        (errors.WorkerTimeoutError, 504, "worker_timeout"),
    ],
)
def test_each_error_has_its_status_and_code(kind: type[errors.ApplianceError], status: int, code: str):
    """Both are part of the interface, so changing one means changing this table."""
    response = render(kind("x"))
    assert (response.status_code, json.loads(response.body)["error"]["code"]) == (status, code)


@pytest.mark.parametrize("kind", ERROR_TABLE, ids=lambda kind: kind.__name__)
def test_an_error_response_says_whether_to_retry(kind: type[errors.ApplianceError]):
    """`x-should-retry` is always there; with true comes a `Retry-After` within two minutes."""
    response = render(kind("x"))
    if ERROR_TABLE[kind].retryable:
        assert response.headers["x-should-retry"] == "true"
        assert 0 < int(response.headers["retry-after"]) == RETRY_SECONDS <= 120
        assert response.status_code in {408, 429, 502, 503}
    else:
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (61.0, "61"), (4 * 3600.0, "120")])
def test_retry_after_of_a_limit_is_at_most_two_minutes(seconds: float, header: str):
    """OpenAI's clients ignore a longer one; the message has the whole time."""
    for kind in (errors.LimitReachedError, errors.BudgetUsedUpError):
        response = render(kind("x", limit="tokens_per_day", retry_seconds=seconds))
        assert response.headers["retry-after"] == header


def test_an_invalid_request_names_the_parameter_and_its_own_code():
    """`param` and `code` come from the code that raised it."""
    error = json.loads(render(errors.InvalidRequestError("x", param="model", code="missing_model")).body)[
        "error"
    ]
    assert (error["param"], error["code"]) == ("model", "missing_model")


def test_a_401_has_www_authenticate():
    """As RFC 9110 demands."""
    assert render(errors.InvalidApiKeyError("x")).headers["www-authenticate"] == "Bearer"


def test_a_defect_does_not_show_its_message():
    """The message of an error without an entry is only for the log."""
    response = render(errors.AuditEntryError("request.intent: unknown field 'prompt'"))
    assert response.status_code == 500
    assert json.loads(response.body)["error"]["message"] == UNEXPECTED_MESSAGE


@pytest.mark.parametrize("message", ["naïve 模型 😀", "a\nb", '"', "the model `\ud800` does not exist"])
def test_any_message_can_be_sent(message: str):
    """A message may quote the client's text, half a surrogate pair included."""
    body = json.loads(error_response(WRONG_METHOD, message).body)
    assert body["error"]["message"].encode("utf-8", "replace") == message.encode("utf-8", "replace")


def test_every_status_in_the_table_is_an_error():
    for spec in (*ERROR_TABLE.values(), UNEXPECTED, WRONG_METHOD):
        assert spec.status >= HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (errors.AtCapacityError, "not_admitted"),
        (errors.NoWorkerAvailableError, "worker_failed"),
        (errors.WorkerUnreachableError, "worker_failed"),
        (errors.WorkerFailedError, "worker_failed"),
        (errors.WorkerTimeoutError, "timed_out"),
        (errors.AuditUnavailableError, "gateway_failed"),
        (errors.AuditForkError, "gateway_failed"),
    ],
)
def test_each_error_of_a_running_request_has_its_outcome(kind: type[errors.ApplianceError], outcome: str):
    """The audit log, the metrics and the operator log record it."""
    assert spec_of(kind("x")).outcome == outcome
