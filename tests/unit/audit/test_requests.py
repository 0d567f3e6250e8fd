"""Requests begin once and end once, as seen by the writer."""

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.requests import OpenRequests
from appliance.errors import AuditEntryError

INTENT, OUTCOME, ABORTED = (
    EntryType.REQUEST_INTENT,
    EntryType.REQUEST_OUTCOME,
    EntryType.REQUEST_ABORTED,
)


def test_an_intent_opens_and_an_end_closes():
    """The count is what metrics show as open requests."""
    requests = OpenRequests()
    requests.accept(INTENT, "a")
    requests.accept(INTENT, "b")
    requests.accept(OUTCOME, "a")
    requests.accept(EntryType.AUDIT_READ, None)
    requests.accept(EntryType.REQUEST_DENIED, "c")
    assert len(requests) == 1
    assert requests.take_all() == ["b"]
    assert len(requests) == 0


@pytest.mark.parametrize("end", [OUTCOME, ABORTED])
def test_an_end_without_intent_is_refused(end):
    """It would make the log invalid for every verifier."""
    requests = OpenRequests(["a"])
    requests.accept(end, "a")
    with pytest.raises(AuditEntryError, match="no open intent"):
        requests.accept(end, "a")


def test_a_second_intent_is_refused():
    """Request ids are never reused."""
    requests = OpenRequests(["a"])
    with pytest.raises(AuditEntryError, match="never reused"):
        requests.accept(INTENT, "a")


def test_a_failed_intent_is_forgotten_and_a_failed_end_is_not():
    """A caller whose intent failed records no end; a failed end has still to be recorded."""
    requests = OpenRequests(["a", "b"])
    requests.forget(INTENT, "a")
    requests.forget(OUTCOME, "b")
    assert requests.take_all() == ["b"]


def test_abandoned_requests_are_those_no_caller_will_end():
    """Open in the store, but neither open here nor about to be ended."""
    requests = OpenRequests(["running"])
    assert requests.abandoned(["lost", "running", "ending"], ["ending", None]) == ["lost"]
