"""What people are shown of a worker's choice."""

import math
from dataclasses import replace

import pytest

from appliance.control.view import view_of
from appliance.serving.plugin_client import parse_reading
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.speculation.evidence import Acceptance
from appliance.speculation.state import SpeculationFigures
from appliance.speculation.values import Decision, Reason, SpecDecodeCounters, SpeculationMode
from tests.unit.gateway.cost.readings import costs

DRAFTS = SpecDecodeCounters(
    drafts=4000,
    draft_tokens=12_000,
    accepted_tokens=5800,
    accepted_per_position=(3200, 2400, 200),
    drafted_per_position=(4000, 4000, 4000),
)


def snapshot(acceptance: Acceptance) -> WorkerSnapshot:
    """A worker that drafts two tokens at one batch size and none at four."""
    figures = SpeculationFigures(
        acceptance=acceptance,
        costs=costs((1, {0: 0.01, 2: 0.014, 3: 0.016}), (4, {0: 0.01, 3: 0.03})),
        choices=(0, 1, 2, 3),
        draft_tokens={1: 2, 4: 0},
    )
    decision = Decision(mode=SpeculationMode.SPECULATIVE, reason=Reason.RECOVERED)
    worker = Worker(worker_id=WorkerId("w"), url="http://w")
    return WorkerSnapshot(worker=worker, decision=decision, figures=figures)


def test_payoff_and_break_even_are_those_of_the_best_measured_number():
    """Two draft tokens, where the third is hardly ever accepted and costs as much as the others."""
    small, large = view_of(snapshot(Acceptance(total=DRAFTS)), now=9.0, wall_now=109.0).buckets
    assert small.break_evens == pytest.approx({2: 1.4, 3: 1.6}, rel=0.01)
    assert small.break_even == small.break_evens[2]
    assert small.payoff == pytest.approx(math.log(2.4 / 1.4), abs=0.01)
    assert large.break_even == large.break_evens[3]
    assert large.payoff == pytest.approx(math.log(2.45 / 3.0), abs=0.01)
    assert (small.reason, large.reason) == (Reason.RECOVERED, Reason.BELOW_BREAK_EVEN)


def test_a_plugin_that_does_not_answer_is_a_problem_of_a_worker_that_does():
    """A firewall that drops the control port leaves no other trace."""
    up = replace(snapshot(Acceptance()), healthy=True)
    (problem,) = view_of(up, now=9.0, wall_now=109.0).problems
    assert "w:81 did not answer" in problem
    told = parse_reading(404, "")
    for other in (replace(up, healthy=False), replace(up, reading=replace(told, problems=()))):
        assert view_of(other, now=9.0, wall_now=109.0).problems == ()
    assert view_of(replace(up, reading=told), now=9.0, wall_now=109.0).problems == told.problems


def test_without_drafts_no_payoff_is_shown():
    small, _large = view_of(snapshot(Acceptance()), now=9.0, wall_now=109.0).buckets
    assert small.payoff is None
    assert small.break_even == small.break_evens[3]
