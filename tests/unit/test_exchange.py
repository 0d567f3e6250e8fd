"""Promises of `appliance.exchange`: the record of a request fits the audit log, whatever happened."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from appliance.audit.entry import Entry, encode, new_entry_id
from appliance.audit.registry import REGISTRY, EntryType
from appliance.exchange import Exchange, Outcome
from appliance.logs import ALLOWED
from appliance.metrics import Metrics
from appliance.serving.usage import Usage
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.tenancy import Caller, Tenant, make_key

_, KEY = make_key(random.Random(5).randbytes(37))
CALLER = Caller(tenant=Tenant(name="acme"), key=KEY)
WORKER = WorkerSnapshot(
    worker=Worker(worker_id=WorkerId("w1"), url="http://127.0.0.1:1", weights="sha256:aa", draft="sha256:bb"),
    engine="vllm 0.32.0",
)
COUNTS = st.none() | st.integers(0, 10**9)
USAGES = st.builds(
    Usage,
    prompt_tokens=st.integers(0, 10**9),
    completion_tokens=st.integers(0, 10**9),
    estimated=st.booleans(),
    drafts=COUNTS,
    draft_tokens=COUNTS,
    accepted_tokens=COUNTS,
)
RECORDED = [
    outcome for outcome in Outcome if outcome not in {Outcome.GATEWAY_STOPPED, Outcome.GATEWAY_FAILED}
]


def exchange(**more: object) -> Exchange:
    """Return a request that began at second 100."""
    loop = asyncio.new_event_loop()
    intent = loop.create_future()
    loop.close()
    fields = {"request_id": "r", "route": "/v1/completions", "model": "demo", "started": 100.0, **more}
    return Exchange(caller=CALLER, intent=intent, **fields)


def leaf_of(entry_type: EntryType, fields: dict) -> bytes:
    """Encode an entry as the log does."""
    return encode(
        Entry(
            log="x/y",
            id=new_entry_id(1, bytes(10)),
            type=entry_type,
            time="2026-11-20T23:59:59.999Z",
            fields=fields,
        )
    )


@given(
    st.sampled_from(RECORDED),
    st.none() | USAGES,
    st.booleans(),
    st.none() | st.floats(0, 1e6),
    st.none() | st.sampled_from(["stop", "length", "tool_calls"]),
    st.integers(0, 5),
    st.floats(0, 1e6),
)
def test_every_outcome_can_be_written_to_the_log(outcome, usage, served, first, finish, retries, seconds):
    """Whatever happened, the fields fit the schema: no request can end in an entry that is refused."""
    record = exchange(usage=usage, worker=WORKER if served else None, finish_reason=finish, retries=retries)
    record.first_content = None if first is None else 100.0 + first
    record.ends(outcome, status=200)
    assert leaf_of(EntryType.REQUEST_OUTCOME, record.fields(100.0 + seconds))


@pytest.mark.parametrize("outcome", [Outcome.GATEWAY_STOPPED, Outcome.GATEWAY_FAILED])
def test_an_end_without_outcome_can_be_written_to_the_log(outcome: Outcome):
    """What the gateway cannot vouch for is recorded as aborted, with its reason."""
    assert leaf_of(EntryType.REQUEST_ABORTED, {"request_id": "r", "reason": str(outcome)})


def test_every_outcome_is_in_the_registry():
    """The audit log's closed sets and the gateway's words are the same."""
    outcomes = REGISTRY[EntryType.REQUEST_OUTCOME].fields["outcome"].values
    reasons = REGISTRY[EntryType.REQUEST_ABORTED].fields["reason"].values
    assert set(Outcome) - set(outcomes) - set(reasons) == set()
    assert set(outcomes) <= set(Outcome)


def test_the_first_word_on_how_a_request_ended_counts():
    """A worker's refusal is not turned into something else by what follows it."""
    record = exchange()
    record.ends(Outcome.WORKER_REFUSED, status=400)
    record.ends(Outcome.GATEWAY_FAILED, status=500)
    assert (record.outcome, record.status) == (Outcome.WORKER_REFUSED, 400)


def test_a_broken_promise_of_the_gateway_outweighs_what_the_worker_did():
    """An answer that could not be recorded was not given."""
    record = exchange()
    record.ends(Outcome.COMPLETED, status=200)
    record.fails(status=503)
    assert (record.outcome, record.status) == (Outcome.GATEWAY_FAILED, 503)


def test_without_usage_frames_are_counted_as_an_estimate():
    """An interrupted stream cost something."""
    record = exchange()
    record.saw_frames(3, 101.0)
    record.saw_frames(4, 102.0)
    assert record.final_usage == Usage(completion_tokens=7, estimated=True)
    assert record.first_content == 101.0


def test_what_the_worker_says_is_better_than_an_estimate():
    """Usage wins over frames."""
    record = exchange(usage=Usage(prompt_tokens=7, completion_tokens=10))
    record.saw_frames(3, 101.0)
    assert record.final_usage == Usage(prompt_tokens=7, completion_tokens=10)


def test_overhead_is_the_time_not_spent_waiting_for_the_worker():
    """And never below zero, whatever the clock did."""
    assert exchange(dispatched=101.0, answered=108.0).overhead_seconds(110.0) == pytest.approx(3.0)
    assert exchange(dispatched=101.0, answered=120.0).overhead_seconds(110.0) == 0.0


def test_the_log_line_has_only_fields_that_are_allowed():
    """Nothing is dropped by the log's list, and nothing is in it that should be."""
    record = exchange(worker=WORKER, usage=Usage(drafts=4, draft_tokens=12, accepted_tokens=6))
    record.saw_frames(1, 101.0)
    record.ends(Outcome.COMPLETED, status=200)
    assert set(record.log_fields(102.0)) <= ALLOWED


@given(USAGES, st.sampled_from(Outcome))
def test_any_request_can_be_counted(usage: Usage, outcome: Outcome):
    """Metrics fail open: no usage makes them raise."""
    record, metrics = exchange(usage=usage), Metrics(CollectorRegistry())
    record.ends(outcome, status=200)
    record.count(metrics, 101.0)
    value = metrics.registry.get_sample_value
    labels = {"tenant": "acme", "model": "demo"}
    assert value("appliance_tokens_total", {**labels, "kind": "prompt"}) == usage.prompt_tokens
    counted = {**labels, "route": "/v1/completions", "outcome": str(outcome)}
    assert value("appliance_requests_total", counted) == 1
