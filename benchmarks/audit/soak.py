"""
Full speed for a long time: nothing is lost, the log verifies, and memory stays flat.

Requests of both kinds go through one gateway, sixteen at a time, while its memory is sampled.  At
the end the log must hold an intent and an outcome for each request, and nothing else but what it
writes about itself; the auditor's verifier judges the whole of it.
"""

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.audit.serving import BODY
from benchmarks.gateway.upstream import upstream
from demo.process import ApplianceProcess

CONCURRENCY = 16
LEARNT_AFTER = 0.2
"""Share of the time after which caches are warm; growth is judged from then on."""
MOST_GROWTH = 0.05
"""Memory is flat when the last quarter's median is at most this much above the first's after that."""
REQUEST_TYPES = ("request.intent", "request.outcome", "request.aborted", "request.denied")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory of the gateway at one moment."""

    seconds: float
    """Since the beginning."""
    resident_mib: float
    requests: int
    """Answered so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What was measured, and whether it is as it should be."""

    seconds: float
    requests: int
    requests_per_second: float
    entries: int
    bookkeeping: dict[str, int]
    """Entries that no request made, by type."""
    is_complete: bool
    """An intent and an outcome for each request, and no other entry of a request."""
    verdict: str
    exit_code: int
    growth: float
    """Median of the last quarter's memory over that of the first after warming up, less 1."""
    is_flat: bool
    samples: tuple[Sample, ...]

    @property
    def passes(self) -> bool:
        """Whether every promise was kept."""
        return self.is_complete and self.exit_code == 0 and self.is_flat


def measure(seconds: float, interval: float, say: Callable[[str], None]) -> Soak:
    """Drive one gateway for so long, stop it, and verify its log."""
    with tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch, upstream(0.0) as worker:
        data = Path(scratch)
        environment = {"APPLIANCE_POOL__URLS": json.dumps([worker]), "APPLIANCE_LOG__LEVEL": "warning"}
        with ApplianceProcess("gateway", data=data, environment=environment) as gateway:
            requests, samples = uvloop.run(_drive(gateway, seconds, interval, say))
        command = [sys.executable, "-m", "appliance", "audit", "verify", "--json", "--data", str(data)]
        verified = subprocess.run(command, capture_output=True, text=True, check=False)
    if not verified.stdout:
        raise RuntimeError(f"the log could not be verified: {verified.stderr.strip()}")
    return judge(requests, seconds, json.loads(verified.stdout), verified.returncode, samples)


def judge(
    requests: int, seconds: float, report: dict[str, Any], exit_code: int, samples: Sequence[Sample]
) -> Soak:
    """Compare what was sent with what the verifier found."""
    types = Counter(report["entries_by_type"])
    ends = {name: types[name] for name in REQUEST_TYPES}
    grown = growth(samples)
    return Soak(
        seconds=seconds,
        requests=requests,
        requests_per_second=requests / seconds,
        entries=report["size"],
        bookkeeping={name: count for name, count in sorted(types.items()) if name not in REQUEST_TYPES},
        is_complete=ends
        == {
            "request.intent": requests,
            "request.outcome": requests,
            "request.aborted": 0,
            "request.denied": 0,
        },
        verdict=report["verdict"],
        exit_code=exit_code,
        growth=grown,
        is_flat=grown <= MOST_GROWTH,
        samples=tuple(samples),
    )


def growth(samples: Sequence[Sample]) -> float:
    """By how much memory grew after warming up, as a share; infinite when there are too few samples."""
    warm = samples[int(len(samples) * LEARNT_AFTER) :]
    quarter = len(warm) // 4
    if not quarter:
        return float("inf")
    first = statistics.median(sample.resident_mib for sample in warm[:quarter])
    last = statistics.median(sample.resident_mib for sample in warm[-quarter:])
    return last / first - 1


async def _drive(
    gateway: ApplianceProcess, seconds: float, interval: float, say: Callable[[str], None]
) -> tuple[int, list[Sample]]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {gateway.key}"}
    bodies = itertools.cycle([json.dumps({**BODY, "stream": stream}).encode() for stream in (False, True)])
    started, answered, samples = time.perf_counter(), 0, list[Sample]()
    until = started + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal answered
        while time.perf_counter() < until:
            url = f"{gateway.url}/v1/chat/completions"
            async with session.post(url, data=next(bodies), headers=headers) as response:
                content = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {content[:200]!r}")
            answered += 1

    async def watch() -> None:
        while (now := time.perf_counter()) < until:
            memory = _resident_mib(gateway.process.pid)
            samples.append(Sample(seconds=round(now - started, 1), resident_mib=memory, requests=answered))
            if len(samples) % 10 == 0:
                say(f"{now - started:.0f} s: {answered:,} requests, {memory:.1f} MiB")
            await asyncio.sleep(interval)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(watch(), *(client(session) for _ in range(CONCURRENCY)))
    return answered, samples


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def table(found: Soak) -> str:
    """The report, in Markdown."""
    complete = "an intent and an outcome each" if found.is_complete else "NOT as many intents and outcomes"
    flat = "flat" if found.is_flat else "NOT flat"
    own = ", ".join(f"{count} `{name}`" for name, count in found.bookkeeping.items()) or "none"
    first, last = found.samples[0], found.samples[-1]
    speed = f"{found.requests_per_second:,.0f} a second, {CONCURRENCY} at a time, every other one a stream"
    memory = f"{first.resident_mib:.1f} MiB at first, {last.resident_mib:.1f} MiB at last"
    grown = f"growth after warming up {found.growth:+.1%}: {flat} (limit {MOST_GROWTH:+.0%})"
    points = [
        f"{found.requests:,} requests in {found.seconds:.0f} s, {speed}",
        f"{found.entries:,} entries: {complete}; of its own: {own}",
        f"verifier: {found.verdict} (exit code {found.exit_code})",
        f"memory: {memory}, {grown}",
        "PASSED" if found.passes else "FAILED",
    ]
    return "".join(f"- {point}\n" for point in points)


def document(found: Soak) -> dict[str, Any]:
    """The same for a program, with every sample."""
    return asdict(found)
