"""Promotions on disk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.promotion.promotion import (
    LONGEST_TIMELINE,
    Promotion,
    PromotionStage,
    TrialNumbers,
    decode,
)
from appliance.drafts.promotion.promotion_run import STORED, PromotionStore
from appliance.errors import DraftStorageError

DIGEST = f"sha256:{'a' * 64}"


def promotion(name: str = "P1", **more) -> Promotion:
    defaults = {
        "promotion_id": name,
        "kind": "promotion",
        "target": DIGEST,
        "model": "demo",
        "draft": DIGEST,
        "incumbent": "",
        "actor": "k1",
        "began": "2026-11-22T10:00:00.000Z",
        "stage": PromotionStage.BEGUN,
    }
    return Promotion(**{**defaults, **more})


TEXT = st.text(max_size=20)


@given(
    st.sampled_from(PromotionStage),
    st.one_of(st.none(), st.sampled_from(PromotionStage)),
    st.lists(TEXT, max_size=3),
    st.one_of(st.none(), st.floats(0.1, 9.0)),
    TEXT,
)
def test_promotion_round_trips_through_json(stage, outcome, workers, length, text):
    numbers = TrialNumbers(drafts=3, acceptance_length=length)
    made = promotion(outcome=outcome, workers=tuple(workers), numbers=numbers, reason=text)
    moved = made.moved(stage, text, "2026-11-22T10:00:01.000Z", waits=text)
    assert decode(moved.encode()) == moved


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"stage": "begun"}'])
def test_decode_raises_value_error_for_anything_else(text):
    with pytest.raises(ValueError):  # noqa: PT011 - it is a JSON error or ours, and both are one
        decode(text)


@given(st.data())
def test_damaged_json_decodes_to_a_promotion_or_value_error(data):
    text = promotion().moved(PromotionStage.TRIAL, "x", "t").encode()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from('"{}[],:0a')) + text[at + 1 :]
    try:
        found = decode(changed)
    except ValueError:
        return
    assert isinstance(found.stage, PromotionStage)


def test_long_timeline_loses_steps_in_its_middle():
    made = promotion()
    for number in range(200):
        made = made.moved(PromotionStage.ROLLOUT, f"worker {number}", "t")
    texts = [step.text for step in made.timeline]
    assert (texts[0], texts[-1]) == ("worker 0", "worker 199")
    assert len(texts) <= LONGEST_TIMELINE


def test_list_is_newest_first_and_names_damaged_files(tmp_path):
    store = PromotionStore(tmp_path)
    assert store.list() == ((), ())
    for name in ("P1", "P3", "P2"):
        store.write(promotion(name))
    (tmp_path / "promotions" / "P2.json").write_text("{")
    found, unreadable = store.list()
    assert [each.promotion_id for each in found] == ["P3", "P1"]
    assert unreadable == ("P2.json",)


def test_write_failure_raises_draft_storage_error(tmp_path):
    (tmp_path / "promotions").write_text("a file where the directory should be")
    with pytest.raises(DraftStorageError, match="cannot write"):
        PromotionStore(tmp_path).write(promotion())


def test_prune_deletes_old_promotions_that_are_over(tmp_path):
    """Running ones are kept, to be ended."""
    store = PromotionStore(tmp_path)
    store.write(promotion("P000", stage=PromotionStage.RETURNING))
    for number in range(1, STORED + 10):
        store.write(promotion(f"P{number:03}", stage=PromotionStage.PROMOTED))
    store.prune()
    found, _ = store.list()
    assert len(found) == STORED + 1
    assert found[-1].promotion_id == "P000"
