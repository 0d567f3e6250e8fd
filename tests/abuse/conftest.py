"""
The targets of the abuse tests: the gateway of the integration tests, in the test's process, and one of its
own, whose memory can be measured.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from demo.process import ApplianceProcess
from tests.abuse.gateway_under_test import GatewayUnderTest
from tests.fakes import FakeWorker
from tests.integration.conftest import running, serve

__all__ = ["running", "serve", "start"]

Start = Callable[..., Awaitable[GatewayUnderTest]]


@asynccontextmanager
async def gateways(directory: Path) -> AsyncIterator[Start]:
    """
    Start a gateway process in front of a scripted worker in this process; settings of `api` by name, those of
    `batch` in a mapping.
    """
    async with AsyncExitStack() as stack:

        async def starting(
            worker: FakeWorker, *, batch: Mapping[str, int] = MappingProxyType({}), **api: Any
        ) -> GatewayUnderTest:
            await stack.enter_async_context(worker.serving())
            environment = {f"APPLIANCE_API__{name.upper()}": str(value) for name, value in api.items()}
            environment |= {f"APPLIANCE_BATCH__{name.upper()}": str(value) for name, value in batch.items()}
            environment |= {
                "APPLIANCE_POOL__URLS": json.dumps([worker.url]),
                "APPLIANCE_API__DRAIN_SECONDS": "1",
                "APPLIANCE_AUDIT__LOW_DISK_BYTES": "0",
                # The worker is in this process, which attackers keep busy: it is slow, not down.
                "APPLIANCE_POOL__CONNECT_SECONDS": "30",
                "APPLIANCE_MONITOR__SCRAPE_TIMEOUT_SECONDS": "30",
            }
            process = ApplianceProcess("gateway", data=directory / "data", environment=environment)
            stack.push_async_callback(asyncio.to_thread, process.__exit__)
            await asyncio.to_thread(process.wait_ready)
            return GatewayUnderTest(process, worker)

        yield starting


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """As `gateways`, for one test."""
    async with gateways(tmp_path) as starting:
        yield starting
