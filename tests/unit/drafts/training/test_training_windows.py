"""
Every answer token once a pass, the same again.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.training.training_recipe import learning_rate, timed_rate
from appliance.drafts.training.windows import FIRST_PREDICTED, Feed, FeedPosition, cut, plan_epoch
from appliance.errors import DraftRefusedError


@dataclass
class Text:
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


texts = st.lists(st.booleans(), max_size=300).map(
    lambda mask: Text(token_ids=tuple(range(len(mask))), loss_mask=tuple(mask))
)
windows = st.integers(min_value=20, max_value=80)


def trained(text: Text, found: list) -> Counter[int]:
    """How often each token of a text is to be predicted."""
    return Counter(
        place
        for window in found
        for place in range(max(window.first, window.start + FIRST_PREDICTED), window.stop)
        if text.loss_mask[place]
    )


@given(text=texts, window=windows, data=st.data())
def test_each_answer_token_is_trained_on_once(text, window, data):
    """Wherever the cuts are; only the first two tokens of a text cannot be predicted."""
    shift = data.draw(st.integers(min_value=0, max_value=window - window // 4 - 1))
    found = cut(text, 7, window=window, shift=shift)
    answer = [at for at, counts in enumerate(text.loss_mask) if counts and at >= FIRST_PREDICTED]
    assert trained(text, found) == Counter(answer)
    assert all(0 <= each.start < each.stop <= len(text.token_ids) and each.text == 7 for each in found)
    assert all(each.length <= window for each in found)


@given(text=texts, window=windows)
def test_piece_has_context_before_it(text, window):
    """A quarter of a window, or all there is."""
    for each in cut(text, 0, window=window):
        assert each.start == 0 or each.first - each.start >= window // 4


def test_tokens_after_the_answer_are_dropped():
    text = Text(tuple(range(30)), (False,) * 5 + (True,) * 5 + (False,) * 20)
    (window,) = cut(text, 0, window=40)
    assert (window.start, window.stop) == (0, 10)


@given(
    some=st.lists(texts, min_size=1, max_size=12),
    batch=st.integers(min_value=1, max_value=5),
    window=windows,
    epoch=st.integers(min_value=0, max_value=3),
)
def test_epoch_is_complete_and_deterministic(some, batch, window, epoch):
    """Every answer token of every text, once, in steps of at most a batch."""
    steps = plan_epoch(some, batch=batch, window=window, seed=5, epoch=epoch)
    assert steps == plan_epoch(some, batch=batch, window=window, seed=5, epoch=epoch)
    assert all(1 <= len(step) <= batch for step in steps)
    for number, text in enumerate(some):
        found = [each for step in steps for each in step if each.text == number]
        answer = [at for at, counts in enumerate(text.loss_mask) if counts and at >= FIRST_PREDICTED]
        assert trained(text, found) == Counter(answer)


def test_epochs_differ():
    some = [Text(tuple(range(200)), (True,) * 200) for _ in range(8)]
    first, second = (plan_epoch(some, batch=2, window=40, seed=1, epoch=epoch) for epoch in (0, 1))
    assert first != second
    assert {each.first for step in first for each in step} != {each.first for step in second for each in step}


@given(taken=st.integers(min_value=0, max_value=40))
def test_feed_resumes_at_a_position(taken):
    some = [Text(tuple(range(60)), (False,) * 10 + (True,) * 50) for _ in range(5)]

    def feed(place: FeedPosition | None = None) -> Feed:
        return Feed(some, batch=2, window=24, seed=3, place=place)

    whole = feed()
    expected = [whole.next_step() for _ in range(taken + 10)]
    before = feed()
    for _ in range(taken):
        before.next_step()
    after = feed(before.place)
    assert [after.next_step() for _ in range(10)] == expected[taken:]


def test_data_without_an_answer_is_refused():
    with pytest.raises(DraftRefusedError, match="harvest more"):
        Feed([Text((1, 2, 3), (False,) * 3)], batch=2, window=24, seed=3)


def test_rate_rises_then_falls_to_a_tenth():
    by_step = [learning_rate(step, 1000, 1e-3) for step in range(1000)]
    by_time = [timed_rate(second, 1000.0, 1e-3) for second in range(1000)]
    for rates in (by_step, by_time):
        top = rates.index(max(rates))
        assert 30 <= top <= 50
        assert rates[top] == pytest.approx(1e-3, rel=0.02)
        assert rates[:top] == sorted(rates[:top])
        assert rates[top:] == sorted(rates[top:], reverse=True)
        assert rates[-1] == pytest.approx(1e-4, rel=0.01)
    assert timed_rate(5000.0, 1000.0, 1e-3) == pytest.approx(1e-4, rel=0.01)
