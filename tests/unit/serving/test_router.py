"""The choice of a worker: filter, score, pick."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.router import (
    AFFINITY_CHARACTERS,
    TARGET_ONLY_PENALTY,
    candidates,
    has_target_only,
    lightest,
    no_worker,
    score,
)
from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.values import NO_DRAFTS, SpeculationMode


def metrics(running: int = 0, waiting: int = 0, kv_cache_usage: float = 0.0) -> WorkerMetrics:
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
    name: str,
    *,
    healthy: bool = True,
    models: tuple[str, ...] = ("demo",),
    load: WorkerMetrics | None = None,
    speculates: bool = False,
    admission: Admission = Admission.ADMITTED,
    avoided: bool = False,
) -> WorkerSnapshot:
    mode = SpeculationMode.SPECULATIVE if speculates else SpeculationMode.TARGET_ONLY
    return WorkerSnapshot(
        worker=Worker(worker_id=WorkerId(name), url=f"http://127.0.0.1/{name}", mode=mode),
        healthy=healthy,
        models=tuple(ServedModel(name=model, max_model_len=None, created=0) for model in models),
        metrics=replace(load, speculation=NO_DRAFTS if speculates else None) if load else None,
        admission=admission,
        avoided=avoided,
    )


def pick(snapshots: list[WorkerSnapshot], in_flight: dict | None = None, **asked) -> str | None:
    chosen = lightest(candidates("demo", snapshots, **asked), in_flight or {})
    return chosen.worker.worker_id if chosen else None


SNAPSHOTS = st.lists(
    st.builds(
        snapshot,
        st.sampled_from("abcdefgh"),
        healthy=st.booleans(),
        models=st.sampled_from([(), ("demo",), ("other",), ("demo", "other")]),
        load=st.none() | st.builds(metrics, st.integers(0, 64), st.integers(0, 64), st.floats(0, 1)),
        speculates=st.booleans(),
        admission=st.sampled_from(Admission),
        avoided=st.booleans(),
    ),
    unique_by=lambda seen: seen.worker.worker_id,
    max_size=6,
)
IN_FLIGHT = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 64))


def test_the_only_worker_is_picked():
    """One healthy worker that serves the model is enough."""
    assert pick([snapshot("a")]) == "a"


@pytest.mark.parametrize(
    "snapshots",
    [[], [snapshot("a", healthy=False)], [snapshot("a", models=("other",))], [snapshot("a", models=())]],
)
def test_no_candidate_means_no_worker(snapshots: list[WorkerSnapshot]):
    """Unhealthy workers and those of other models are never picked."""
    assert pick(snapshots) is None


@pytest.mark.parametrize(("may_speculate", "kind"), [(True, "No worker"), (False, "No target-only worker")])
def test_error_names_the_missing_kind_of_worker(may_speculate: bool, kind: str):
    """And the model."""
    message = str(no_worker("demo", may_speculate=may_speculate))
    assert message.startswith(f"{kind} is ready for demo")


@pytest.mark.parametrize(
    ("lighter", "heavier"),
    [
        (metrics(running=3), metrics(running=4)),
        (metrics(running=3), metrics(waiting=1)),
        (metrics(running=10), metrics(running=1, kv_cache_usage=0.9)),
        (metrics(waiting=3), metrics(kv_cache_usage=1.0)),
    ],
)
def test_least_loaded_worker_is_picked(lighter: WorkerMetrics, heavier: WorkerMetrics):
    """Waiting weighs more than running, a full cache more than either."""
    assert pick([snapshot("a", load=heavier), snapshot("b", load=lighter)]) == "b"


def test_own_requests_count_before_the_next_scrape():
    """A burst between two scrapes is spread, not sent to one worker."""
    both = [snapshot("a", load=metrics()), snapshot("b", load=metrics())]
    in_flight: dict[WorkerId, int] = {}
    for _ in range(10):
        worker_id = WorkerId(pick(both, in_flight))
        in_flight[worker_id] = in_flight.get(worker_id, 0) + 1
    assert in_flight == {"a": 5, "b": 5}


def test_a_request_is_not_counted_twice():
    """Our requests are among those that the worker reports as running."""
    seen = snapshot("a", load=metrics(running=5))
    assert score(seen, {WorkerId("a"): 5}) == score(seen, {})


def test_equal_loads_are_decided_by_name():
    """The same values give the same choice in any order."""
    both = [snapshot("b"), snapshot("a")]
    assert pick(both) == pick(both[::-1]) == "a"


@pytest.mark.parametrize("admission", [Admission.DRAINING, Admission.CANARY])
def test_worker_that_is_not_admitted_receives_nothing(admission: Admission):
    """A draining one must become empty, and one under test has not passed its canary."""
    assert pick([snapshot("a", admission=admission)]) is None


def test_a_request_that_must_not_be_speculated_goes_to_a_worker_without_a_draft():
    """Even if that one is busier."""
    both = [snapshot("a", speculates=True), snapshot("b", load=metrics(running=60, waiting=9))]
    assert pick(both, may_speculate=False) == "b"
    assert pick(both[:1], may_speculate=False) is None


def test_a_worker_with_a_draft_is_preferred_until_it_is_clearly_busier():
    """At equal load drafts help; a queue behind them does not."""
    drafting, plain = snapshot("b", speculates=True), snapshot("a")
    assert pick([plain, drafting]) == "b"
    slightly = {WorkerId("b"): int(TARGET_ONLY_PENALTY) - 1}
    assert pick([plain, drafting], slightly) == "b"
    clearly = {WorkerId("b"): int(TARGET_ONLY_PENALTY) + 1}
    assert pick([plain, drafting], clearly) == "a"


def test_a_worker_to_be_avoided_is_the_last_resort():
    """Its drafts cost more than they give, but an answer is better than none."""
    avoided = snapshot("a", avoided=True)
    assert pick([avoided, snapshot("b", load=metrics(running=64, waiting=64))]) == "b"
    assert pick([avoided]) == "a"


@pytest.mark.parametrize("what", ["drained", "leaving"])
def test_drained_or_leaving_worker_receives_nothing(what: str):
    """It finishes its requests."""
    assert pick([replace(snapshot("a"), **{what: True}), snapshot("b", load=metrics(running=9))]) == "b"


def test_affinity_reduces_load_up_to_a_limit():
    """It decides at equal load, outweighs a small difference, and not a large one."""
    both = (snapshot("a"), snapshot("b"))
    seen_by = {WorkerId("b"): 4 * AFFINITY_CHARACTERS}
    for busy, expected in ((0, "b"), (3, "b"), (5, "a")):
        chosen = lightest(both, {WorkerId("b"): busy}, seen_by=seen_by)
        assert chosen.worker.worker_id == expected


def test_affinity_does_not_override_avoidance():
    """Nor does the load of the others."""
    both = (snapshot("a", avoided=True), snapshot("b", load=metrics(running=60)))
    assert lightest(both, {}, seen_by={WorkerId("a"): 16384}).worker.worker_id == "b"


@given(SNAPSHOTS, IN_FLIGHT, st.booleans())
def test_pick_is_the_best_of_the_eligible_workers(
    snapshots: list[WorkerSnapshot], in_flight: dict[WorkerId, int], may_speculate: bool
):
    """For any pool: the lightest of those that may serve, avoided ones last; None if there is none."""
    able = [
        seen
        for seen in snapshots
        if seen.healthy
        and seen.admission is Admission.ADMITTED
        and seen.serves("demo")
        and (may_speculate or not seen.speculates)
    ]
    picked = lightest(candidates("demo", snapshots, may_speculate=may_speculate), in_flight)
    if picked is None:
        assert not able
        return
    assert picked in able
    rivals = [seen for seen in able if not seen.avoided] or able
    assert picked in rivals
    assert score(picked, in_flight) == min(score(seen, in_flight) for seen in rivals)
    assert lightest(candidates("demo", snapshots[::-1], may_speculate=may_speculate), in_flight) is picked


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        ([], False),
        ([snapshot("a", speculates=True)], False),
        ([snapshot("a", models=("other",))], False),
        ([snapshot("a", speculates=True, models=())], False),
        ([snapshot("a", speculates=True), snapshot("b")], True),
        ([snapshot("a", healthy=False)], True),
        ([snapshot("a", admission=Admission.DRAINING)], True),
        ([snapshot("a", healthy=False, models=())], True),
    ],
)
def test_a_target_only_worker_that_will_be_back_counts(snapshots: list[WorkerSnapshot], expected: bool):
    """For one that is down or has not listed its models, a client is told to wait."""
    assert has_target_only("demo", snapshots) is expected
