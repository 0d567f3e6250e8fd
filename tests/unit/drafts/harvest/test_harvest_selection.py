"""The selection is limited, fair, stratified and deterministic."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.harvest.candidate import HarvestCandidate
from appliance.drafts.harvest.selection import SampleSelection, SelectionLimits

TENANTS = ("acme", "clinic", "court")
TEMPLATES = ("chat-1", "chat-2", "raw-plain")
CONTEXTS = ("0-1k", "1k-2k")


def candidate(number, tenant="acme", template="chat-1", context="0-1k", tokens=10):
    return HarvestCandidate(
        request_id=f"{number:026d}",
        tenant=tenant,
        template=template,
        context=context,
        route="/v1/chat/completions",
        prompt_tokens=tokens - 3,
        completion_tokens=3,
    )


@st.composite
def candidates(draw):
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(TENANTS),
                st.sampled_from(TEMPLATES),
                st.sampled_from(CONTEXTS),
                st.integers(4, 60),
            ),
            max_size=60,
        )
    )
    return [candidate(number, *row) for number, row in enumerate(rows)]


BOUNDS = st.builds(
    SelectionLimits,
    samples=st.integers(1, 70),
    tokens=st.none() | st.integers(1, 1500),
    per_stratum=st.none() | st.integers(1, 20),
)


def choose(given_, bounds, *, seed="1", useless=frozenset()):
    """The selection if some candidates are unusable."""
    selection, chosen = SampleSelection(given_, bounds, seed=seed), []
    while (found := selection.next()) is not None:
        if found.request_id not in useless and selection.take(found):
            chosen.append(found)
    return chosen, selection


@given(candidates(), BOUNDS, st.sets(st.integers(0, 59)))
def test_selection_respects_limits_and_takes_nothing_twice(given_, bounds, useless):
    chosen, selection = choose(given_, bounds, useless={f"{number:026d}" for number in useless})
    assert len({each.request_id for each in chosen}) == len(chosen) <= bounds.samples
    tokens = sum(each.tokens for each in chosen)
    assert selection.tokens == tokens
    assert bounds.tokens is None or tokens <= bounds.tokens
    strata = Counter(each.stratum for each in chosen)
    assert bounds.per_stratum is None or max(strata.values(), default=0) <= bounds.per_stratum
    assert set(chosen) <= set(given_)


@given(candidates(), st.integers(0, 40), st.sets(st.integers(0, 59)))
def test_every_usable_stratum_is_sampled_if_limits_allow(given_, more, useless):
    useless = {f"{number:026d}" for number in useless}
    wanted = {each.stratum for each in given_ if each.request_id not in useless}
    chosen, _ = choose(given_, SelectionLimits(samples=max(1, len(wanted) + more)), useless=useless)
    assert {each.stratum for each in chosen} == wanted


@given(candidates(), st.integers(1, 60))
def test_no_tenant_exceeds_its_fair_share(given_, samples):
    chosen, _ = choose(given_, SelectionLimits(samples=samples))
    counts = Counter(each.tenant for each in chosen)
    there = Counter(each.tenant for each in given_)
    # At most one for each stratum is taken out of turn.
    strata = len({each.stratum for each in given_})
    for behind in TENANTS:
        if counts[behind] < there[behind]:
            for ahead in TENANTS:
                assert counts[ahead] <= max(counts[behind] + 1, strata)


def test_rare_stratum_is_kept_next_to_a_single_stratum_tenant():
    given_ = [candidate(number, "acme", template="common") for number in range(50)]
    given_ += [candidate(100 + number, "clinic", template=f"rare-{number}") for number in range(9)]
    chosen, _ = choose(given_, SelectionLimits(samples=10))
    assert len({each.template for each in chosen}) == 10


def test_two_equal_tenants_get_equal_shares():
    given_ = [candidate(number, "acme") for number in range(100)]
    given_ += [candidate(1000 + number, "clinic") for number in range(100)]
    given_ += [candidate(2000 + number, "court") for number in range(3)]
    chosen, _ = choose(given_, SelectionLimits(samples=43))
    assert Counter(each.tenant for each in chosen) == {"acme": 20, "clinic": 20, "court": 3}


def test_strata_of_a_tenant_are_filled_evenly():
    given_ = [candidate(number, template="chat-1") for number in range(50)]
    given_ += [candidate(100 + number, template="chat-2") for number in range(50)]
    given_ += [candidate(200 + number, template="raw-plain") for number in range(2)]
    chosen, _ = choose(given_, SelectionLimits(samples=22))
    assert Counter(each.template for each in chosen) == {"chat-1": 10, "chat-2": 10, "raw-plain": 2}


def test_tenant_with_many_templates_does_not_crowd_out_others():
    given_ = [candidate(number, "acme", template=f"chat-{number}") for number in range(500)]
    given_ += [candidate(1000 + number, "clinic", template=f"mine-{number}") for number in range(500)]
    chosen, _ = choose(given_, SelectionLimits(samples=40))
    assert Counter(each.tenant for each in chosen) == {"acme": 20, "clinic": 20}


@given(candidates(), BOUNDS, st.randoms())
def test_same_candidates_and_seed_give_the_same_choice(given_, bounds, chance):
    shuffled = list(given_)
    chance.shuffle(shuffled)
    assert choose(given_, bounds)[0] == choose(shuffled, bounds)[0]


def test_another_seed_gives_another_choice():
    given_ = [candidate(number) for number in range(200)]
    first, second = (choose(given_, SelectionLimits(samples=20), seed=seed)[0] for seed in "ab")
    assert len(first) == len(second) == 20
    assert first != second


@given(candidates(), BOUNDS)
def test_every_candidate_is_taken_left_or_over_the_limit(given_, bounds):
    chosen, selection = choose(given_, bounds)
    assert len(chosen) + selection.left + selection.without_room == len(given_)


def test_sample_over_the_token_limit_is_not_taken():
    """The worker's count is used for the choice, and the real count is checked."""
    selection = SampleSelection([candidate(1, tokens=10)], SelectionLimits(samples=5, tokens=12), seed="1")
    found = selection.next()
    assert not selection.take(found, 13)
    assert (selection.samples, selection.tokens, selection.without_room) == (0, 0, 1)


def test_selection_stops_at_the_sample_limit():
    selection = SampleSelection(
        [candidate(number) for number in range(5)], SelectionLimits(samples=2), seed="1"
    )
    for _ in range(2):
        assert selection.take(selection.next())
    assert selection.next() is None
    assert selection.left == 3
