"""Who has seen a conversation's beginning."""

import json

from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.affinity import LENGTHS, Affinity, prefixes
from appliance.serving.worker import WorkerId

A, B = WorkerId("a"), WorkerId("b")
WORDS = " ".join(str(number) for number in range(10_000))


def turns(count: int, size: int = 600) -> str:
    """Return the messages of a conversation of so many turns, as clients spell them."""
    return json.dumps([{"role": "user", "content": f"{number}: " + "x" * size} for number in range(count)])


def test_continued_conversation_is_recognised():
    """What the next turn repeats is what was remembered, to the part of a block that is cut."""
    affinity = Affinity(100)
    affinity.record(prefixes("acme", "demo", turns(4)), A)
    assert affinity.find(prefixes("acme", "demo", turns(7))) == {A: 2048}


def test_prefixes_are_not_shared_between_tenants_or_models():
    """Equal text does not reveal who else sent it."""
    affinity = Affinity(100)
    affinity.record(prefixes("acme", "demo", WORDS), A)
    assert affinity.find(prefixes("other", "demo", WORDS)) == {}
    assert affinity.find(prefixes("acme", "large", WORDS)) == {}


def test_short_text_has_no_prefixes():
    """It is computed as fast as it is looked up."""
    assert prefixes("acme", "demo", "x" * (LENGTHS[0] - 1)) == ()
    assert Affinity(100).find(()) == {}


def test_longest_prefix_counts():
    """A shared system prompt leads to one worker, the conversation after it to another."""
    affinity, system = Affinity(100), "s" * 1024
    affinity.record(prefixes("acme", "demo", system + "u" * 4096), A)
    affinity.record(prefixes("acme", "demo", system + "v" * 4096), B)
    assert affinity.find(prefixes("acme", "demo", system + "u" * 4096)) == {A: 4096}
    assert affinity.find(prefixes("acme", "demo", system + "v" * 4096)) == {B: 4096}
    assert affinity.find(prefixes("acme", "demo", system + "w" * 4096)) == {B: 1024}


def test_least_recently_used_prefix_is_evicted():
    """Memory is bounded."""
    affinity = Affinity(3)
    for number in range(5):
        affinity.record((number,), A)
        affinity.record((0,), A)
    assert len(affinity) == 3
    assert affinity.find((0,)) == {A: LENGTHS[0]}
    assert affinity.find((1,)) == {}


@given(st.text(max_size=40).map(lambda text: text * 600), st.integers(0, 30_000))
def test_texts_share_hashes_exactly_as_far_as_they_are_equal(text: str, cut: int):
    """Up to the last length that both have in common."""
    other = text[:cut] + "\x00" + text[cut + 1 :]
    common = next((at for at, (x, y) in enumerate(zip(text, other, strict=False)) if x != y), len(text))
    mine, theirs = prefixes("t", "m", text), prefixes("t", "m", other)
    same = sum(1 for x, y in zip(mine, theirs, strict=False) if x == y)
    whole = sum(1 for length in LENGTHS if length <= min(common, len(text), len(other)))
    assert same == whole
    assert mine[:same] == theirs[:same]
