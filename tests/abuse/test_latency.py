"""
Another tenant is served as fast as before, within a bound, beside a tenant that attacks the gateway.

The attacker is a process of its own, of the lowest priority; `python -m benchmarks.abuse` measures the same
for longer, with 2, 10 and 50 connections.
"""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.abuse.attacker import ATTACKS
from benchmarks.abuse.latency import Site, measure, site

CONNECTIONS = 10
LIVENESS_MS = 10_000
"""The chart's liveness probe gives up after this time."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Site]:
    with site() as running:
        yield running


@pytest.mark.alone
@pytest.mark.parametrize("attack", ATTACKS)
def test_another_tenant_waits_at_most_twice_as_long_and_50_ms(gateway: Site, attack: str):
    """The p99 of its first bytes; `/healthz` answers long before the gateway would be restarted."""
    found = asyncio.run(measure(gateway, attack, CONNECTIONS, seconds=2.0))
    assert found.statuses or found.sent_bytes, "nothing was attacked"
    assert found.holds, found
    assert found.health_ms < LIVENESS_MS / 4
    # What one tenant sends is never the work of one turn of the event loop.
    assert found.turn_ms < found.allowed_ms / 2
