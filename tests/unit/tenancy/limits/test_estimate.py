"""What a request is reserved for."""

import json

import pytest

from appliance.infra.json_members import parse_members
from appliance.serving.dialects.routes import ROUTES
from appliance.tenancy.limits.estimate import MEDIA_TOKENS, MOST_TOKENS, size_of

GUESS = 512


def estimate(**members):
    text = json.dumps(members, ensure_ascii=False)
    read = parse_members(text)
    sequences = ROUTES["/v1/completions"].sequences(read)
    return size_of(text, read, sequences=sequences).estimate(GUESS)


def test_a_prompt_is_a_third_of_its_bytes():
    """English takes fewer tokens, other scripts about as many."""
    assert estimate(prompt="x" * 300).prompt == pytest.approx(105, abs=5)
    assert estimate(prompt="ሰላም" * 100).prompt == pytest.approx(305, abs=5)


@pytest.mark.parametrize(
    ("members", "completion"),
    [
        ({"max_tokens": 10}, 10),
        ({"max_completion_tokens": 20, "max_tokens": 10}, 20),
        ({"max_output_tokens": 30}, 30),
        ({"max_tokens": 10, "n": 3}, 30),
        ({"max_tokens": 10, "n": 2, "best_of": 5}, 50),
        ({"max_tokens": 10.0, "n": 3.0}, 30),
        ({"max_tokens": 10, "prompt": ["a", "b"], "n": 3}, 60),
        ({"max_tokens": 10, "prompt": [[1, 2], [3], [4]]}, 30),
        ({"max_tokens": 10, "prompt": [1, 2, 3]}, 10),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 10**30}, MOST_TOKENS),
    ],
)
def test_completion_estimate_is_the_clients_maximum(members, completion):
    found = estimate(**members)
    assert found.completion == completion
    assert not found.is_guess


@pytest.mark.parametrize("value", [None, True, -1, "10", 1.5, [10]])
def test_completion_without_maximum_is_guessed(value):
    """What is no count is none: whether it may be there is the worker's to judge."""
    found = estimate(max_tokens=value)
    assert (found.completion, found.is_guess) == (GUESS, True)


def test_a_prompt_that_looks_like_media_counts_as_text():
    """Only the value of a member can be media, not a prompt in a list nor a part of a text."""
    data = "data:text/plain;base64," + "A" * 2**20
    assert estimate(prompt=["x", data]).prompt > 2**20 / 4
    assert estimate(prompt=f'{{"url": "{data}"}}').prompt > 2**20 / 4


def test_bytes_of_a_picture_do_not_count_as_tokens():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**20}}
    found = estimate(messages=[{"role": "user", "content": [picture, picture]}])
    assert 2 * MEDIA_TOKENS <= found.prompt < 2 * MEDIA_TOKENS + 100
