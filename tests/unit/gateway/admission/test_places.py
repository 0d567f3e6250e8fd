"""A worker holds what it batches and a little more."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.admission.places import UNKNOWN_BATCH, corrected_places, most_places
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.speculation.values import EngineReading

WORKER = Worker(worker_id=WorkerId("a"), url="http://127.0.0.1:1")


def seen(reading: EngineReading | None) -> WorkerSnapshot:
    """Return a worker whose plugin said this."""
    return WorkerSnapshot(worker=WORKER, reading=reading)


def test_a_worker_that_says_its_batch_gets_that_and_the_headroom():
    """The plugin reports `max_num_seqs`."""
    reading = EngineReading(controllable=True, epoch="1", largest_batch=64)
    assert most_places(seen(reading), fixed=None, headroom=8) == 72


def test_a_worker_that_does_not_say_gets_the_usual_batch():
    """A page without the plugin, and a plugin that could not hook in, tell nothing."""
    unsure = EngineReading(controllable=False, epoch="1", largest_batch=1)
    assert most_places(seen(None), fixed=None, headroom=8) == UNKNOWN_BATCH + 8
    assert most_places(seen(unsure), fixed=None, headroom=8) == UNKNOWN_BATCH + 8


def test_a_setting_counts_for_more_than_what_the_worker_says():
    """Exactly as told."""
    reading = EngineReading(controllable=True, epoch="1", largest_batch=64)
    assert most_places(seen(reading), fixed=3, headroom=8) == 3


def test_a_worker_that_cannot_batch_what_it_holds_is_given_less():
    """Its KV cache holds ten long requests; ten run and eight stand ready."""
    places = corrected_places(72, most=72, headroom=8, ours=72, running=10, waiting=62)
    assert places == 18
    assert corrected_places(places, most=72, headroom=8, ours=18, running=10, waiting=8) == 18


def test_places_come_back_when_nothing_waits_any_more():
    """Step by step, up to what they were."""
    places = 18
    for _ in range(20):
        places = corrected_places(places, most=72, headroom=8, ours=18, running=18, waiting=0)
    assert places == 72


def test_gateways_that_share_a_worker_share_its_places():
    """Two gateways with forty requests each: half of the room for each."""
    places = corrected_places(72, most=72, headroom=8, ours=40, running=64, waiting=16)
    assert places == 36


def test_a_gateway_without_a_request_on_a_full_worker_still_gets_a_place():
    """Else it would never learn that there is room again."""
    assert corrected_places(72, most=72, headroom=8, ours=0, running=64, waiting=30) == 1


@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(0, 50), st.integers(0, 600), st.integers(0, 300),
    st.integers(0, 300),
)  # fmt: skip
def test_places_stay_between_one_and_the_most(places, most, headroom, ours, running, waiting):
    """Whatever a page says."""
    after = corrected_places(
        places, most=most, headroom=headroom, ours=ours, running=running, waiting=waiting
    )
    assert 1 <= after <= most


@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 32))
def test_a_worker_of_one_gateway_always_has_the_headroom_ready(batch, places, headroom):
    """Correcting never leaves a place in the batch empty while something waits at the gateway."""
    running, waiting = min(batch, places), max(0, places - batch)
    after = corrected_places(
        places, most=300, headroom=headroom, ours=places, running=running, waiting=waiting
    )
    assert after >= min(places, batch)
    if waiting > headroom:
        assert after == batch + headroom
