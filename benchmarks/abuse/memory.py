"""
The memory of the gateway and its parser processes while every attack runs at once.

    python -m benchmarks.abuse --all-at-once 10
"""

import asyncio
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.abuse.attacker import ATTACKS
from benchmarks.abuse.latency import Site, attacked

BOUND_MIB = 1536
"""Of the gateway and its parser processes together, with the default settings."""
CONNECTIONS = 10
"""Of each attack."""
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endured:
    seconds: float
    samples_mib: Sequence[float]
    statuses: Mapping[str, Mapping[str, int]]
    """The attackers' answers."""
    health_ms: float
    """The slowest answer of `/healthz`."""

    @property
    def peak_mib(self) -> float:
        return max(self.samples_mib)

    @property
    def holds(self) -> bool:
        return self.peak_mib <= BOUND_MIB


async def endure(at: Site, seconds: float) -> Endured:
    samples: list[float] = []
    health: list[float] = []
    with ExitStack() as stack:
        done = {attack: stack.enter_context(attacked(at, attack, CONNECTIONS)) for attack in ATTACKS}
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            samples.append(sum(_resident_mib(pid) for pid in _family(at.process.process.pid)))
            began = time.monotonic()
            await asyncio.to_thread(_look, at.process.url)
            health.append(time.monotonic() - began)
            await asyncio.sleep(SAMPLE_SECONDS)
    return Endured(
        seconds=seconds,
        samples_mib=samples,
        statuses={attack: _statuses(found) for attack, found in done.items()},
        health_ms=1000 * max(health),
    )


def _statuses(found: Mapping[str, Any]) -> dict[str, int]:
    return dict(found["statuses"])


def _look(url: str) -> None:
    with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
        answer.read()


def _family(pid: int) -> Iterator[int]:
    """The process and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text(encoding="ascii").split():
            yield from _family(int(child))


def _resident_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return int(next((line.split()[1] for line in lines if line.startswith("VmRSS:")), "0")) / 1024
