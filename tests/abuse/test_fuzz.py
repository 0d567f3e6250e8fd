"""A short fuzz campaign; `python -m tests.abuse.fuzz` runs a long one, which also bounds stalls."""

from tests.abuse.fuzz import GROWTH_BYTES, fuzzed_gateway, run, targets

REQUESTS = 6000


async def test_no_request_to_any_route_is_a_500_or_keeps_memory(tmp_path):
    """Every route is reached: one that only refuses keys would show nothing."""
    async with fuzzed_gateway(tmp_path) as (gateway, worker):
        findings = await run(gateway, worker, requests=REQUESTS, seed=7)
        await gateway.serves_others(told_to_wait=True)
    assert findings.failures == []
    assert findings.growth_bytes < GROWTH_BYTES
    assert set(findings.statuses) == {target.label for target in targets()}
    relayed = [target.label for target in targets() if target.is_relayed]
    assert not [label for label in relayed if not findings.statuses[label][200]]
