"""The prompts of an evaluation: held out, complete, deterministic, of all kinds of traffic."""

import random

from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.evaluation.arms import choose_prompts, prompt_of, split_rounds
from tests.unit.drafts.evaluation.evaluation_parts import prompt, sample


def test_prompt_is_everything_before_the_first_answer_token():
    """Including earlier turns of the conversation."""
    asked = sample(1, loss_mask=(False,) * 3 + (True,) * 2 + (False,) * 3 + (True,) * 2)
    found = prompt_of(asked)
    assert found.token_ids == asked.token_ids[:3]
    assert (found.request_id, found.template, found.context) == ("request-1", "chat-1", "0-1k")
    assert found.salt == asked.salt


def test_sample_without_prompt_or_answer_is_not_used():
    assert prompt_of(sample(1, loss_mask=(False,) * 10)) is None
    assert prompt_of(sample(1, loss_mask=(True,) * 10)) is None


def test_unusable_samples_are_counted():
    samples = [sample(1), sample(2, loss_mask=(False,) * 10), sample(3, prompt_tokens=50)]
    found = choose_prompts(samples, count=10, room=20)
    assert [each.request_id for each in found.prompts] == ["request-1"]
    assert found.unusable == 2


def test_a_prompt_as_long_as_the_room_is_used():
    assert len(choose_prompts([sample(1, prompt_tokens=20)], count=1, room=20).prompts) == 1


@given(st.randoms(use_true_random=False), st.integers(0, 40))
def test_choice_does_not_depend_on_the_reading_order(dice: random.Random, count):
    """A resumed evaluation asks the same prompts."""
    samples = [sample(place) for place in range(30)]
    first = choose_prompts(samples, count=count, room=100)
    dice.shuffle(samples)
    assert choose_prompts(samples, count=count, room=100) == first
    assert len(first.prompts) == min(count, 30)


def test_chosen_prompts_are_spread_over_the_data_set():
    chosen = choose_prompts(map(sample, range(1000)), count=100, room=100).prompts
    places = [int(each.request_id.removeprefix("request-")) for each in chosen]
    assert 40 <= sum(place < 500 for place in places) <= 60
    assert {each.template for each in chosen} == {"chat-0", "chat-1"}
    assert len({each.seed for each in chosen}) == 100


@given(st.integers(0, 200))
def test_rounds_contain_every_prompt_once_in_nearly_equal_sizes(count):
    """At most sixteen rounds, none of one prompt unless it is the only round."""
    prompts = tuple(prompt(place) for place in range(count))
    rounds = split_rounds(prompts)
    sizes = [len(each) for each in rounds]
    assert sorted(each.seed for part in rounds for each in part) == list(range(count))
    assert 1 <= len(rounds) <= 16
    assert len(rounds) <= 8 or min(sizes) >= 4
    assert max(sizes) - min(sizes) <= 1
    assert len(rounds) == 1 or min(sizes) >= 2
