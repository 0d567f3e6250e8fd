"""
The first-byte times of one tenant's small streaming chats, alone and beside another tenant's attack.

Gateway, both workers, the attacker and this client are processes of their own.  The attacker and the worker
it uses have the lowest priority, so that on few cores their own work is not what is measured.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.tenancy import Limits, Tenant, encode_tenants, make_key
from benchmarks.abuse.attacker import LIMITED, MODEL
from benchmarks.audit.figures import Times, times
from benchmarks.gateway.client import Target, drive
from benchmarks.gateway.upstream import upstream
from demo.process import ApplianceProcess

ROOT = Path(__file__).resolve().parents[2]
HEALTH_PAUSE_SECONDS = 0.1
WARM_UP_SECONDS = 1.0
"""Of an attack, before the measurement."""
CLIENTS = 2
REQUESTS = 100
ALLOWED_MS = 50.0
"""What another tenant's p99 may grow by, beyond twice what it is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One gateway and the keys of the tenants."""

    target: Target
    attacker_key: str
    limited_key: str
    process: ApplianceProcess
    turns: Path
    """Written by `probed`."""

    def begin_watch(self) -> None:
        self.turns.unlink(missing_ok=True)
        (self.proc / "clear_refs").write_text("5", encoding="ascii")

    @property
    def turn_ms(self) -> float:
        """The longest CPU time of a turn of the event loop since `begin_watch`."""
        return 1000 * float(self.turns.read_text(encoding="ascii"))

    @property
    def peak_mib(self) -> float:
        """The most memory since `begin_watch`."""
        lines = (self.proc / "status").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) / 1024

    @property
    def proc(self) -> Path:
        return Path(f"/proc/{self.process.process.pid}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What the other tenant experienced beside an attack."""

    attack: str
    connections: int
    alone: Times
    beside: Times
    health_ms: float
    """The slowest answer of `/healthz` during the attack."""
    statuses: Mapping[str, int]
    """The attacker's answers."""
    sent_bytes: int
    seconds: float
    turn_ms: float
    """The longest CPU time of a turn of the gateway's event loop."""
    peak_mib: float
    """The gateway's memory, without its parser processes."""

    @property
    def allowed_ms(self) -> float:
        return 2 * self.alone.p99 + ALLOWED_MS

    @property
    def holds(self) -> bool:
        return self.beside.p99 <= self.allowed_ms


@contextmanager
def site(checkout: Path = ROOT) -> Iterator[Site]:
    """A gateway of its own, with an ordinary tenant, an attacking one, and a limited one."""
    keys = [make_key(os.urandom(37)) for _ in range(3)]
    names = ("other", "attacker", "limited")
    limits = (Limits(), Limits(), Limits(requests_per_minute=1))
    tenants = [
        Tenant(name=name, keys=(stored,), limits=limit)
        for name, (_, stored), limit in zip(names, keys, limits, strict=True)
    ]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="appliance-bench-")))
        (scratch / "tenants.yaml").write_text(encode_tenants(tenants), encoding="utf-8")
        workers = [stack.enter_context(upstream()), stack.enter_context(upstream(model=MODEL, niceness=19))]
        environment = {
            "PYTHONPATH": os.pathsep.join((str(checkout.resolve()), str(ROOT))),
            "BENCH_TURNS": str(scratch / "turns"),
            "PYTHONSAFEPATH": "1",
            "APPLIANCE_POOL__URLS": json.dumps(workers),
            "APPLIANCE_TENANTS__FILE": str(scratch / "tenants.yaml"),
            "APPLIANCE_LOG__LEVEL": "warning",
            "APPLIANCE_API__DRAIN_SECONDS": "1",
            # The workers share this machine's cores with everything else: they are slow, not down.
            "APPLIANCE_POOL__CONNECT_SECONDS": "30",
            "APPLIANCE_MONITOR__SCRAPE_TIMEOUT_SECONDS": "30",
        }
        process = stack.enter_context(
            ApplianceProcess(
                "gateway", data=scratch / "data", environment=environment, module="benchmarks.abuse.probed"
            )
        )
        # Ready means that one of the workers is.
        while len(_models(process.url, keys[0][0])) < len(workers):
            time.sleep(HEALTH_PAUSE_SECONDS)
        yield Site(
            target=Target(name="other", url=process.url, key=keys[0][0]),
            attacker_key=keys[1][0],
            limited_key=keys[2][0],
            process=process,
            turns=scratch / "turns",
        )


@contextmanager
def attacked(at: Site, attack: str, connections: int) -> Iterator[dict[str, Any]]:
    """Attack for as long as the block lasts; what the attacker did is in the dict afterwards."""
    key = at.limited_key if attack == LIMITED else at.attacker_key
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.abuse.attacker", at.process.url, key, attack, str(connections)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    done: dict[str, Any] = {}
    try:
        yield done
    finally:
        try:
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
    done.update(json.loads(output))


async def first_bytes(at: Site, seconds: float) -> Times:
    """Of small streaming chats for so many seconds, and of at least `REQUESTS`."""
    found: list[float] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends or len(found) < REQUESTS:
        found += (await drive(at.target, REQUESTS // 10, CLIENTS, stream=True, max_tokens=4)).first_bytes
    return times(found)


async def measure(at: Site, attack: str, connections: int, *, seconds: float) -> Beside:
    """Alone, and right after that beside the attack."""
    alone = await first_bytes(at, seconds)
    began = time.monotonic()
    with attacked(at, attack, connections) as done:
        await asyncio.sleep(WARM_UP_SECONDS)
        at.begin_watch()
        looking = asyncio.ensure_future(_watch_health(at.process.url))
        beside = await first_bytes(at, seconds)
        looking.cancel()
        health = await looking
        turn_ms, peak_mib = at.turn_ms, at.peak_mib
    return Beside(
        attack=attack,
        connections=connections,
        alone=alone,
        beside=beside,
        health_ms=1000 * max(health),
        statuses=done["statuses"],
        sent_bytes=done["sent_bytes"],
        seconds=time.monotonic() - began,
        turn_ms=turn_ms,
        peak_mib=peak_mib,
    )


async def _watch_health(url: str) -> Sequence[float]:
    """Seconds that each `/healthz` took, until cancelled."""
    found: list[float] = []

    def look() -> float:
        began = time.monotonic()
        with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
            answer.read()
        return time.monotonic() - began

    try:
        while True:
            found.append(await asyncio.to_thread(look))
            await asyncio.sleep(HEALTH_PAUSE_SECONDS)
    except asyncio.CancelledError:
        return found or [look()]


def _models(url: str, key: str) -> list[Any]:
    asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: list[Any] = json.load(answer)["data"]
    return found
