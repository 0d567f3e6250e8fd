"""Attribution loses nothing but by age, and its memory stays bounded."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.attribution import OTHER, Aspect, Attribution, DraftTally, context_bucket
from appliance.tenancy import NAME_FORMAT
from tests.clock import Clock

LABEL_KEY = bytes(range(16))
WINDOW = 600
REQUESTS = st.builds(
    lambda tenant, model, template, context, drafts, per_draft, accepted: {
        "tenant": tenant,
        "model": model,
        "template": template,
        "context": context,
        "drafts": drafts,
        "draft_tokens": drafts * per_draft,
        "accepted_tokens": drafts * min(per_draft, accepted),
        "completion_tokens": drafts * (1 + min(per_draft, accepted)),
    },
    st.sampled_from(["acme", "bank", "clinic"]),
    st.sampled_from(["demo", "large"]),
    st.sampled_from(["raw-plain", "chat-00000000", "chat-11111111"]),
    st.sampled_from(["0-1k", "1k-2k"]),
    st.integers(1, 100),
    st.integers(1, 4),
    st.integers(0, 4),
)
COUNTS = ("drafts", "draft_tokens", "accepted_tokens", "completion_tokens")


@pytest.fixture
def clock() -> Clock:
    return Clock(5000.0)


@pytest.fixture
def attribution(clock: Clock) -> Attribution:
    """An aggregator without a minimum number of drafts."""
    return Attribution(label_key=LABEL_KEY, clock=clock, window_seconds=WINDOW, min_drafts=1)


def record(attribution: Attribution, *, drafts: int = 10, accepted: int = 10, **key: str) -> None:
    """Count one request with three draft tokens per draft."""
    attribution.record(
        **{"tenant": "acme", "model": "demo", "template": "raw-plain", "context": "0-1k", **key},
        drafts=drafts,
        draft_tokens=3 * drafts,
        accepted_tokens=accepted,
        completion_tokens=drafts + accepted,
    )


def counted(requests: list[dict]) -> DraftTally:
    return DraftTally(
        requests=len(requests), **{name: sum(request[name] for request in requests) for name in COUNTS}
    )


@given(st.lists(REQUESTS, max_size=40), st.integers(1, 4))
def test_every_request_is_counted_however_few_keys_are_kept(requests: list[dict], max_keys: int):
    """Overall and by every aspect the shares add up to the requests; the number of keys stays bounded."""
    attribution = Attribution(label_key=LABEL_KEY, clock=Clock(5e3), max_keys=max_keys, min_drafts=0)
    for request in requests:
        attribution.record(**request)
    total = counted(requests)
    assert attribution.overall() == total
    for aspect in Aspect:
        shares = attribution.by(aspect)
        for name in ("requests", "drafts", "completion_tokens"):
            assert sum(getattr(share, name) for share in shares) == getattr(total, name)
        assert sum(share.wasted_draft_tokens for share in shares) == total.wasted_draft_tokens
    kept = attribution.offenders(1000)
    assert len(kept) == min(max_keys, len({tuple(request[a] for a in Aspect) for request in requests}))


@given(st.lists(st.tuples(st.integers(0, 3 * WINDOW), REQUESTS), max_size=20), st.integers(0, 3 * WINDOW))
def test_requests_count_for_one_to_two_windows(steps, wait: int):
    """A failing template shows for long enough, and not for ever."""
    clock = Clock(5000.0)
    attribution = Attribution(label_key=LABEL_KEY, clock=clock, window_seconds=WINDOW, max_keys=3)
    recorded = []
    for pause, request in steps:
        clock.now += pause
        attribution.record(**request)
        recorded.append((clock.now, request))
    clock.now += wait
    found = attribution.overall()
    young = counted([request for when, request in recorded if clock.now - when < WINDOW])
    not_old = counted([request for when, request in recorded if clock.now - when < 2 * WINDOW])
    for name, count in asdict(found).items():
        assert getattr(young, name) <= count <= getattr(not_old, name)


def test_the_least_recently_used_key_is_folded(clock: Clock):
    """Busy tenants keep their own key when others send one request."""
    attribution = Attribution(label_key=LABEL_KEY, clock=clock, max_keys=2, min_drafts=1)
    for tenant in ("acme", "bank", "acme", "clinic"):
        record(attribution, tenant=tenant)
    shares = {share.value: share.requests for share in attribution.by(Aspect.TENANT)}
    assert shares == {"acme": 2, "clinic": 1, OTHER: 1}
    assert {row.tenant for row in attribution.offenders(10)} == {"acme", "clinic"}


def test_no_tenant_can_be_named_other():
    """A tenant of that name would be charged with the folded keys."""
    assert NAME_FORMAT.fullmatch(OTHER) is None


def test_the_most_wasteful_key_below_overall_acceptance_comes_first(attribution: Attribution):
    """A busy tenant with a good draft wastes more tokens in total, but is not the cause."""
    record(attribution, tenant="busy", drafts=10_000, accepted=20_000)
    record(attribution, tenant="failing", drafts=400, accepted=20)
    record(attribution, tenant="weak", drafts=400, accepted=600)
    rows = attribution.offenders(10)
    assert [row.tenant for row in rows] == ["failing", "weak", "busy"]
    assert rows[2].wasted_draft_tokens > rows[0].wasted_draft_tokens == 1180
    assert rows[0].acceptance_length == pytest.approx(1.05)
    assert rows[0].acceptance_rate == pytest.approx(20 / 1200)
    assert attribution.offenders(1) == rows[:1]


def test_a_key_with_few_drafts_is_not_an_offender(clock: Clock):
    """Chance is not a cause; the requests still count in every sum."""
    attribution = Attribution(label_key=LABEL_KEY, clock=clock, min_drafts=50)
    record(attribution, drafts=49, accepted=0)
    assert attribution.offenders(10) == ()
    assert attribution.overall().drafts == 49
    record(attribution, drafts=1, accepted=0)
    assert [row.drafts for row in attribution.offenders(10)] == [50]


def test_traffic_is_broken_down_by_template(attribution: Attribution):
    """It shows on which template the draft fails."""
    record(attribution, tenant="acme", template="chat-aaaaaaaa", accepted=20)
    record(attribution, tenant="bank", template="chat-bbbbbbbb", accepted=1)
    record(attribution, tenant="acme", template="chat-bbbbbbbb", accepted=1)
    worst, best = attribution.by(Aspect.TEMPLATE)
    assert (worst.value, worst.requests, worst.acceptance_length) == ("chat-bbbbbbbb", 2, pytest.approx(1.1))
    assert (best.value, best.requests, best.acceptance_length) == ("chat-aaaaaaaa", 1, pytest.approx(3.0))


@pytest.mark.parametrize(
    ("tokens", "label"),
    [
        (0, "0-1k"), (1023, "0-1k"), (1024, "1k-2k"), (2047, "1k-2k"), (2048, "2k-4k"), (4096, "4k-8k"),
        (65_535, "32k-64k"), (65_536, "64k-128k"), (131_071, "64k-128k"), (131_072, "128k+"),
        (10**9, "128k+"),
    ],
)  # fmt: skip
def test_context_buckets_are_powers_of_two(tokens: int, label: str):
    """A bucket includes its lower bound and excludes its upper one."""
    assert context_bucket(tokens) == label


@given(st.lists(st.integers(0, 2**40), max_size=200))
def test_there_are_nine_context_buckets(tokens: list[int]):
    """A label set that grows with the traffic would not be bounded."""
    known = {context_bucket(1024 * factor) for factor in (0, 1, 2, 4, 8, 16, 32, 64, 128)}
    assert len(known) == 9
    assert {context_bucket(count) for count in tokens} <= known
