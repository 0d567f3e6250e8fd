"""
What share of a loss is said to have come back, and of which time.
"""

import pytest

from benchmarks.draft_refresh.report import Findings, Step, markdown
from benchmarks.draft_refresh.traffic import Acceptance
from benchmarks.speculation.provenance import Provenance

PROVENANCE = Provenance(
    command="python -m benchmarks.draft_refresh",
    hardware="a machine",
    commit="abc1234",
    has_changes=False,
    engine="vllm 0.32.0",
    model="target",
    draft="draft",
    date="2026-11-22",
)


def acceptance(length: float) -> Acceptance:
    """What a measurement of this acceptance length looks like."""
    return Acceptance(requests=40, drafts=900, acceptance_length=length, tokens_per_second=200.0)


def findings(original: float, fallen: float, refreshed: float) -> Findings:
    """Three measurements."""
    return Findings(original=acceptance(original), fallen=acceptance(fallen), refreshed=acceptance(refreshed))


@pytest.mark.parametrize(
    ("lengths", "share"),
    [
        ((3.0, 2.0, 2.8), 0.8),
        ((3.0, 2.0, 2.0), 0.0),
        ((3.0, 2.0, 1.5), -0.5),
        ((3.0, 2.0, 3.5), 1.5),
        ((2.0, 2.0, 2.0), 1.0),
        ((2.0, 2.5, 2.0), 1.0),
    ],
)
def test_the_share_is_of_what_was_lost(lengths, share):
    """Half a token lost and won again is all of it; nothing lost is nothing to bring back."""
    assert findings(*lengths).recovered == pytest.approx(share)


def test_the_page_counts_the_time_of_the_refresh_alone():
    """What happened to the site before, and looking at it afterwards, is no part of a refresh."""
    steps = [
        Step(name="fine-tune the target", seconds=300.0),
        Step(name="harvest", seconds=60.0, said="done: 480 samples"),
        Step(name="train", seconds=600.0),
    ]
    page = markdown(PROVENANCE, findings(3.0, 2.0, 2.9), steps, ("harvest", "train"))
    assert "**90% of the lost acceptance came back**" in page
    assert "Harvest, train took 11.0 minutes" in page
    assert "| changed target, original draft | 2.00 | 900 | 40 | 200 |" in page
    assert "done: 480 samples" in page
    assert "| fine-tune the target | 300 |" in page
