"""Read back as they were, and one that is damaged stops no other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.promotion.promotion import LONGEST_TIMELINE, Numbers, Promotion, Stage, decode
from appliance.drafts.promotion.store import KEPT, PromotionStore
from appliance.errors import DraftStorageError

DIGEST = f"sha256:{'a' * 64}"


def promotion(name: str = "P1", **more) -> Promotion:
    said = {
        "promotion_id": name,
        "kind": "promotion",
        "target": DIGEST,
        "model": "demo",
        "draft": DIGEST,
        "incumbent": "",
        "actor": "k1",
        "began": "2026-11-22T10:00:00.000Z",
        "stage": Stage.BEGUN,
    }
    return Promotion(**{**said, **more})


TEXT = st.text(max_size=20)


@given(
    st.sampled_from(Stage),
    st.one_of(st.none(), st.sampled_from(Stage)),
    st.lists(TEXT, max_size=3),
    st.one_of(st.none(), st.floats(0.1, 9.0)),
    TEXT,
)
def test_what_was_written_is_read(stage, outcome, workers, length, text):
    """Every field, whatever is in it."""
    numbers = Numbers(drafts=3, acceptance_length=length)
    made = promotion(outcome=outcome, workers=tuple(workers), numbers=numbers, reason=text)
    moved = made.moved(stage, text, "2026-11-22T10:00:01.000Z", waits=text)
    assert decode(moved.encode()) == moved


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"stage": "begun"}'])
def test_what_is_no_promotion_is_refused(text):
    """In one way, so that one handler is enough."""
    with pytest.raises(ValueError):  # noqa: PT011 - it is a JSON error or ours, and both are one
        decode(text)


@given(st.data())
def test_a_damaged_file_never_reads_as_something_else_than_a_promotion(data):
    """It reads as one, or it is refused as such."""
    text = promotion().moved(Stage.TRIAL, "x", "t").encode()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from('"{}[],:0a')) + text[at + 1 :]
    try:
        found = decode(changed)
    except ValueError:
        return
    assert isinstance(found.stage, Stage)


def test_a_long_promotion_keeps_its_beginning_and_its_end():
    """Of very many workers, those in the middle go."""
    made = promotion()
    for number in range(200):
        made = made.moved(Stage.ROLLOUT, f"worker {number}", "t")
    texts = [step.text for step in made.timeline]
    assert (texts[0], texts[-1]) == ("worker 0", "worker 199")
    assert len(texts) <= LONGEST_TIMELINE


def test_the_newest_comes_first_and_a_damaged_one_is_named(tmp_path):
    """The others are there all the same."""
    store = PromotionStore(tmp_path)
    assert store.list() == ((), ())
    for name in ("P1", "P3", "P2"):
        store.write(promotion(name))
    (tmp_path / "promotions" / "P2.json").write_text("{")
    found, unreadable = store.list()
    assert [each.promotion_id for each in found] == ["P3", "P1"]
    assert unreadable == ("P2.json",)


def test_a_disk_that_takes_nothing_says_so(tmp_path):
    """Before anything is begun."""
    (tmp_path / "promotions").write_text("a file where the directory should be")
    with pytest.raises(DraftStorageError, match="cannot write"):
        PromotionStore(tmp_path).write(promotion())


def test_old_ones_are_forgotten_once_they_are_over(tmp_path):
    """What is not over is kept for whoever has to end it."""
    store = PromotionStore(tmp_path)
    store.write(promotion("P000", stage=Stage.RETURNING))
    for number in range(1, KEPT + 10):
        store.write(promotion(f"P{number:03}", stage=Stage.PROMOTED))
    store.prune()
    found, _ = store.list()
    assert len(found) == KEPT + 1
    assert found[-1].promotion_id == "P000"
