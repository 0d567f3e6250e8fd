"""
What it costs to be scraped by Prometheus: `python -m benchmarks.scraping`.

Serves `/metrics` with the product's own server and route, filled as at a site of 200 tenants where everything
that can happen has happened (`tests.full_metrics`), and asks for it from another process, one page at a time.
Counts the processor seconds of the serving process, and how long its event loop is kept from anything else.
Writes a table to `benchmarks/results`; ends with 1 where scrapes every 15 s take 1 % of a core or more.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import uvloop
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from appliance.api import ops
from appliance.api.http.server import bind, make_server
from appliance.infra.settings import ApiSettings
from benchmarks.speculation.provenance import Provenance, provenance_of
from tests.full_metrics import TENANTS, full_metrics

RESULTS = Path(__file__).parent / "results"
INTERVAL_SECONDS = 15
MOST = 0.01
"""Share of a core."""
CLIENT = """
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
request = urllib.request.Request(sys.argv[1], headers={"Accept": sys.argv[3]})
for _ in range(int(sys.argv[2])):
    with opener.open(request) as answer:
        size = len(answer.read())
print(size)
"""
ACCEPTS = {"Prometheus text": "text/plain", "OpenMetrics": "application/openmetrics-text; version=1.0.0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one kind of page."""

    name: str
    page_bytes: int
    seconds: float
    """Processor time of the serving process for one page, in the median round."""
    stall: float
    """Longest time in seconds between two turns of the event loop, in the median round."""

    @property
    def share(self) -> float:
        """Of a core, at one page every `INTERVAL_SECONDS`."""
        return self.seconds / INTERVAL_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=40, help="of a round")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    series, costs = uvloop.run(measure(options.rounds, options.pages))
    provenance = provenance_of("python -m benchmarks.scraping", model="", draft="")
    text = table(series, costs, load, provenance)
    path = RESULTS / f"scraping-{provenance.commit}.md"
    path.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {path}")
    if max(cost.share for cost in costs) >= MOST:
        sys.exit(f"benchmarks.scraping: more than {MOST:.0%} of a core")


async def measure(rounds: int, pages: int) -> tuple[int, list[Cost]]:
    """Series on a page, and what each kind of page costs."""
    metrics, settings = full_metrics(TENANTS), ApiSettings(port=0)
    app = FastAPI()
    app.state.services = SimpleNamespace(metrics=metrics)
    app.include_router(ops.metrics)
    server, listener = make_server(app, settings, tls=None, metrics=metrics), bind(settings)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        costs = [await cost_of(name, url, accept, rounds, pages) for name, accept in ACCEPTS.items()]
    finally:
        server.should_exit = True
        await serving
    text, _ = await ops.page(metrics.registry, "")
    series = sum(len(family.samples) for family in text_string_to_metric_families(text.decode()))
    return series, costs


async def cost_of(name: str, url: str, accept: str, rounds: int, pages: int) -> Cost:
    """Ask for pages in rounds; the first is thrown away."""
    size, seconds, stalls = 0, [], []
    for number in range(rounds + 1):
        began = time.process_time()
        size = await ask(url, pages, accept)
        used = (time.process_time() - began) / pages
        watch = asyncio.ensure_future(longest_turn())
        await ask(url, pages, accept)
        watch.cancel()
        if number:
            seconds.append(used)
            stalls.append(await watch)
    return Cost(
        name=name, page_bytes=size, seconds=statistics.median(seconds), stall=statistics.median(stalls)
    )


async def ask(url: str, pages: int, accept: str) -> int:
    """Have another process ask for pages, one after the other; bytes of the last one."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, url, str(pages), accept, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await client.communicate()
    if client.returncode != 0:
        sys.exit("benchmarks.scraping: the client failed")
    return int(printed)


async def longest_turn() -> float:
    """Go round with the event loop until cancelled; the longest time it once took."""
    longest, before = 0.0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
    except asyncio.CancelledError:
        return longest


def table(series: int, costs: list[Cost], load: float, provenance: Provenance) -> str:
    """The results as Markdown."""
    measured = f"`{provenance.command}`; {provenance.hardware}; commit {provenance.source}; {provenance.date}"
    about = f"""# What a scrape costs, at commit {provenance.commit}

{measured}; load of the machine {load:.1f} before

{series} series: 200 tenants, and everything that can happen has happened (`tests/full_metrics.py`). One page
at a time, asked for by another process; medians of rounds. Shares are of one core, at a scrape every
{INTERVAL_SECONDS} s. The longest stall is how long a stream may have to wait for a page.

| page | KiB | processor time, ms | share of a core | longest stall, ms |
| --- | --- | --- | --- | --- |
"""
    return about + "".join(
        f"| {cost.name} | {cost.page_bytes / 1024:.0f} | {cost.seconds * 1000:.1f} | {cost.share:.2%} "
        f"| {cost.stall * 1000:.1f} |\n"
        for cost in costs
    )


if __name__ == "__main__":
    main()
