"""
The endpoints that the picker chooses from: polls the workers of a pool, and remembers what it has picked.

A request counts as load of its worker from the pick until a later poll, which counts it or finds it ended.

Owned by one event loop.  Fails open: a worker that cannot be polled is ranked last, not removed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from itertools import count
from urllib.parse import urlsplit

from appliance.api.picker.scoring import NO_SPEEDS, Endpoint, Speeds, expected_speeds, learn, rank
from appliance.infra.logs import Logger
from appliance.infra.metrics.picker import PickerMetrics
from appliance.serving.pool import WorkerPool
from appliance.serving.scraper import WorkerScraper
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot

MOST_ALTERNATIVES = 3
"""Endpoints named to the proxy, which tries the next one if it retries."""


class Endpoints:
    def __init__(
        self,
        *,
        pool: WorkerPool,
        scraper: WorkerScraper,
        seconds: float,
        metrics: PickerMetrics,
        logger: Logger,
        clock: Callable[[], float],
    ) -> None:
        """`seconds` is the time between two polls; `clock` gives monotonic seconds."""
        self._pool = pool
        self._scraper = scraper
        self._seconds = seconds
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._numbers = count(1)
        self._picked: Counter[WorkerId] = Counter()
        self._last: dict[WorkerId, int] = {}
        self._speeds: dict[WorkerId, Speeds] = {}
        self._polled = asyncio.Event()

    async def run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(self._seconds)

    async def wait_polled(self) -> None:
        """Return once every worker listed then has been polled."""
        await self._polled.wait()

    async def poll(self) -> None:
        """Poll all workers concurrently, so that a slow one delays no other's snapshot."""
        snapshots = self._pool.snapshots
        results = await asyncio.gather(*map(self._poll, snapshots), return_exceptions=True)
        for snapshot, result in zip(snapshots, results, strict=True):
            if isinstance(result, Exception):
                self._logger.error(
                    "picker_poll_failed",
                    worker=snapshot.worker.worker_id,
                    error=type(result).__name__,
                    exc_info=result,
                )
        listed = {snapshot.worker.worker_id for snapshot in self._pool.snapshots}
        for known in (self._speeds, self._picked, self._last):
            for left in known.keys() - listed:
                del known[left]
        self._publish()
        if snapshots:
            self._polled.set()

    def pick(self, *, allowed: Collection[str] | None, model: str) -> tuple[str, ...]:
        """Addresses (`ip:port`) for a request, best first; empty if no worker is listed and allowed."""
        listed = self._listed()
        if allowed is not None:
            listed = [each for each in listed if address_of(each.snapshot.worker) in allowed]
        found = rank(listed, self._clock(), model=model)[:MOST_ALTERNATIVES]
        if not found:
            self._metrics.refusals.inc()
            return ()
        worker_id = found[0].worker_id
        self._last[worker_id] = next(self._numbers)
        self._picked[worker_id] += 1
        self._metrics.picks.labels(worker_id).inc()
        return tuple(address_of(each.snapshot.worker) for each in found)

    async def _poll(self, before: WorkerSnapshot) -> None:
        worker_id = before.worker.worker_id
        # A request picked later may be missing from the page; one picked before is in it, or has ended.
        counted = self._picked[worker_id]
        after = await self._scraper.scrape(before)
        current = self._pool.snapshot(worker_id)
        if current is None or current.worker is not before.worker:
            return  # it was replaced meanwhile
        self._picked[worker_id] -= counted
        if not after.missed:
            known = self._speeds.get(worker_id, NO_SPEEDS)
            self._speeds[worker_id] = learn(known, before.reading, after.reading, after.seen_at)
        self._pool.update(after)
        if after.healthy != before.healthy:
            state = "up" if after.healthy else "down"
            self._logger.info("worker_health_changed", worker=worker_id, state=state)

    def _listed(self) -> list[Endpoint]:
        return [
            Endpoint(
                snapshot=snapshot,
                picked=self._picked[snapshot.worker.worker_id],
                last_picked=self._last.get(snapshot.worker.worker_id, 0),
                speeds=self._speeds.get(snapshot.worker.worker_id, NO_SPEEDS),
            )
            for snapshot in self._pool.snapshots
            if not snapshot.leaving
        ]

    def _publish(self) -> None:
        listed = self._listed()
        expected = expected_speeds(listed, self._clock())
        for each in listed:
            self._metrics.endpoint_up.labels(each.worker_id).set(each.snapshot.takes_requests)
            self._metrics.endpoint_in_fallback.labels(each.worker_id).set(each.is_in_fallback)
            self._metrics.expected_speed.labels(each.worker_id).set(expected.get(each.worker_id, 0.0))


def address_of(worker: Worker) -> str:
    """Host and port of a worker: `10.0.0.5:8000` or `[fd00::5]:8000`."""
    parts = urlsplit(worker.url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
