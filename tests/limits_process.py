"""
A gateway's limiter in a separate process, under a storm of requests, to be killed.

    python -m tests.limits_process URL GATEWAY FILE SEED

Requests come for as long as standard input is open; each stays for a while and ends, or is cancelled
while it waits or while it runs.  Then held limits are released.  FILE gets one line for each that
was let in and for each that ended, written by one call, so that a kill loses none:
`NANOSECONDS + NUMBER TOKENS` and `NANOSECONDS - NUMBER TOKENS`, by the clock all processes share.
"""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from appliance.errors import LimitReachedError, LimitsUnavailableError
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LimitSettings, LogSettings
from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.estimate import RequestSize
from appliance.tenancy.limits.limiter import Limiter, open_limits
from appliance.tenancy.tenant import Tenant

REPOSITORY = Path(__file__).resolve().parent.parent
CLIENTS = 60
LEASE_SECONDS = 2.0
LIMITS = Limits(
    requests_per_minute=2000, tokens_per_minute=300_000, concurrent_requests=25, tokens_per_day=10**9
)
TENANT = Tenant(name="acme", limits=LIMITS)
SETTINGS = LimitSettings(lease_seconds=LEASE_SECONDS)
RENEW_SECONDS = 0.2


@dataclass(frozen=True)
class Let:
    """One admitted request, in seconds of the clock all processes share."""

    began: float
    ended: float
    tokens: int


class LimitsProcess:
    """One such process, as the test controls it."""

    def __init__(self, url: str, gateway: str, file: Path, seed: int) -> None:
        self._file = file
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.limits_process", url, gateway, file, str(seed)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._died = float("inf")

    def wait_ready(self) -> None:
        """Wait until its limits are open."""
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        """Kill it with its running requests."""
        self._process.kill()
        self._process.communicate()
        self._died = time.monotonic()

    def stop(self) -> None:
        """Stop it."""
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0

    def begun(self) -> int:
        """Number of requests admitted so far."""
        return self._file.read_text().count(" + ")

    def let_in(self) -> list[Let]:
        """Every admitted request; those running at a kill ended then."""
        began, found = {}, []
        for line in self._file.read_text().splitlines():
            nanoseconds, sign, number, tokens = line.split()
            seconds = int(nanoseconds) / 1e9
            if sign == "+":
                began[number] = (seconds, int(tokens))
            else:
                found.append(Let(began.pop(number)[0], seconds, int(tokens)))
        assert not began or self._died < float("inf"), "a request never ended"
        return found + [Let(seconds, self._died, tokens) for seconds, tokens in began.values()]


class Storm:
    """Concurrent requests."""

    def __init__(self, limiter: Limiter, file: int, seed: int) -> None:
        self._limiter, self._file, self._random = limiter, file, random.Random(seed)
        self._number = 0

    def _note(self, sign: str, number: int, tokens: int) -> None:
        os.write(self._file, f"{time.monotonic_ns()} {sign} {number} {tokens}\n".encode())

    async def one(self) -> None:
        """Reserve, run and settle, like the gateway."""
        most = self._random.randint(50, 400)
        size = RequestSize(prompt=6, answer=most)
        reservation = self._limiter.take(TENANT, "demo", size)
        if reservation is None:
            reservation = await self._limiter.wait(TENANT, "demo", size)
        self._number += 1
        number, used = self._number, most
        self._note("+", number, most)
        try:
            await asyncio.sleep(self._random.choice([0.0, 0.005, 0.05, 0.2]))
            used = self._random.randint(0, most)
        finally:
            self._note("-", number, used)
            reservation.settle(used)

    async def client(self, stop: asyncio.Event) -> None:
        """Send requests repeatedly, and cancel some."""
        while not stop.is_set():
            asking = asyncio.create_task(self.one())
            if self._random.random() < 0.3:
                await asyncio.sleep(self._random.choice([0.0, 0.001, 0.01, 0.1]))
                asking.cancel()
            try:
                await asking
            except (LimitReachedError, LimitsUnavailableError, asyncio.CancelledError):
                await asyncio.sleep(self._random.uniform(0.001, 0.05))


async def run(url: str, gateway: str, file: str, seed: int) -> None:
    """Send requests until standard input ends."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=read, daemon=True).start()
    async with open_limits(
        database=url,
        gateway=gateway,
        settings=SETTINGS,
        renew_seconds=RENEW_SECONDS,
        clock=time.monotonic,
        wall_clock=time.time,  # noqa: TID251 - a root of its own
        metrics=Metrics(CollectorRegistry()),
        logger=configure_logs(LogSettings(level="error"), terminal=False),
    ) as limiter:
        running = asyncio.create_task(limiter.run())
        storm = Storm(limiter, os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), seed)
        print("ready", flush=True)  # noqa: T201 - what the test waits for
        await asyncio.gather(*(storm.client(stop) for _ in range(CLIENTS)))
        running.cancel()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4], int(sys.argv[4])))
