"""
It is the page the client library writes, and no stream waits for it.
"""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from appliance.infra.metrics import Metrics
from appliance.infra.metrics.page import SERIES_AT_A_TIME, page

TEXT, OPEN = "", "application/openmetrics-text;version=1.0.0"
LARGEST_CHILD = 25
"""Series of one histogram, which is read at once."""


def site(tenants: int = 40) -> Metrics:
    """Metrics of some traffic, with names that need escaping and an exemplar."""
    metrics = Metrics(CollectorRegistry())
    PlatformCollector(registry=metrics.registry)
    for number in range(tenants):
        meters = metrics.meters(f'a "{number}"\\\n', "démo", "/v1/completions", "completed")
        meters.requests.inc()
        meters.seconds.observe(0.3, {"trace_id": "0af7651916cd43dd8448eb211c80319c"})
        metrics.limit_used.labels(f"t{number}", "tokens_per_minute").set_function(lambda: 0.5)
    metrics.worker_up.labels("w1").set(1)
    return metrics


def without_created(text: str) -> list[str]:
    """The lines of a page, less those that say when a series began."""
    return [line for line in text.splitlines() if "_created" not in line]


@pytest.mark.parametrize("accept", [TEXT, OPEN, "text/plain;version=1.0.0;escaping=allow-utf-8"])
async def test_the_page_is_the_one_the_client_library_writes(accept):
    """Line by line: headers once, each series once, exemplars and escapes included."""
    registry = site().registry
    encode, content_type = choose_encoder(accept)
    text, told = await page(registry, accept)
    assert told == content_type
    assert text.decode().splitlines() == without_created(encode(registry).decode())


@pytest.mark.parametrize(("accept", "parse"), [(TEXT, text_string_to_metric_families), (OPEN, open_families)])
async def test_the_page_can_be_parsed(accept, parse):
    """By the library's own parsers, the strict one of OpenMetrics too."""
    text, _ = await page(site().registry, accept)
    names = [family.name for family in parse(text.decode())]
    assert len(names) == len(set(names))
    assert "appliance_requests" in "".join(names)


async def test_the_loop_goes_round_after_every_few_series():
    """A stream waits for no more than these."""
    registry = site(tenants=600).registry
    turns, done = 0, False

    async def stream() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    streaming = asyncio.create_task(stream())
    text, _ = await page(registry, TEXT)
    done = True
    await streaming
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    assert series > 1000
    assert turns >= series / (SERIES_AT_A_TIME + LARGEST_CHILD)


async def test_series_may_come_and_go_while_the_page_is_written():
    """Workers leave, tenants join: the page has what was there when its turn came."""
    metrics = site(tenants=200)
    done = False

    async def traffic() -> None:
        number = 0
        while not done:
            number += 1
            metrics.worker_up.labels(f"w{number}").set(1)
            metrics.requests.labels(f"new-{number}", "demo", "completed").inc()
            metrics.forget_worker(f"w{number - 1}")
            await asyncio.sleep(0)

    running = asyncio.create_task(traffic())
    for _ in range(3):
        text, _ = await page(metrics.registry, TEXT)
        series = [line.rpartition(" ")[0] for line in text.decode().splitlines() if line[0] != "#"]
        assert len(series) == len(set(series)) > 400
    done = True
    await running


async def test_several_pages_at_once_are_each_whole():
    """Two Prometheus that look at the same moment."""
    registry = site().registry
    pages = await asyncio.gather(*(page(registry, TEXT) for _ in range(4)))
    assert len({text for text, _ in pages}) == 1


async def test_an_empty_registry_is_an_empty_page():
    """In both formats."""
    assert (await page(CollectorRegistry(), TEXT))[0] == b""


async def test_collectors_of_others_are_on_the_page():
    """Such as those of the process and its memory."""
    registry = CollectorRegistry()
    GCCollector(registry=registry)
    text, _ = await page(registry, TEXT)
    assert b"python_gc_objects_collected_total" in text
