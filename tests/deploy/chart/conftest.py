"""
Tools that the chart's tests need, skipped loudly where they could not be installed.
"""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tests.deploy.chart.cluster import Cluster
from tests.deploy.chart.helm import HELM

ENGINE = HELM.parents[1] / "engine" / "bin" / "python"


@pytest.fixture(scope="session")
def helm() -> None:
    """Helm 3 is there."""
    if not HELM.exists():
        pytest.skip(
            "NO HELM: run `make deploy`, which says why it cannot be installed; the chart is not rendered"
        )


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """An empty cluster, and a Helm 4 that talks to it."""
    if not ENGINE.exists():
        pytest.skip(
            "NO HELM ENGINE: run `make deploy`, which says why it cannot be had; nothing is installed"
        )
    cluster = Cluster(ENGINE)
    runner = web.AppRunner(cluster.server.app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    cluster.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield cluster
    await runner.cleanup()
