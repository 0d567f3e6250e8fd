"""Which endpoint one more request should go to."""

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.picker.scoring import (
    FRESH_SECONDS,
    HALF_LIFE_STEPS,
    NO_SPEEDS,
    Endpoint,
    Speed,
    expected_speeds,
    learn,
    rank,
)
from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_metrics import WorkerMetrics
from appliance.speculation.values import (
    NO_DRAFTS,
    EngineReading,
    SpeculationMode,
    StepCounters,
)

NOW = 1000.0
DRAFTS, NONE = ((1, 64, 3),), ((1, 64, 0),)


def page(*, running: int = 0, waiting: int = 0, cache: float = 0.0, drafts: bool = True) -> WorkerMetrics:
    return WorkerMetrics(
        running=running,
        waiting=waiting,
        kv_cache_usage=cache,
        prompt_tokens_total=0,
        generation_tokens_total=0,
        preemptions_total=0,
        finished_requests_total={},
        speculation=NO_DRAFTS if drafts else None,
    )


def reading(*, table=DRAFTS, mode=SpeculationMode.SPECULATIVE, steps=None, epoch="one") -> EngineReading:
    return EngineReading(
        controllable=True,
        epoch=epoch,
        largest_batch=64,
        choices=(0, 3),
        table=table,
        mode=mode,
        steps=MappingProxyType(steps or {}),
    )


def speeds(measured: dict[tuple[int, int], float], *, at: float = NOW) -> MappingProxyType:
    return MappingProxyType(
        {cell: Speed(tokens_per_second=value, measured_at=at) for cell, value in measured.items()}
    )


def endpoint(name: str, *, of=None, metrics=None, measured=None, picked=0, at=NOW, **state) -> Endpoint:
    snapshot = WorkerSnapshot(
        worker=Worker(worker_id=WorkerId(name), url=f"http://{name}"),
        **{
            "healthy": True,
            "models": (ServedModel(name="demo", max_model_len=None, created=0),),
            "metrics": metrics or page(),
            "reading": of or reading(),
            **state,
        },
    )
    return Endpoint(snapshot=snapshot, picked=picked, speeds=speeds(measured or {}, at=at))


def in_fallback(name: str, **state) -> Endpoint:
    return endpoint(name, of=reading(table=NONE, mode=SpeculationMode.TARGET_ONLY), **state)


def names(ranked: tuple[Endpoint, ...]) -> list[str]:
    return [each.worker_id for each in ranked]


def test_fastest_for_one_more_request_comes_first():
    slow = endpoint("a", measured={(1, 3): 20.0})
    fast = endpoint("b", measured={(1, 3): 30.0})
    assert names(rank([slow, fast], NOW)) == ["b", "a"]


def test_worker_in_fallback_comes_after_one_that_pays():
    paying = endpoint("b", measured={(1, 3): 30.0})
    stopped = in_fallback("a", measured={(1, 0): 20.0, (1, 3): 40.0})
    assert names(rank([stopped, paying], NOW)) == ["b", "a"]


def test_worker_in_fallback_is_used_once_the_paying_one_is_slower():
    crowded = endpoint("b", measured={(1, 3): 30.0, (16, 3): 10.0}, metrics=page(running=15))
    assert names(rank([crowded, in_fallback("a", measured={(1, 0): 20.0})], NOW)) == ["a", "b"]


def test_unmeasured_worker_in_fallback_comes_after_one_that_drafts():
    paying = endpoint("b", measured={(1, 3): 30.0})
    assert names(rank([in_fallback("a"), paying], NOW)) == ["b", "a"]


def test_unmeasured_worker_in_fallback_must_have_fewer_requests_to_be_used():
    one, many = (endpoint("b", measured={(1, 3): 30.0}, metrics=page(running=running)) for running in (1, 5))
    assert names(rank([in_fallback("a"), one], NOW)) == ["b", "a"]
    assert names(rank([in_fallback("a"), many], NOW)) == ["a", "b"]


def test_load_past_the_break_even_counts_with_the_draft_tokens_it_gets():
    table = ((1, 4, 3), (5, 64, 0))
    near = endpoint(
        "a", of=reading(table=table), metrics=page(running=4), measured={(4, 3): 25.0, (8, 0): 9.0}
    )
    other = endpoint("b", metrics=page(running=4), measured={(8, 3): 12.0})
    assert near.draft_tokens == 0
    assert names(rank([near, other], NOW)) == ["b", "a"]


def test_without_measurements_the_least_loaded_comes_first():
    ranked = rank([endpoint("a", metrics=page(running=3)), endpoint("b"), endpoint("c", picked=1)], NOW)
    assert names(ranked) == ["b", "c", "a"]


def test_a_new_worker_is_expected_to_be_as_fast_as_the_others():
    known = endpoint("a", measured={(1, 3): 30.0, (2, 3): 28.0}, metrics=page(running=1))
    assert names(rank([known, endpoint("b")], NOW)) == ["b", "a"]


def test_speeds_within_five_percent_are_decided_by_load():
    busy = endpoint("a", measured={(1, 3): 20.5, (2, 3): 20.5}, metrics=page(running=1))
    assert names(rank([busy, endpoint("b", measured={(1, 3): 20.4})], NOW)) == ["b", "a"]


def test_requests_picked_since_the_last_scrape_are_load():
    burst = {"a": 0, "b": 0}
    for _ in range(40):
        pool = [endpoint(name, measured={(1, 3): 20.0}, picked=burst[name]) for name in burst]
        burst[names(rank(pool, NOW))[0]] += 1
    assert burst == {"a": 20, "b": 20}


@pytest.mark.parametrize("metrics", [page(running=4, waiting=8), page(running=12, cache=0.97)])
def test_a_worker_whose_batch_is_full_makes_requests_wait(metrics):
    full = endpoint("a", measured={(1, 3): 30.0, (16, 3): 30.0}, metrics=metrics)
    assert names(rank([full, endpoint("b", measured={(16, 3): 29.0}, picked=12)], NOW)) == ["b", "a"]


def test_a_speed_measured_long_ago_is_unknown():
    old = endpoint("a", measured={(1, 3): 5.0}, at=NOW - FRESH_SECONDS - 1)
    assert names(rank([old, endpoint("b", measured={(1, 3): 30.0}, picked=1)], NOW)) == ["a", "b"]


def test_endpoints_that_serve_the_model_are_preferred_and_never_none():
    pool = [
        endpoint("a", measured={(1, 3): 30.0}),
        endpoint("b", models=(ServedModel(name="adapter", max_model_len=None, created=0),)),
    ]
    assert names(rank(pool, NOW, model="adapter")) == ["b"]
    assert names(rank(pool, NOW, model="unknown")) == ["a", "b"]


def test_without_a_ready_endpoint_all_take_turns():
    pool = [endpoint("a", healthy=False), endpoint("b", healthy=False)]
    pool = [replace(pool[0], last_picked=7), replace(pool[1], last_picked=6)]
    assert names(rank(pool, NOW)) == ["b", "a"]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 200),
            st.integers(0, 50),
            st.floats(0, 1),
            st.dictionaries(
                st.tuples(st.sampled_from([1, 2, 8, 64]), st.sampled_from([0, 3])), st.floats(0.01, 1e4)
            ),
            st.sampled_from([DRAFTS, NONE, ()]),
            st.floats(0, 2000),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_some_endpoint_is_always_picked_and_ready_ones_first(pool):
    made = [
        endpoint(
            str(number),
            healthy=healthy,
            metrics=page(running=running, waiting=waiting, cache=cache),
            measured=measured,
            of=reading(table=table),
            at=at,
        )
        for number, (healthy, running, waiting, cache, measured, table, at) in enumerate(pool)
    ]
    ranked = rank(made, NOW)
    ready = {each.worker_id for each in made if each.snapshot.takes_requests}
    assert set(names(ranked)) == (ready or {each.worker_id for each in made})
    assert all(speed > 0 for speed in expected_speeds(made, NOW).values())


def test_a_drained_endpoint_is_picked_only_if_there_is_no_other():
    drained = endpoint("a", admission=Admission.DRAINING, measured={(1, 3): 99.0})
    assert names(rank([drained, endpoint("b")], NOW)) == ["b"]


def counters(steps: int, *, seconds: float = 0.1, batch: int = 1, tokens: float = 2.0) -> StepCounters:
    return StepCounters(
        steps=steps, seconds=steps * seconds, requests=steps * batch, tokens=round(steps * batch * tokens)
    )


def test_speed_is_tokens_per_second_of_each_request_in_the_batch():
    learnt = learn(NO_SPEEDS, None, reading(steps={(4, 3): counters(100, batch=4)}), NOW)
    assert learnt[4, 3].tokens_per_second == pytest.approx(20.0)


def test_newer_steps_replace_older_ones():
    first = reading(steps={(1, 3): counters(100)})
    more = replace(
        first, steps=MappingProxyType({(1, 3): counters(100).plus(counters(HALF_LIFE_STEPS, tokens=1.0))})
    )
    learnt = learn(learn(NO_SPEEDS, None, first, NOW), first, more, NOW)
    assert learnt[1, 3].tokens_per_second == pytest.approx(15.0)


def test_speeds_of_an_engine_that_ended_are_forgotten():
    first = reading(steps={(1, 3): counters(100)})
    restarted = reading(steps={(1, 0): counters(50, tokens=1.0)}, epoch="two")
    learnt = learn(learn(NO_SPEEDS, None, first, NOW), first, restarted, NOW)
    assert set(learnt) == {(1, 0)}


def test_a_reading_that_failed_changes_nothing():
    known = learn(NO_SPEEDS, None, reading(steps={(1, 3): counters(100)}), NOW)
    assert learn(known, reading(), None, NOW) is known
