"""Promises of `appliance.serving.router`: filter, score, pick."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import NoWorkerAvailableError
from appliance.serving.router import pick, score
from appliance.serving.vllm_metrics import WorkerMetrics
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot


def metrics(running: int = 0, waiting: int = 0, kv_cache_usage: float = 0.0) -> WorkerMetrics:
    """Return a worker's load."""
    return WorkerMetrics(
        running=running,
        waiting=waiting,
        kv_cache_usage=kv_cache_usage,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        preemptions_total=0,
        finished_requests_total={},
        speculation=None,
    )


def snapshot(
    name: str, *, healthy: bool = True, models: tuple[str, ...] = ("demo",), load: WorkerMetrics | None = None
) -> WorkerSnapshot:
    """Return a worker as the pool has it."""
    return WorkerSnapshot(
        worker=Worker(worker_id=WorkerId(name), url=f"http://127.0.0.1/{name}"),
        healthy=healthy,
        models=tuple(ServedModel(name=model, max_model_len=None, created=0) for model in models),
        metrics=load,
    )


SNAPSHOTS = st.lists(
    st.builds(
        snapshot,
        st.sampled_from("abcdefgh"),
        healthy=st.booleans(),
        models=st.sampled_from([(), ("demo",), ("other",), ("demo", "other")]),
        load=st.none() | st.builds(metrics, st.integers(0, 64), st.integers(0, 64), st.floats(0, 1)),
    ),
    unique_by=lambda seen: seen.worker.worker_id,
    max_size=6,
)
IN_FLIGHT = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 64))


def test_the_only_worker_is_picked():
    """One healthy worker that serves the model is enough."""
    assert pick("demo", [snapshot("a")], {}).worker_id == "a"


@pytest.mark.parametrize(
    "snapshots",
    [[], [snapshot("a", healthy=False)], [snapshot("a", models=("other",))], [snapshot("a", models=())]],
)
def test_without_a_candidate_there_is_an_error_to_retry_on(snapshots: list[WorkerSnapshot]):
    """Unhealthy workers and those of other models are never picked."""
    with pytest.raises(NoWorkerAvailableError):
        pick("demo", snapshots, {})


def test_a_worker_that_failed_this_request_is_not_tried_again():
    """A retry goes elsewhere, or nowhere."""
    both = [snapshot("a"), snapshot("b")]
    assert pick("demo", both, {}, tried=frozenset({WorkerId("a")})).worker_id == "b"
    with pytest.raises(NoWorkerAvailableError):
        pick("demo", both, {}, tried=frozenset({WorkerId("a"), WorkerId("b")}))


@pytest.mark.parametrize(
    ("lighter", "heavier"),
    [
        (metrics(running=3), metrics(running=4)),
        (metrics(running=3), metrics(waiting=1)),
        (metrics(running=10), metrics(running=1, kv_cache_usage=0.9)),
        (metrics(waiting=3), metrics(kv_cache_usage=1.0)),
    ],
)
def test_the_worker_with_less_to_do_is_picked(lighter: WorkerMetrics, heavier: WorkerMetrics):
    """Waiting weighs more than running, a full cache more than either."""
    assert pick("demo", [snapshot("a", load=heavier), snapshot("b", load=lighter)], {}).worker_id == "b"


def test_our_own_requests_count_before_a_scrape_shows_them():
    """A burst between two scrapes is spread, not sent to one worker."""
    both = [snapshot("a", load=metrics()), snapshot("b", load=metrics())]
    in_flight: dict[WorkerId, int] = {}
    for _ in range(10):
        worker = pick("demo", both, in_flight)
        in_flight[worker.worker_id] = in_flight.get(worker.worker_id, 0) + 1
    assert in_flight == {"a": 5, "b": 5}


def test_a_request_is_not_counted_twice():
    """Ours are among those the worker reports as running."""
    assert score(snapshot("a", load=metrics(running=5)), {WorkerId("a"): 5})[0] == 5


def test_equal_loads_are_decided_by_name():
    """The same values give the same choice, whatever the order."""
    both = [snapshot("b"), snapshot("a")]
    assert pick("demo", both, {}).worker_id == pick("demo", both[::-1], {}).worker_id == "a"


@given(SNAPSHOTS, IN_FLIGHT, st.sets(st.sampled_from("abcdefgh")))
def test_a_pick_is_always_healthy_untried_able_and_least_loaded(
    snapshots: list[WorkerSnapshot], in_flight: dict[WorkerId, int], tried: set[WorkerId]
):
    """For any pool: the lightest of those that could serve, or an error when there is none."""
    able = [
        seen
        for seen in snapshots
        if seen.healthy and seen.serves("demo") and seen.worker.worker_id not in tried
    ]
    try:
        worker = pick("demo", snapshots, in_flight, tried=frozenset(tried))
    except NoWorkerAvailableError:
        assert not able
        return
    assert worker in [seen.worker for seen in able]
    assert score(next(seen for seen in able if seen.worker is worker), in_flight) == min(
        score(seen, in_flight) for seen in able
    )
