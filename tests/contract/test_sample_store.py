"""One suite for samples next to stored content on SQLite and on a real PostgreSQL, erasures included."""

import random
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from appliance.audit.content.payloads import Selection
from appliance.audit.content.samples import SampleOutcome, SqlSampleStore
from appliance.audit.content.sealing import LOGGED, Part
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.store import Head, Leaf, SqlAuditStore
from tests.contract.payloads import START_MS, payload

ROUNDS = 20


@pytest.fixture
def samples(url):
    SqlAuditStore(url).close()  # makes the tables of a SQLite file
    with closing(SqlSampleStore(url)) as store:
        yield store


def keep(store, number, **more):
    """Body and answer of one request; its id."""
    parts = [payload(number, part=part, **more) for part in LOGGED]
    store.add(parts)
    return parts[0].request_id


def test_sample_is_stored_only_with_its_content(samples):
    """Of that tenant, with body and answer, under the body's key."""
    request = keep(samples, 0)
    sample = payload(0, part=Part.SAMPLE)
    assert samples.add_sample(replace(sample, tenant="other")) is SampleOutcome.GONE
    assert samples.add_sample(replace(sample, key_id="acme.2")) is SampleOutcome.MOVED
    assert samples.add_sample(payload(1, part=Part.SAMPLE)) is SampleOutcome.GONE
    assert samples.get(request, Part.SAMPLE) is None
    assert samples.add_sample(sample) is SampleOutcome.KEPT
    assert samples.get(request, Part.SAMPLE) == sample


def test_a_second_sample_needs_the_first_to_be_named(samples):
    """So of two that come at once, one stays."""
    request = keep(samples, 0)
    first, second, third = (payload(0, part=Part.SAMPLE) for _ in range(3))
    assert samples.add_sample(first) is SampleOutcome.KEPT
    assert samples.add_sample(second) is SampleOutcome.THERE
    assert samples.add_sample(second, instead_of=third) is SampleOutcome.THERE
    assert samples.get(request, Part.SAMPLE) == first
    assert samples.add_sample(second, instead_of=first) is SampleOutcome.KEPT
    samples.remove_sample(first)
    assert samples.get(request, Part.SAMPLE) == second
    samples.remove_sample(second)
    assert samples.get(request, Part.SAMPLE) is None


def test_samples_count_for_keys_and_for_nothing_else(samples):
    """What is found, shown and exported is content; deleting and rewrapping cover all of it."""
    request = keep(samples, 0)
    samples.add_sample(payload(0, part=Part.SAMPLE))
    samples.rewrap([(request, "sample", bytes(40))], "acme.7")
    selection = Selection(tenant="acme", requests=(request,))
    found = samples.find(selection)
    assert (found.payloads, found.requests, found.key_ids) == (2, (request,), ("acme.1", "acme.7"))
    assert [each.part for each in samples.all()] == list(LOGGED)
    assert samples.wrapped_with("acme.7") == [(request, "sample", bytes(40))]
    assert samples.delete(selection) == 3
    assert samples.get(request, Part.SAMPLE) is None


def test_pruning_takes_samples_along(samples):
    """By the time their requests came, not by when they were made."""
    old, new = keep(samples, 0), keep(samples, 10)
    for number in (0, 10):
        samples.add_sample(payload(number, part=Part.SAMPLE))
    assert samples.delete(Selection(tenant="acme", before_ms=START_MS + 5000)) == 3
    assert samples.get(old, Part.SAMPLE) is None
    assert samples.get(new, Part.SAMPLE) is not None


def test_rewrapping_locks_a_body_before_its_sample(samples):
    """The order in which `add_sample` locks the two, so that they cannot deadlock."""
    for number in (1, 0):
        keep(samples, number)
        samples.add_sample(payload(number, part=Part.SAMPLE))
    rows = [(request, part) for request, part, _ in samples.wrapped_with("acme.1")]
    assert rows == sorted(rows)
    assert [part for _, part in rows] == ["request", "response", "sample"] * 2


@pytest.mark.parametrize("named", [True, False])
def test_no_sample_survives_an_erasure_that_came_at_the_same_moment(samples, url, named):
    """In either order the sample is not stored, or erased with its request."""
    chance = random.Random(5)
    with closing(SqlSampleStore(url)) as eraser:
        for number in range(ROUNDS):
            request = keep(samples, number)
            sample, outcomes = payload(number, part=Part.SAMPLE), []
            barrier, delay = threading.Barrier(2), chance.uniform(0, 0.004)

            def harvest(sample=sample, outcomes=outcomes, barrier=barrier, late=delay):
                barrier.wait()
                time.sleep(late)
                outcomes.append(samples.add_sample(sample))

            thread = threading.Thread(target=harvest)
            thread.start()
            barrier.wait()
            time.sleep(chance.uniform(0, 0.004))
            before_ms = START_MS + 1000 * number + 1
            requests = (request,) if named else ()
            eraser.delete(Selection(tenant="acme", requests=requests, before_ms=before_ms))
            thread.join()
            assert outcomes[0] in {SampleOutcome.KEPT, SampleOutcome.GONE}
            assert [samples.get(request, part) for part in Part] == [None] * 3


def test_an_erasure_waits_for_a_sample_that_is_just_being_kept(postgres_url):
    """On PostgreSQL a statement does not see what came while it waited; the erasure repeats its query."""
    SqlAuditStore(postgres_url).close()
    with closing(SqlSampleStore(postgres_url)) as samples, closing(SqlSampleStore(postgres_url)) as eraser:
        request = keep(samples, 0)
        sample = payload(0, part=Part.SAMPLE)
        erased = threading.Thread(target=eraser.delete, args=(Selection(tenant="acme", requests=(request,)),))
        with samples._transaction("kept") as connection:
            # As `add_sample` does, stopped in the middle.
            connection.exec_driver_sql("SELECT key_id FROM audit_payloads WHERE part = 'request' FOR UPDATE")
            erased.start()
            time.sleep(0.5)
            assert erased.is_alive()
            connection.exec_driver_sql(
                "INSERT INTO audit_payloads SELECT request_id, 'sample', tenant, key_id, nonce, wrapped_key, "
                "ciphertext, time FROM audit_payloads WHERE part = 'request'"
            )
        erased.join()
        assert [samples.get(request, part) for part in Part] == [None] * 3
        assert samples.add_sample(sample) is SampleOutcome.GONE


def test_two_that_keep_a_sample_at_once_agree_on_one(samples, url):
    """Neither gets an error."""
    with closing(SqlSampleStore(url)) as other:
        for number in range(ROUNDS):
            request = keep(samples, number)
            mine, theirs = payload(number, part=Part.SAMPLE), payload(number, part=Part.SAMPLE)
            outcomes, barrier = {}, threading.Barrier(2)

            def run(store, sample, outcomes=outcomes, barrier=barrier):
                barrier.wait()
                outcomes[sample.sealed.nonce] = store.add_sample(sample)

            threads = [threading.Thread(target=run, args=each) for each in ((samples, mine), (other, theirs))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(each.name for each in outcomes.values()) == ["KEPT", "THERE"]
            kept = samples.get(request, Part.SAMPLE)
            assert outcomes[kept.sealed.nonce] is SampleOutcome.KEPT


def test_answered_yields_complete_requests_with_their_outcomes(samples, url):
    """The newest first, of the tenants that are named."""
    requests = [keep(samples, number) for number in range(3)]
    keep(samples, 3, tenant="other")
    samples.add([payload(4, part=Part.REQUEST)])
    with closing(SqlAuditStore(url)) as log:
        assert list(samples.answered(("acme",))) == []
        for number, request in enumerate(requests):
            _record(log, number, request)
    found = list(samples.answered(("acme", "nobody")))
    assert [each.request_id for each in found] == requests[::-1]
    assert [each.entry["number"] for each in found] == [2, 1, 0]
    assert [each.request_id for each in samples.answered(("acme",), since=requests[1])] == requests[:0:-1]
    assert list(samples.answered(())) == []


def _record(log, index, request):
    """An outcome as a leaf; what is read of it is its JSON."""
    content = f'{{"number":{index}}}'.encode()
    head = log.head()
    tree = CompactRange(head.size, head.subtrees)
    tree.append(hash_leaf(content))
    leaf = Leaf(
        index=head.size,
        leaf=content,
        leaf_hash=hash_leaf(content),
        type="request.outcome",
        request_id=request,
    )
    log.append([leaf], expected=head, new=Head.of(tree))
