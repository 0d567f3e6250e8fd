"""A worker may hold as many requests as it batches, and a few more."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.admission.slot_count import DEFAULT_BATCH, adjusted_slots, max_slots
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.speculation.values import EngineReading

WORKER = Worker(worker_id=WorkerId("a"), url="http://127.0.0.1:1")


def seen(reading: EngineReading | None) -> WorkerSnapshot:
    """A worker whose plugin reported this."""
    return WorkerSnapshot(worker=WORKER, reading=reading)


def test_a_worker_gets_its_reported_batch_and_the_headroom():
    """The plugin reports `max_num_seqs`."""
    reading = EngineReading(controllable=True, epoch="1", largest_batch=64)
    assert max_slots(seen(reading), fixed=None, headroom=8) == 72


def test_a_worker_that_reports_no_batch_gets_the_default():
    """Without the plugin, or with one that could not hook in."""
    unsure = EngineReading(controllable=False, epoch="1", largest_batch=1)
    assert max_slots(seen(None), fixed=None, headroom=8) == DEFAULT_BATCH + 8
    assert max_slots(seen(unsure), fixed=None, headroom=8) == DEFAULT_BATCH + 8


def test_the_setting_overrides_the_reported_batch():
    reading = EngineReading(controllable=True, epoch="1", largest_batch=64)
    assert max_slots(seen(reading), fixed=3, headroom=8) == 3


def test_a_worker_with_a_long_queue_gets_fewer_slots():
    """Its KV cache holds ten long requests; ten run and eight wait."""
    slots = adjusted_slots(72, most=72, headroom=8, ours=72, running=10, waiting=62)
    assert slots == 18
    assert adjusted_slots(slots, most=72, headroom=8, ours=18, running=10, waiting=8) == 18


def test_slots_grow_again_once_the_queue_is_empty():
    """Step by step, up to the maximum."""
    slots = 18
    for _ in range(20):
        slots = adjusted_slots(slots, most=72, headroom=8, ours=18, running=18, waiting=0)
    assert slots == 72


def test_gateways_that_share_a_worker_share_its_slots():
    """Two gateways with forty requests each get half of the slots."""
    slots = adjusted_slots(72, most=72, headroom=8, ours=40, running=64, waiting=16)
    assert slots == 36


def test_a_gateway_without_requests_at_a_full_worker_gets_one_slot():
    """Otherwise it would never observe that the worker has room again."""
    assert adjusted_slots(72, most=72, headroom=8, ours=0, running=64, waiting=30) == 1


@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(0, 50), st.integers(0, 600), st.integers(0, 300),
    st.integers(0, 300),
)  # fmt: skip
def test_slots_stay_between_one_and_the_maximum(slots, most, headroom, ours, running, waiting):
    """Whatever a worker reports."""
    after = adjusted_slots(slots, most=most, headroom=headroom, ours=ours, running=running, waiting=waiting)
    assert 1 <= after <= most


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 32))
def test_a_worker_of_one_gateway_always_has_the_headroom_ready(batch, slots, headroom):
    """Adjusting never leaves room in the batch while requests wait at the gateway."""
    running, waiting = min(batch, slots), max(0, slots - batch)
    after = adjusted_slots(slots, most=300, headroom=headroom, ours=slots, running=running, waiting=waiting)
    assert after >= min(slots, batch)
    if waiting > headroom:
        assert after == batch + headroom
