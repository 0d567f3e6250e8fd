"""
Several gateways over one book, in any order of events: the limits hold, and nothing leaks.

Gateways ask late, ask twice, lose answers, are killed and start again; requests come, stay and end
whenever they like.  What is checked is not what the book says but what was let in.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.estimate import TokenEstimate
from appliance.tenancy.limits.ledger import (
    LeaseTerms,
    LedgerReply,
    TenantLedger,
    decode_ledger,
    encode_ledger,
    exchange,
)
from appliance.tenancy.limits.limiting import Reservation
from appliance.tenancy.limits.share import TenantShare

DAY = 86400
MIDNIGHT = 20_410.0 * DAY
TERMS = LeaseTerms(lease_seconds=4.0, renew_seconds=0.5, zone=ZoneInfo("UTC"))
LIMITS = Limits(
    requests_per_minute=7,
    tokens_per_minute=60,
    concurrent_requests=3,
    by_model={"small": Limits(tokens_per_minute=40, concurrent_requests=2)},
)
BUDGETS = Limits(tokens_per_day=100, by_model={"small": Limits(tokens_per_day=60, tokens_per_month=70)})
STEPS = 250


@dataclass(eq=False)
class Request:
    """A request that was admitted."""

    gateway: "SimulatedGateway"
    model: str
    began: float
    tokens: int
    """Reserved, or used once it has ended."""
    reservation: Reservation
    runs: bool = True
    counts: bool = True
    """Whether it still occupies a place: not if its gateway lost its lease or its life meanwhile."""


@dataclass(eq=False)
class SimulatedGateway:
    """A share, and the messages between it and the ledger."""

    name: str
    skew: float
    """Each monotonic clock has its own start; none is ever compared with another."""
    share: TenantShare
    asked: float = 0.0
    reply: LedgerReply | None = None
    waiting: list[tuple[str, int]] = field(default_factory=list)


class Simulation:
    """One history, determined by its seed."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.random, self.limits = random.Random(seed), limits
        # No event falls on midnight itself, which two clocks can read as either day.
        self.now = MIDNIGHT - self.random.choice([2.003, 6.003, 60.003])
        self.starts, self.ledger = 0, TenantLedger()
        self.requests: list[Request] = []
        self.gateways = [self.start_gateway() for _ in range(self.random.randint(1, 3))]
        self.busiest = (0, 0)
        steps: dict[Callable[[], None], int] = {
            self.wait_a_little: 8, self.wait_long: 1, self.ask: 8, self.settle: 6, self.report: 10,
            self.receive: 10, self.kill: 1,
        }  # fmt: skip
        for step in self.random.choices(list(steps), list(steps.values()), k=STEPS):
            step()
            running = [each.model for each in self.requests if each.runs and each.counts]
            self.busiest = max(self.busiest, (len(running), running.count("small")))

    def start_gateway(self) -> SimulatedGateway:
        self.starts += 1
        skew = self.random.uniform(-50, 50)
        return SimulatedGateway(name=f"g{self.starts}", skew=skew, share=TenantShare(self.limits))

    def clock(self, gateway: SimulatedGateway) -> float:
        return self.now - MIDNIGHT + gateway.skew

    def wait_a_little(self) -> None:
        self.wait(self.random.choice([0.01, 0.05, 0.3, 0.5, 1.0]))

    def wait_long(self) -> None:
        self.wait(self.random.choice([2.0, 3.9, 4.1, 30.0, 55.5, 59.9]))

    def wait(self, seconds: float) -> None:
        # In whole milliseconds: no sum strays to the other side of a midnight.
        self.now = MIDNIGHT + round((self.now - MIDNIGHT + seconds) * 1000) / 1000
        for request in self.requests:
            if self.clock(request.gateway) >= request.gateway.share.valid_until:
                request.counts = False

    def request_at_random(self) -> tuple[str, int]:
        return self.random.choice(["small", "big"]), self.random.randint(1, 30)

    def ask(self) -> None:
        self.admit(self.random.choice(self.gateways), *self.request_at_random())

    def admit(self, gateway: SimulatedGateway, model: str, tokens: int) -> None:
        need = gateway.share.need(model, TokenEstimate(prompt=tokens, completion=0))
        if (reservation := gateway.share.take(need, self.clock(gateway))) is not None:
            self.requests.append(Request(gateway, model, self.now, tokens, reservation))

    def settle(self) -> None:
        """A request ends, having used no more than was reserved for it; its end is reported twice."""
        if running := [each for each in self.requests if each.runs]:
            request = self.random.choice(running)
            request.tokens, request.runs = self.random.randint(0, request.tokens), False
            request.reservation.settle(request.tokens)
            request.reservation.settle(0)

    def report(self) -> None:
        """A report is sent, and applied, or lost on the way."""
        gateway = self.random.choice(self.gateways)
        if gateway.reply is not None:
            return
        gateway.waiting = [self.request_at_random() for _ in range(self.random.choice([0, 0, 1, 2, 9]))]
        needs = [
            gateway.share.need(model, TokenEstimate(prompt=tokens, completion=0))
            for model, tokens in gateway.waiting
        ]
        gateway.asked = self.clock(gateway)
        report = gateway.share.report(tuple(needs))
        if self.random.random() < 0.9:
            self.ledger = decode_ledger(encode_ledger(self.ledger))
            gateway.reply = exchange(
                self.ledger, gateway.share.quotas, gateway.name, report, now=self.now, terms=TERMS
            )

    def receive(self) -> None:
        """The answer arrives, perhaps late, or never; waiting requests are admitted."""
        gateway = self.random.choice(self.gateways)
        reply, gateway.reply = gateway.reply, None
        if reply is not None and self.random.random() < 0.9:
            gateway.share.apply_reply(reply, asked=gateway.asked, now=self.clock(gateway))
            for model, tokens in gateway.waiting:
                self.admit(gateway, model, tokens)

    def kill(self) -> None:
        """A gateway dies with all its requests, and another one starts, which knows nothing."""
        place = self.random.randrange(len(self.gateways))
        for request in self.requests:
            if request.gateway is self.gateways[place]:
                request.runs = request.counts = False
        self.gateways[place] = self.start_gateway()

    def end(self) -> None:
        """Every request ends, and every gateway returns what it holds."""
        for request in self.requests:
            if request.runs:
                request.runs = False
                request.reservation.settle(request.tokens)
        for gateway in self.gateways:
            gateway.reply = None
            for _ in range(2):  # what is in doubt is cleared up first
                self.round(gateway, leaves=True)

    def round(self, gateway: SimulatedGateway, *, leaves: bool = False) -> None:
        report = gateway.share.report((), leaves=leaves)
        reply = exchange(self.ledger, gateway.share.quotas, gateway.name, report, now=self.now, terms=TERMS)
        gateway.share.apply_reply(reply, asked=self.clock(gateway), now=self.clock(gateway))


def fullest(requests: list[Request]) -> tuple[int, int, int]:
    """Most requests, tokens, and tokens of the small model that began in any one minute."""
    most = (0, 0, 0)
    for last in requests:
        minute = [each for each in requests if last.began - 60 < each.began <= last.began]
        found = (
            len(minute),
            sum(each.tokens for each in minute),
            sum(each.tokens for each in minute if each.model == "small"),
        )
        most = tuple(map(max, most, found))
    return most


@given(seed=st.integers(0, 2**32))
def test_no_interleaving_exceeds_a_limit(seed):
    simulation = Simulation(seed, LIMITS)
    small = LIMITS.by_model["small"]
    requests, tokens, tokens_of_small = fullest(simulation.requests)
    assert requests <= LIMITS.requests_per_minute
    assert tokens <= LIMITS.tokens_per_minute
    assert tokens_of_small <= small.tokens_per_minute
    assert simulation.busiest[0] <= LIMITS.concurrent_requests
    assert simulation.busiest[1] <= small.concurrent_requests


def spent(simulation: Simulation, *, until_midnight: bool, model: str | None = None) -> int:
    """Tokens of the requests that began before midnight, or after."""
    return sum(
        each.tokens
        for each in simulation.requests
        if (each.began < MIDNIGHT) == until_midnight and model in {None, each.model}
    )


@given(seed=st.integers(0, 2**32))
def test_no_interleaving_exceeds_a_budget(seed):
    """On either side of a midnight, which ends what was held of the day before."""
    simulation = Simulation(seed, BUDGETS)
    small = BUDGETS.by_model["small"]
    for until_midnight in (True, False):
        assert spent(simulation, until_midnight=until_midnight) <= BUDGETS.tokens_per_day
        of_small = spent(simulation, until_midnight=until_midnight, model="small")
        assert of_small <= small.tokens_per_day
    assert sum(each.tokens for each in simulation.requests if each.model == "small") <= small.tokens_per_month


@given(seed=st.integers(0, 2**32), limits=st.sampled_from([LIMITS, BUDGETS]))
def test_every_interleaving_returns_all_units(seed, limits):
    """Nothing is in use once all have ended, and in the next month everything is there again."""
    simulation = Simulation(seed, limits)
    simulation.end()
    for gateway in simulation.gateways:
        assert all(holding.in_use == 0 and holding.free == 0 for holding in gateway.share.holdings.values())
    simulation.now += 32 * DAY
    last = simulation.start_gateway()
    simulation.round(last)
    for holding in last.share.holdings.values():
        assert holding.remaining(simulation.clock(last)) == holding.quota.limit


def test_the_interleavings_reach_the_limits():
    """Else they would show nothing: every limit is met exactly, or nearly so, in some history."""
    simulations = [Simulation(seed, LIMITS) for seed in range(60)]
    requests, tokens, _ = (
        max(column) for column in zip(*(fullest(each.requests) for each in simulations), strict=True)
    )
    assert requests == LIMITS.requests_per_minute
    assert tokens > LIMITS.tokens_per_minute * 0.9
    assert max(each.busiest for each in simulations)[0] == LIMITS.concurrent_requests
    simulations = [Simulation(seed, BUDGETS) for seed in range(60)]
    for until_midnight in (True, False):
        most = max(spent(each, until_midnight=until_midnight) for each in simulations)
        assert most > BUDGETS.tokens_per_day * 0.95
