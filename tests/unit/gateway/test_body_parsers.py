"""Large bodies are read in another process: with the same result, and in turns of tenants."""

import asyncio
import json
import os
import signal
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import AtCapacityError, InvalidRequestError
from appliance.gateway import body_parsers
from appliance.gateway.batch.lines import parse_line
from appliance.gateway.body import BodyTerms, read_body
from appliance.gateway.body_parsers import LARGE_BODIES, SMALL_BYTES, BodyParsers, TenantTurns
from appliance.serving.dialects.routes import ROUTES
from appliance.tenancy import Permission
from tests.fakes import until

TERMS = BodyTerms(
    route="/v1/chat/completions", tenant="acme", may=frozenset(), salted=True, label_key=bytes(range(16))
)
SPACE = b" " * SMALL_BYTES
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["model", "messages", "prompt", "input", "tools", "stream", "stream_options", "max_tokens", "n", "min_p",
     "logit_bias", "priority", "cache_salt", "store", "chat_template_kwargs", "documents", "query"]
)  # fmt: skip
ODD = [
    b"", b"{}", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b'{"model":"\\ud800","messages":[]}',
    b'{"model":"demo","messages":NaN}', b'{"model":"demo","messages":' + b"9" * 5000 + b"}",
    b'{"model":"demo","messages":[],"mod\\u0065l":"other"}', b'{"model":"demo","messages":["\xed\xa0\x80"]}',
    b'{"model":"demo","messages":' + b"[" * 300 + b"]" * 300 + b"}",
]  # fmt: skip


@pytest.fixture(scope="module")
def parsers():
    with closing(BodyParsers()) as made:
        yield made


def outcome(read):
    try:
        return read()
    except InvalidRequestError as error:
        return str(error), error.param, error.code


async def same(parsers, body: bytes, terms: BodyTerms) -> None:
    large = body + SPACE
    here = outcome(lambda: read_body(large, terms))
    try:
        there = await parsers.parse(large, terms)
    except InvalidRequestError as error:
        there = str(error), error.param, error.code
    assert there == here
    if not isinstance(here, tuple):
        json.loads(b"".join(there.edit(large)))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.dictionaries(NAMES | st.text(max_size=4), VALUES, max_size=6),
    is_ascii=st.booleans(),
    route=st.sampled_from(sorted(ROUTES)),
    may=st.frozensets(st.sampled_from(Permission)),
    salted=st.booleans(),
)
async def test_a_process_reads_a_body_as_the_gateway_does(parsers, members, is_ascii, route, may, salted):
    body = json.dumps({"model": "demo", "messages": [], **members}, ensure_ascii=is_ascii)
    terms = replace(TERMS, route=route, may=may, salted=salted)
    await same(parsers, body.encode("utf-8", "surrogatepass"), terms)


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
async def test_a_process_refuses_a_body_as_the_gateway_does(parsers, body):
    await same(parsers, body, TERMS)


@pytest.mark.parametrize("name", ["a", "\u00e9", "\U0001f4a3"])
@pytest.mark.parametrize("body", [{"model": "demo", "messages": []}, {"model": ""}, None])
async def test_a_process_reads_a_line_of_a_batch_as_the_gateway_does(parsers, name, body):
    line = {"custom_id": name, "method": "POST", "url": TERMS.route, "body": body}
    large = json.dumps(line, ensure_ascii=False).encode() + SPACE
    try:
        there = await parsers.parse_line(7, large, "acme", TERMS.route)
    except InvalidRequestError as error:
        there = str(error), error.param, error.code
    assert there == outcome(lambda: parse_line(7, large, TERMS.route))


async def test_the_event_loop_runs_while_a_large_body_is_read(parsers):
    """Its work for a body that takes long to read is none that grows with the body."""
    body = b'{"model":"demo","messages":[%s]}' % b",".join([b"{}"] * 40_000)
    await parsers.parse(body, TERMS)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.ensure_future(count())
    await parsers.parse(body, TERMS)
    counting.cancel()
    assert turns > 10


async def test_processes_have_lower_priority_than_the_gateway_and_are_two_at_most():
    with closing(BodyParsers()) as parsers:
        body = b'{"model":"demo","messages":[]}' + SPACE
        await asyncio.gather(
            *(parsers.parse(body, replace(TERMS, tenant=f"tenant-{number}")) for number in range(6))
        )
        niceness = [os.getpriority(os.PRIO_PROCESS, each._process.pid) for each in parsers._idle]
    assert 1 <= len(niceness) <= 2
    assert min(niceness) > os.getpriority(os.PRIO_PROCESS, 0)


async def test_a_process_that_is_killed_costs_one_request(monkeypatch):
    """Its client is asked to try again, and the next body starts another process."""
    with closing(BodyParsers()) as parsers:
        body = b'{"model":"demo","messages":[]}' + SPACE
        await parsers.parse(body, TERMS)
        (process,) = parsers._idle
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(AtCapacityError):
            await parsers.parse(body, TERMS)
        assert (await parsers.parse(body, TERMS)).model == "demo"


async def test_a_client_that_leaves_keeps_no_process(parsers):
    body = b'{"model":"demo","messages":[%s]}' % b",".join([b"{}"] * 40_000)
    for _ in range(4):
        leaving = asyncio.ensure_future(parsers.parse(body, TERMS))
        await asyncio.sleep(0)
        leaving.cancel()
    assert (await parsers.parse(body, TERMS)).model == "demo"
    await until(lambda: not parsers._turns._running)


async def test_tenants_take_turns_however_many_bodies_one_of_them_sends():
    turns, order = TenantTurns(per_tenant=1, total=2), []

    async def read(tenant: str) -> None:
        await turns.begin(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        turns.end(tenant)

    flood = [asyncio.ensure_future(read("flood")) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.gather(*(read(tenant) for tenant in ("b", "c")), *flood)
    assert order[:1] == ["flood"]
    assert set(order[1:5]) == {"flood", "b", "c"}
    assert order.count("flood") == 10


async def test_large_bodies_of_one_tenant_are_received_a_few_at_once(parsers):
    """Further ones wait until one has been read; small ones and other tenants do not."""
    received = [parsers.reading("acme") for _ in range(LARGE_BODIES)]
    for each in received:
        await each.go_on(SMALL_BYTES + 1)
    waiting = asyncio.ensure_future(parsers.reading("acme").go_on(SMALL_BYTES + 1))
    await parsers.reading("acme").go_on(SMALL_BYTES)
    await parsers.reading("other").go_on(SMALL_BYTES + 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    received[0].end()
    await waiting


async def test_a_turn_is_not_lost_when_its_client_leaves():
    turns = TenantTurns(per_tenant=1, total=2)
    await turns.begin("a")
    waiting = [asyncio.ensure_future(turns.begin("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    turns.end("a")
    await waiting[1]
    waiting[2].cancel()
    turns.end("a")
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not turns._running
    assert not turns._waiting


async def test_a_body_that_waits_too_long_for_its_turn_is_told_to_try_again(monkeypatch):
    monkeypatch.setattr(body_parsers, "WAIT_SECONDS", 0.01)
    turns = TenantTurns(per_tenant=1, total=2)
    await turns.begin("a")
    with pytest.raises(AtCapacityError):
        await turns.begin("a")
    turns.end("a")
    await turns.begin("a")
