"""Limits over a real database: two processes stormed at once, one of them killed."""

import time
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import create_engine

from appliance.errors import LimitsUnavailableError
from appliance.infra.schema import upgrade_database
from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.ledger import LeaseTerms, UsageReport, decode_ledger
from appliance.tenancy.limits.quota import quotas_of
from appliance.tenancy.limits.store import ExchangeRequest, SqlLedgerStore
from tests.limits_process import LEASE_SECONDS, LIMITS, LimitsProcess
from tests.postgres import private_postgres

TERMS = LeaseTerms(lease_seconds=LEASE_SECONDS, renew_seconds=0.2, zone=ZoneInfo("UTC"))


@pytest.fixture
def ledger(url, open_store):
    """Open the ledgers of several gateways on one database, which has its tables."""
    open_store(url)
    made = []

    def make(name):
        made.append(SqlLedgerStore(url, gateway=name, terms=TERMS, clock=time.time))  # noqa: TID251 - a root
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(limits, sequence=1, *needs, **told):
    quotas = {quota.key: quota for quota in quotas_of(limits)}
    return ExchangeRequest(quotas=quotas, report=UsageReport(sequence=sequence, waiting=needs, **told))


def read_book(url, tenant):
    engine = create_engine(url)
    with engine.connect() as connection:
        book = connection.exec_driver_sql(
            f"SELECT book FROM limit_books WHERE tenant = '{tenant}'"
        ).scalar_one()
    engine.dispose()
    return decode_ledger(book)


def test_two_gateways_never_hold_the_same_units(ledger):
    """Each sees the grants of the other, in one ledger."""
    first, second = ledger("first"), ledger("second")
    limits = Limits(concurrent_requests=3)
    need = {"concurrent_requests": 1}
    decisions = first.exchange({"acme": ask(limits, 1, need, need)})["acme"].decisions
    assert [each.verdict for each in decisions] == ["granted", "granted"]
    decisions = second.exchange({"acme": ask(limits, 1, need, need)})["acme"].decisions
    assert [each.verdict for each in decisions] == ["granted", "waits"]


def test_several_tenants_in_one_exchange_are_kept_apart(ledger):
    """New ones and known ones in one exchange."""
    one = ledger("one")
    need, limits = {"requests_per_minute": 1}, Limits(requests_per_minute=1)
    one.exchange({"b": ask(limits, 1, need)})
    replies = one.exchange({"c": ask(limits, 1, need), "a": ask(limits, 1, need), "b": ask(limits, 2, need)})
    assert {tenant: reply.decisions[0].verdict for tenant, reply in replies.items()} == {
        "a": "granted", "b": "refused", "c": "granted",
    }  # fmt: skip


def test_a_database_that_does_not_answer_is_an_error_of_ours(tmp_path):
    """In one line; no units were granted."""
    url = f"sqlite:///{tmp_path / 'nowhere' / 'audit.db'}"
    broken = SqlLedgerStore(url, gateway="one", terms=TERMS, clock=time.time)  # noqa: TID251 - a root
    with pytest.raises(LimitsUnavailableError, match="could not be written") as caught:
        broken.exchange({"acme": ask(Limits(requests_per_minute=1))})
    assert "\n" not in str(caught.value)
    broken.close()


PATIENCE_SECONDS = 100


def fullest_minute(let):
    """Most requests, and most tokens, of any minute."""
    return max(
        (
            (len(minute), sum(each.tokens for each in minute))
            for last in let
            if (minute := [each for each in let if last.began - 60 < each.began <= last.began])
        ),
        default=(0, 0),
    )


def most_at_once(let):
    changes = sorted([(each.began, 1) for each in let] + [(each.ended, -1) for each in let])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def test_a_storm_on_two_gateways_one_of_them_killed_never_exceeds_a_limit(url, open_store, tmp_path):
    """Clients disconnect at any point; afterwards no slot is held."""
    open_store(url)
    processes = [LimitsProcess(url, name, tmp_path / name, seed) for seed, name in enumerate(["one", "two"])]
    for process in processes:
        process.wait_ready()

    def wait_for(true):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            assert time.monotonic() < deadline, "this was no storm"
            time.sleep(0.1)

    wait_for(lambda: sum(each.begun() for each in processes) > LIMITS.requests_per_minute / 4)
    processes[0].kill()
    third = LimitsProcess(url, "three", tmp_path / "three", 3)
    third.wait_ready()
    wait_for(lambda: "one" not in read_book(url, "acme").leases)
    wait_for(lambda: sum(each.begun() for each in (*processes, third)) > LIMITS.requests_per_minute / 2)
    for process in (processes[1], third):
        process.stop()
    let = [each for process in (*processes, third) for each in process.let_in()]
    requests, tokens = fullest_minute(let)
    assert requests <= LIMITS.requests_per_minute
    assert tokens <= LIMITS.tokens_per_minute
    assert most_at_once(let) <= LIMITS.concurrent_requests
    # It was a storm: what the dead gateway did not use is all that is missing.
    assert requests > LIMITS.requests_per_minute / 2
    assert most_at_once(let) > LIMITS.concurrent_requests / 2
    book = read_book(url, "acme")
    assert "one" not in book.leases
    for lease in book.leases.values():
        assert set(lease.held.values()) == {0}
        assert lease.busy == {}


def test_a_database_that_was_killed_is_found_again():
    """Until then every exchange is an error of seconds; afterwards nothing is counted twice."""
    limits, need = Limits(requests_per_minute=10), {"requests_per_minute": 1}
    with private_postgres() as server:
        upgrade_database(server.url)
        ledger = SqlLedgerStore(server.url, gateway="one", terms=TERMS, clock=time.time)  # noqa: TID251 - a root
        ledger.exchange({"acme": ask(limits, 1, need)})
        server.kill()
        with pytest.raises(LimitsUnavailableError):
            ledger.exchange({"acme": ask(limits, 2, spent={"requests_per_minute": {"": 1}})})
        server.start()
        resent = ask(limits, 2, spent={"requests_per_minute": {"": 1}}, is_resent=True)
        free = [ledger.exchange({"acme": resent})["acme"].free["requests_per_minute"] for _ in range(2)]
        ledger.close()
    assert free == [9, 9]
