"""The summary of a request fits the audit log, whatever happened."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from appliance.audit.entry import Entry, encode, new_entry_id
from appliance.audit.entry_types import REGISTRY, EntryType
from appliance.errors import AuditUnavailableError, Outcome, WorkerTimeoutError
from appliance.gateway.attribution import Attribution, Offender
from appliance.gateway.body import BodyTerms, read_body
from appliance.gateway.call import Call
from appliance.gateway.exchange import Exchange, summarise
from appliance.gateway.outcomes import LOGGED, attribute_drafts, count_request, end_entry
from appliance.infra.logs import ALLOWED
from appliance.infra.metrics import Metrics
from appliance.infra.metrics.cardinality import OTHER
from appliance.serving.target_only import ForbiddenBy
from appliance.serving.usage import Usage
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.tenancy import Caller, SpeculationPolicy, Tenant, make_key

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

KEPT = {
    "payload_commitment": "0" * 64,
    "payload_digest": "0" * 64,
    "payload_key": "acme.x",
    "payload_bytes": 10,
    "payload_truncated": True,
}


OPTED_OUT = replace(CALLER, tenant=replace(CALLER.tenant, speculation=SpeculationPolicy.OFF))
CALLS = {
    None: ({}, {}),
    ForbiddenBy.HEADER: ({}, {"speculation": SpeculationPolicy.OFF}),
    ForbiddenBy.PARAMETER: ({"min_p": 0.5}, {}),
    ForbiddenBy.TENANT: ({}, {"caller": OPTED_OUT}),
}
"""Members of a body and fields of a call, by what forbids to speculate on it."""
TERMS = BodyTerms(route="/v1/completions", tenant="acme", may=frozenset(), salted=True, label_key=bytes(16))


def exchange(*, forbidden_by: ForbiddenBy | None = None, **more: object) -> Exchange:
    """A request that began at second 100."""
    loop = asyncio.new_event_loop()
    intent = loop.create_future()
    loop.close()
    members, fields = CALLS[forbidden_by]
    body = json.dumps({"model": "demo", "prompt": "", **members}).encode()
    call = Call(
        request_id="r", client_request_id=None, route=TERMS.route, body=body, parsed=read_body(body, TERMS),
        client="private", **{"caller": CALLER, **fields},
    )  # fmt: skip
    return Exchange(call=call, intent=intent, **{"started": 100.0, "template": "raw-plain", **more})


def ended(*, outcome: Outcome = Outcome.COMPLETED, **more: object) -> Exchange:
    """The same, ended."""
    record = exchange(**more)
    record.end(outcome, 200)
    return record


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
    st.none() | st.sampled_from(ForbiddenBy),
    st.floats(0, 1e4),
)
def test_every_outcome_can_be_written_to_the_log(
    outcome, usage, served, first, finish, retries, seconds, forbidden_by, queued
):
    """Whatever happened, the fields fit the schema: the log refuses no request's last entry."""
    record = ended(
        outcome=outcome,
        usage=usage,
        worker=WORKER if served else None,
        finish_reason=finish,
        retries=retries,
        forbidden_by=forbidden_by,
        queued=queued,
    )
    if first is not None:
        record.gaps.observe(1, 100.0 + first)
    fields = summarise(record, 100.0 + seconds).fields
    assert fields.get("speculation_forbidden") == forbidden_by
    assert leaf_of(EntryType.REQUEST_OUTCOME, fields)


@pytest.mark.parametrize("outcome", [Outcome.GATEWAY_STOPPED, Outcome.GATEWAY_FAILED])
@pytest.mark.parametrize("content", [{}, KEPT, {"payload_lost": True}], ids=["none", "kept", "lost"])
def test_an_aborted_request_can_be_written_to_the_log(outcome: Outcome, content: dict):
    """What the gateway cannot vouch for is recorded as aborted, with its reason and what was kept."""
    entry_type, fields = end_entry(summarise(ended(outcome=outcome, content=content), 101.0))
    assert (entry_type, fields["reason"]) == (EntryType.REQUEST_ABORTED, str(outcome))
    assert fields.items() >= content.items()
    assert leaf_of(entry_type, fields)


@pytest.mark.parametrize("outcome", RECORDED)
def test_an_outcome_names_the_content_that_was_kept(outcome: Outcome):
    entry_type, fields = end_entry(summarise(ended(outcome=outcome, content=KEPT), 101.0))
    assert (entry_type, fields["outcome"]) == (EntryType.REQUEST_OUTCOME, str(outcome))
    assert fields.items() >= KEPT.items()
    assert leaf_of(entry_type, fields)


def test_an_outcome_has_the_time_in_the_queue_if_the_request_waited():
    assert "queued_ms" not in summarise(ended(), 101.0).fields
    assert summarise(ended(queued=1.5), 103.0).fields["queued_ms"] == 1500


def test_every_outcome_is_in_the_registry():
    """The audit log's closed sets and the gateway's values are the same."""
    outcomes = REGISTRY[EntryType.REQUEST_OUTCOME].fields["outcome"].values
    reasons = REGISTRY[EntryType.REQUEST_ABORTED].fields["reason"].values
    assert set(Outcome) - set(outcomes) - set(reasons) == set()
    assert set(outcomes) <= set(Outcome)


def test_every_reason_not_to_speculate_is_in_the_registry():
    """The audit log's closed set and the router's values are the same."""
    values = REGISTRY[EntryType.REQUEST_OUTCOME].fields["speculation_forbidden"].values
    assert set(values) == set(ForbiddenBy)


def test_an_outcome_has_template_and_context_length():
    """So that the log alone shows on which traffic a draft fails."""
    record = ended(usage=Usage(prompt_tokens=5000, completion_tokens=1), template="chat-00112233")
    fields = summarise(record, 101.0).fields
    assert (fields["template"], fields["context_bucket"]) == ("chat-00112233", "4k-8k")
    assert "speculation_forbidden" not in fields


def test_a_prompt_of_estimated_length_has_no_context_bucket():
    """An estimate of zero tokens is not a short prompt."""
    for usage in (None, Usage(estimated=True)):
        record = ended(usage=usage, outcome=Outcome.CLIENT_GONE)
        assert "context_bucket" not in summarise(record, 101.0).fields


def test_drafts_are_attributed_to_tenant_model_template_and_context():
    """With the counts the worker reported."""
    attribution = Attribution(label_key=bytes(16), clock=lambda: 0.0, min_drafts=1)
    usage = Usage(prompt_tokens=100, completion_tokens=10, drafts=4, draft_tokens=12, accepted_tokens=6)
    metrics = Metrics(CollectorRegistry())
    attribute_drafts(summarise(ended(usage=usage), 101.0), attribution, metrics)
    assert attribution.offenders(5) == (
        Offender(
            tenant="acme", model="demo", template="raw-plain", context="0-1k", requests=1,
            completion_tokens=10, drafts=4, acceptance_length=2.5, acceptance_rate=0.5,
            wasted_draft_tokens=6,
        ),
    )  # fmt: skip
    value = metrics.registry.get_sample_value
    counts = {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6}
    for name, count in counts.items():
        assert value(f"appliance_context_{name}_total", {"model": "demo", "context": "0-1k"}) == count
        assert value(f"appliance_template_{name}_total", {"model": "demo", "template": OTHER}) == count


@pytest.mark.parametrize(
    "usage", [None, Usage(), Usage(drafts=0), Usage(drafts=3, draft_tokens=9, estimated=True)]
)
def test_requests_without_drafts_are_not_attributed(usage: Usage | None):
    """A worker that decodes without a draft has no acceptance length to attribute."""
    attribution = Attribution(label_key=bytes(16), clock=lambda: 0.0)
    metrics = Metrics(CollectorRegistry())
    attribute_drafts(summarise(ended(usage=usage), 101.0), attribution, metrics)
    assert attribution.overall().requests == 0
    assert list(metrics.context_drafts.collect()[0].samples) == []


def test_the_first_outcome_of_a_request_is_kept():
    """What follows does not change a worker's refusal."""
    record = exchange()
    record.end(Outcome.WORKER_REFUSED, 400)
    record.end(Outcome.GATEWAY_FAILED, 500)
    record.fail(WorkerTimeoutError("x"))
    assert (record.outcome, record.status) == (Outcome.WORKER_REFUSED, 400)


def test_a_failed_audit_log_overrides_the_workers_outcome():
    """An answer that could not be recorded was not given."""
    record = exchange()
    record.end(Outcome.COMPLETED, 200)
    record.fail(AuditUnavailableError("x"))
    assert (record.outcome, record.status) == (Outcome.GATEWAY_FAILED, 503)


def test_without_usage_the_body_and_the_pieces_sent_are_the_estimate():
    """An interrupted stream cost something, its prompt too."""
    record = exchange()
    record.gaps.observe(3, 101.0)
    record.gaps.observe(4, 102.0)
    prompt = record.call.parsed.size.prompt
    assert prompt > 0
    assert record.final_usage == Usage(prompt_tokens=prompt, completion_tokens=7, estimated=True)
    assert record.charged_tokens == prompt + 7
    record.end(Outcome.CLIENT_GONE, 499)
    assert summarise(record, 103.0).first_content_seconds == 1.0


def test_gaps_between_pieces_are_counted_when_the_request_ends():
    """By model, however it ended; an answer in one piece has none."""
    metrics = Metrics(CollectorRegistry())
    for times in ((101.0, 101.25, 104.25), (101.0,), ()):
        record = ended(outcome=Outcome.CLIENT_GONE)
        for now in times:
            record.gaps.observe(1, now)
        count_request(summarise(record, 105.0), metrics)
    value = metrics.registry.get_sample_value
    assert value("appliance_inter_token_seconds_count", {"model": "demo"}) == 2
    assert value("appliance_inter_token_seconds_sum", {"model": "demo"}) == pytest.approx(3.25)
    assert value("appliance_inter_token_seconds_bucket", {"model": "demo", "le": "0.3"}) == 1


def test_a_reported_prompt_and_an_estimated_answer_make_an_estimate():
    """Anthropic's streams report the prompt at the beginning and the answer at the end."""
    record = exchange(usage=Usage(prompt_tokens=7, estimated=True))
    record.gaps.observe(3, 101.0)
    assert record.final_usage == Usage(prompt_tokens=7, completion_tokens=3, estimated=True)
    assert record.charged_tokens == 10


def test_usage_reported_within_a_stream_is_an_estimate_if_the_client_leaves():
    """It is of one answer of several: only what the worker counted for the whole request is exact."""
    running = Usage(prompt_tokens=7, completion_tokens=5)
    record = exchange(usage=running, dispatched=100.5)
    record.gaps.observe(8, 101.0)
    record.end(Outcome.CLIENT_GONE, 499)
    assert record.final_usage == Usage(prompt_tokens=7, completion_tokens=8, estimated=True)
    record.usage, record.is_counted = Usage(prompt_tokens=7, completion_tokens=40), True
    assert record.final_usage == record.usage


def test_reported_usage_overrides_the_estimate():
    record = exchange(usage=Usage(prompt_tokens=7, completion_tokens=10))
    record.gaps.observe(3, 101.0)
    assert record.final_usage == Usage(prompt_tokens=7, completion_tokens=10)


def test_overhead_is_the_time_not_spent_waiting_for_the_worker():
    """It is never below zero, whatever the clock did."""
    assert exchange(dispatched=101.0, answered=108.0).overhead_seconds(110.0) == pytest.approx(3.0)
    assert exchange(dispatched=101.0, answered=120.0).overhead_seconds(110.0) == 0.0
    queued = exchange(dispatched=103.0, answered=108.0, queued=2.0)
    assert queued.overhead_seconds(110.0) == pytest.approx(3.0)


def test_the_log_line_has_only_fields_that_are_allowed():
    """The logger drops none of them, and each is a field of the outcome."""
    record = ended(worker=WORKER, usage=Usage(drafts=4, draft_tokens=12, accepted_tokens=6))
    record.gaps.observe(1, 101.0)
    assert {*LOGGED, "trace_id"} <= ALLOWED
    assert set(LOGGED) <= set(summarise(record, 102.0).fields)


@given(USAGES, st.sampled_from(Outcome))
def test_any_request_can_be_counted(usage: Usage, outcome: Outcome):
    """Metrics fail open: no usage makes them raise."""
    metrics = Metrics(CollectorRegistry())
    count_request(summarise(ended(usage=usage, outcome=outcome), 101.0), metrics)
    value = metrics.registry.get_sample_value
    labels = {"tenant": "acme", "model": "demo"}
    assert value("appliance_tokens_total", {**labels, "kind": "prompt"}) == usage.prompt_tokens
    counted = {**labels, "outcome": str(outcome)}
    assert value("appliance_requests_total", counted) == 1
