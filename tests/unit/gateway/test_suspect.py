"""Faults are reported within 20 requests, ordinary sessions hardly ever; what repeats becomes ordinary."""

import math
import random
from collections.abc import Iterator

import pytest

from appliance.gateway.suspect import BLOCK_REQUESTS, LEAST_DRAFTS, MAX_KEYS, SuspectAnswers, Suspicion
from appliance.serving.worker import WorkerId

W1, W2 = WorkerId("w1"), WorkerId("w2")
USUAL = -1.2
"""Log-odds that a first draft token is rejected: about a quarter."""


class Traffic:
    """Answers of log-normal length, judged one after the other; a draft's fate is drawn on its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.suspects = SuspectAnswers()

    def drafts(self) -> int:
        return min(600, max(LEAST_DRAFTS, round(self.random.lognormvariate(3.6, 0.9))))

    def judge(
        self,
        log_odds: float,
        *,
        drafts: int | None = None,
        tenant: str = "acme",
        worker: WorkerId = W1,
        template: str = "raw-plain",
    ) -> Suspicion | None:
        drafts, rate = drafts or self.drafts(), 1 / (1 + math.exp(-log_odds))
        rejected = sum(self.random.random() < rate for _ in range(drafts))
        return self.suspects.judge(
            tenant=tenant, model="demo", template=template, worker=worker, drafts=drafts, rejected=rejected
        )

    def independent(self, count: int) -> list[Suspicion | None]:
        """Requests of one kind, spread over two workers."""
        gauss, choice = self.random.gauss, self.random.choice
        return [self.judge(gauss(USUAL, 0.6), worker=choice((W1, W2))) for _ in range(count)]

    def sessions(self, count: int, length: int = 30) -> Iterator[Suspicion | None]:
        """Sessions of similar requests on one worker; one of fifty is of a kind that is hardly accepted."""
        gauss = self.random.gauss
        for _ in range(0, count, length):
            level = 3.2 if self.random.random() < 1 / 50 else gauss(USUAL, 0.8)
            worker = self.random.choice((W1, W2))
            for _ in range(length):
                yield self.judge(gauss(level, 0.25), worker=worker)


@pytest.mark.parametrize("seed", range(31, 35))
def test_ten_thousand_ordinary_requests_raise_fewer_than_ten_alarms(seed: int) -> None:
    assert sum(found is not None for found in Traffic(seed).sessions(10_000)) < 10


@pytest.mark.parametrize("seed", range(31, 41))
@pytest.mark.parametrize(("log_odds", "expected"), [(-4.5, Suspicion.HIGH), (3.2, Suspicion.LOW)])
def test_a_fault_of_one_worker_is_found_within_twenty_of_its_requests(
    seed: int, log_odds: float, expected: Suspicion
) -> None:
    traffic = Traffic(seed)
    traffic.independent(1000 + seed)
    found = [traffic.judge(log_odds) for _ in range(20)]
    assert set(found) == {None, expected}


def test_a_new_level_is_reported_a_few_times_and_then_ordinary() -> None:
    traffic = Traffic(31)
    traffic.independent(1000)
    found = [traffic.judge(4.0) for _ in range(400)]
    assert 1 <= sum(each is not None for each in found) <= 4
    assert set(found[100:]) == {None}


@pytest.mark.parametrize("tenant", ["acme", "new"])
def test_a_useless_draft_of_a_new_template_is_no_suspect_answer(tenant: str) -> None:
    traffic = Traffic(31)
    traffic.independent(1000)
    assert {traffic.judge(6.0, tenant=tenant, template="chat-00000000") for _ in range(1000)} == {None}


def test_short_answers_neither_judge_nor_fill_the_history() -> None:
    traffic = Traffic(31)
    for _ in range(1000):
        assert traffic.judge(0.0, drafts=LEAST_DRAFTS - 1) is None
    assert {traffic.judge(level) for level in (-1.0, 6.0) for _ in range(40)} == {None}


def test_a_worker_that_fails_for_all_tenants_is_found_before_one_has_a_history() -> None:
    traffic = Traffic(31)
    tenants = [f"tenant-{number}" for number in range(60)]
    for _ in range(10):
        for tenant in tenants:
            assert traffic.judge(traffic.random.gauss(USUAL, 0.6), tenant=tenant) is None
    found = [traffic.judge(3.2, tenant=tenant) for tenant in tenants[: 2 * BLOCK_REQUESTS]]
    assert Suspicion.LOW in found


def test_histories_are_bounded() -> None:
    traffic = Traffic(31)
    for number in range(2 * MAX_KEYS):
        traffic.judge(USUAL, tenant=f"tenant-{number}", worker=WorkerId(f"w{number}"))
    assert len(traffic.suspects._histories) == MAX_KEYS
