"""How much of a gateway files and batches use at once: threads, and requests of each tenant."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from appliance.errors import AtCapacityError

THREADS = 8
TENANT_REQUESTS = 32
"""Requests for files and batches that one tenant may have in flight in a gateway, uploads included."""
TENANT_UPLOADS = 8
UPLOADS = 64
"""Uploads in flight in a gateway.  Each holds less than 1 MiB: `GATHERED_BYTES`, one read, one piece."""

T = TypeVar("T")


class StorageThreads:
    """Threads for disk and database of files and batches, so that a slow disk blocks no other work."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
        self._alone = asyncio.Lock()

    async def run(self, function: Callable[..., T], /, *arguments: object) -> T:
        """If cancelled, return only once the thread has ended: it must not use what its caller cleans up."""
        job = self._pool.submit(function, *arguments)
        result = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait([result])
            raise

    async def run_alone(self, function: Callable[..., T], /, *arguments: object) -> T:
        """`run`, one at a time: for what holds the interpreter's lock, as building thousands of rows does."""
        async with self._alone:
            return await self.run(function, *arguments)

    def close(self) -> None:
        self._pool.shutdown()


class TenantSlots:
    """Counts what each tenant has in flight; used on one event loop."""

    def __init__(self, what: str, *, per_tenant: int, total: int | None = None) -> None:
        self._what, self._per_tenant, self._total = what, per_tenant, total
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Raises AtCapacityError."""
        if self._taken[tenant] >= self._per_tenant:
            message = f"This tenant has {self._per_tenant} {self._what} in flight. Wait for one to end."
            raise AtCapacityError(message)
        if self._total is not None and self._taken.total() >= self._total:
            raise AtCapacityError(f"The gateway has {self._total} {self._what} in flight. Try again soon.")
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
