"""Frequent labels get a series, invented ones do not."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.infra.metrics.cardinality import HeavyHitters

A, B, C = ("a",), ("b",), ("c",)


class Seen:
    """Heavy hitters that record which labels were forgotten."""

    def __init__(self, *, most: int = 2, often: int = 3, among: int = 10) -> None:
        self.gone: list[tuple[str, ...]] = []
        self.heavy_hitters = HeavyHitters(most=most, often=often, among=among, on_gone=self.gone.append)

    def saw(self, *labels: tuple[str, ...]) -> list[bool]:
        return [self.heavy_hitters.observe(each) for each in labels]


def test_frequent_label_gets_a_series():
    """It keeps it."""
    assert Seen().saw(A, A, A, A) == [False, False, True, True]


def test_rare_labels_never_get_a_series():
    """Such as a system prompt that contains the time of day, or an attacker's."""
    seen = Seen()
    assert not any(seen.saw(*((str(number),) for number in range(1000))))
    assert seen.saw(A, A, A)[-1]


def test_sightings_long_ago_do_not_count():
    """Only those of the last one to two spans."""
    seen = Seen()
    seen.saw(A, A, *((str(number),) for number in range(30)))
    assert seen.saw(A) == [False]


def test_frequent_labels_are_bounded():
    """A third one waits."""
    seen = Seen()
    assert seen.saw(A, A, A, B, B, B)[-1]
    assert not any(seen.saw(C, C, C, C))
    assert seen.gone == []


def test_absent_labels_make_room():
    """An old template does not block a new one."""
    seen = Seen()
    seen.saw(A, A, A, B, B, B)
    assert seen.saw(*[B, C] * 20)[-1]
    assert seen.gone == [A]
    assert seen.saw(A) == [False]


@given(st.lists(st.integers(0, 60), max_size=400), st.integers(1, 5), st.integers(1, 4), st.integers(1, 20))
def test_labels_and_memory_are_bounded(sightings, most, often, among):
    """At most `most` names, and counts of two spans."""
    seen, named = Seen(most=most, often=often, among=among), set()
    for number in sightings:
        if seen.heavy_hitters.observe((str(number),)):
            named.add((str(number),))
        named -= set(seen.gone)
        seen.gone.clear()
        assert len(named) <= most
        assert len(seen.heavy_hitters._current) + len(seen.heavy_hitters._previous) <= 2 * among
